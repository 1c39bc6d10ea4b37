"""Load generators as they are run from a command line: ours and its peers, each in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from truth import MODEL, Schedule

PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a tool is asked to send."""

    arrivals: Literal["closed", "poisson"]
    streams: int
    """Requests at once in a closed loop; the mean number of them for Poisson arrivals."""

    num_requests: int
    request_s: float
    """How long the server takes for one."""

    output_tokens: int

    @property
    def rate_rps(self) -> float:
        """Poisson arrivals a second that keep so many streams in flight on average."""
        return self.streams / self.request_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution as a tool reports it, ms. None: not given."""

    mean: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What a tool said. None: not given."""

    ttft_ms: Spread
    itl_ms: Spread
    itl_of: Literal["gaps", "requests"]
    """What the ITL's percentiles are over: all gaps, or the mean gap of each request."""

    num_completed: int | None
    num_failed: int | None
    mean_in_flight: float | None = None
    window_s: tuple[float, float] | None = None
    """The part of the run, from its first send, that the figures are of. None: all of it."""


class Tool(ABC):
    """A load generator with a command line."""

    name: str

    @abstractmethod
    def prepare(self) -> str:
        """Install what is not there yet; returns the version.

        Raises:
            OSError, subprocess.CalledProcessError: where that cannot be done.
        """

    @abstractmethod
    def command(self, load: Load, url: str, out: Path) -> list[str]:
        """The command that sends the load and leaves its results in `out`."""

    @abstractmethod
    def read(self, out: Path) -> Reported:
        """What it reported.

        Raises:
            OSError, ValueError, KeyError: where the results are not there or not as they should be.
        """

    def environment(self) -> Mapping[str, str]:
        """What is set for it beside the inherited environment."""
        return {}


class Ours(Tool):
    """`measure_stage`, all of it: scrapes, lag probe, records, validity."""

    name = "kneetune"

    def prepare(self) -> str:
        """It is here."""
        return "this tree"

    def command(self, load: Load, url: str, out: Path) -> list[str]:
        """The product's own stage in a process of its own."""
        seconds = load.num_requests * load.request_s / load.streams
        streams_or_rate = load.streams if load.arrivals == "closed" else load.rate_rps
        values = map(str, (url, load.arrivals, streams_or_rate, load.output_tokens, seconds))
        return [sys.executable, str(Path(__file__).with_name("our_client.py")), *values, str(out / "result.json")]

    def read(self, out: Path) -> Reported:
        """As `our_client.py` wrote it."""
        data = json.loads((out / "result.json").read_text())
        data |= {name: Spread(**data[name]) for name in ("ttft_ms", "itl_ms")}
        return Reported(**data | {"window_s": tuple(data["window_s"])})

    def environment(self) -> Mapping[str, str]:
        """This tree, whatever is installed."""
        return {"PYTHONPATH": str(Path(__file__).parents[1])}


class Vllm(Tool):
    """`vllm bench serve`, of an environment that is there."""

    name = "vllm bench serve"

    def __init__(self, python: Path, tokenizer: Path) -> None:
        self._python = python
        self.tokenizer = tokenizer

    def prepare(self) -> str:
        """Only looks: an environment with vLLM takes minutes and gigabytes."""
        if not self._python.exists():
            raise FileNotFoundError(f"{self._python} is not there: name a Python that has vLLM with --vllm-python")
        return _version(self._python, "vllm")

    def command(self, load: Load, url: str, out: Path) -> list[str]:
        """Completions of random prompts."""
        load_flags = ["--max-concurrency", str(load.streams)]
        if load.arrivals == "poisson":
            load_flags = ["--request-rate", str(load.rate_rps)]
        return [
            *(str(self._python), "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"),
            *(
                "--endpoint",
                "/v1/completions",
                "--base-url",
                url,
                "--model",
                MODEL,
                "--tokenizer",
                str(self.tokenizer),
            ),
            *("--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS)),
            *("--random-output-len", str(load.output_tokens), "--num-prompts", str(load.num_requests), *load_flags),
            *("--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95,99"),
            *("--disable-tqdm", "--save-result", "--result-dir", str(out), "--result-filename", "result.json"),
        ]

    def read(self, out: Path) -> Reported:
        """Its result file."""
        data = json.loads((out / "result.json").read_text())

        def spread(name: str) -> Spread:
            return Spread(mean=data[f"mean_{name}_ms"], p95=data[f"p95_{name}_ms"], p99=data[f"p99_{name}_ms"])

        return Reported(
            ttft_ms=spread("ttft"),
            itl_ms=spread("itl"),
            itl_of="gaps",
            num_completed=data["completed"],
            num_failed=data["failed"],
        )

    def environment(self) -> Mapping[str, str]:
        """Nothing is asked of a hub."""
        return {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


class GuideLlm(Tool):
    """GuideLLM with one worker process: it gets one core, as all do."""

    name = "GuideLLM"
    requirements = ("guidellm==0.8.1", "torch<2.14")

    def __init__(self, cache: Path, tokenizer: Path) -> None:
        self._folder = cache / "guidellm"
        self.tokenizer = tokenizer

    @property
    def executable(self) -> Path:
        """Its command."""
        return self._folder / "bin" / "guidellm"

    def prepare(self) -> str:
        """Its own environment."""
        return _version(_environment(self._folder, self.requirements), "guidellm")

    def command(self, load: Load, url: str, out: Path) -> list[str]:
        """A concurrent or a Poisson profile over synthetic text."""
        profile = f"kind=concurrent,streams={load.streams}"
        if load.arrivals == "poisson":
            profile = f"kind=poisson,rate={load.rate_rps}"
        data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={load.output_tokens}"
        return [
            *(str(self.executable), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={url},model={MODEL}", "--profile", profile, "--data", data),
            *("--constraint", f"kind=max_requests,count={load.num_requests}"),
            *("--tokenizer", f"kind=huggingface_auto,model={self.tokenizer}"),
            *("--output", f"kind=json,path={out / 'result.json'}"),
        ]

    def read(self, out: Path) -> Reported:
        """Its report of one benchmark."""
        metrics = json.loads((out / "result.json").read_text())["benchmarks"][0]["metrics"]

        def spread(name: str) -> Spread:
            found = metrics[name]["successful"]
            return Spread(mean=found["mean"], p95=found["percentiles"]["p95"], p99=found["percentiles"]["p99"])

        return Reported(
            ttft_ms=spread("time_to_first_token_ms"),
            itl_ms=spread("inter_token_latency_ms"),
            itl_of="requests",
            num_completed=metrics["request_totals"]["successful"],
            num_failed=metrics["request_totals"]["errored"],
            mean_in_flight=metrics["request_concurrency"]["successful"]["mean"],
        )

    def environment(self) -> Mapping[str, str]:
        """One worker: more on one core only get in each other's way."""
        return {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}


class AiPerf(Tool):
    """AIPerf, counting the server's tokens: its own count of the stub's text is another."""

    name = "AIPerf"
    requirements = ("aiperf==0.13.0",)

    def __init__(self, cache: Path, tokenizer: Path) -> None:
        self._folder = cache / "aiperf"
        self.tokenizer = tokenizer

    def prepare(self) -> str:
        """Its own environment."""
        return _version(_environment(self._folder, self.requirements), "aiperf")

    def command(self, load: Load, url: str, out: Path) -> list[str]:
        """Completions of synthetic prompts."""
        load_flags = ["--concurrency", str(load.streams)]
        if load.arrivals == "poisson":
            load_flags = ["--request-rate", str(load.rate_rps), "--arrival-pattern", "poisson"]
        return [
            *(
                str(self._folder / "bin" / "aiperf"),
                "profile",
                "-m",
                MODEL,
                "--url",
                url,
                "--endpoint-type",
                "completions",
            ),
            *(
                "--streaming",
                "--tokenizer",
                str(self.tokenizer),
                "--use-server-token-count",
                "--use-legacy-max-tokens",
            ),
            *("--isl", str(PROMPT_TOKENS), "--osl", str(load.output_tokens), "--num-prompts", str(load.num_requests)),
            *("--request-count", str(load.num_requests), *load_flags, "--extra-inputs", "ignore_eos:true"),
            *("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(out)),
        ]

    def read(self, out: Path) -> Reported:
        """Its summary; chunks are tokens but where the server packs them."""
        data = json.loads((out / "profile_export_aiperf.json").read_text())
        gaps = data.get("inter_chunk_latency", {})
        per_request = data.get("inter_token_latency", {})
        is_packed = per_request.get("avg", 0) < 0.9 * gaps.get("avg", 0)
        ttft, itl = data.get("time_to_first_token", {}), per_request if is_packed else gaps
        failed = data.get("error_request_count", {}).get("avg", 0)
        return Reported(
            ttft_ms=Spread(mean=ttft.get("avg"), p95=ttft.get("p95"), p99=ttft.get("p99")),
            itl_ms=Spread(mean=itl.get("avg"), p95=itl.get("p95"), p99=itl.get("p99")),
            itl_of="requests" if is_packed else "gaps",
            num_completed=_whole(data.get("request_count", {}).get("avg")),
            num_failed=_whole(failed),
            mean_in_flight=data.get("effective_concurrency", {}).get("avg"),
        )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _environment(folder: Path, requirements: tuple[str, ...]) -> Path:
    """A virtual environment with these requirements, made where it is not there; returns its Python."""
    python, done = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join(requirements)
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", *requirements], check=True, env=_clean_environment()
        )
        done.write_text(wanted)
    return python


def _version(python: Path, distribution: str) -> str:
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    done = subprocess.run(
        [str(python), "-c", code], check=True, capture_output=True, text=True, env=_clean_environment()
    )
    return done.stdout.strip()


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def started(tool: Tool, load: Load, url: str, out: Path, *, cpu: int | None) -> subprocess.Popen[Any]:
    """Start the tool on one core; what it prints goes to `out/output.txt`."""
    out.mkdir(parents=True)
    command = tool.command(load, url, out)
    if cpu is not None:
        command = ["taskset", "--cpu-list", str(cpu), *command]
    with (out / "output.txt").open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=_clean_environment() | tool.environment(), cwd=out
        )


def load_of(schedule: Schedule, arrivals: Literal["closed", "poisson"], streams: int, *, rounds: float) -> Load:
    """A load of so many requests for each stream."""
    tokens = schedule.tokens or 1
    request_s = 1e-3 * (schedule.ttft_ms + (tokens - 1) * schedule.itl_ms)
    return Load(
        arrivals=arrivals,
        streams=streams,
        num_requests=max(1, round(rounds * streams)),
        request_s=request_s,
        output_tokens=tokens,
    )
