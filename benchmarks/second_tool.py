"""The same engine measured by `kneetune bench` and by GuideLLM, in turn: do their figures agree?

    python benchmarks/second_tool.py --cache FOLDER [--rounds 3] [--loads 1,4] [--rates 4] [--seconds 20] [--model DIR]

One built-in engine serves both, on one core, and they run on the others: a client that takes its time on the engine's
core would slow what it measures. Each round goes ours, theirs or theirs, ours. Lengths are drawn alike by both: users
with answers of one length march in step. GuideLLM is given the engine's own tokenizer and in every round another seed.
Its `inter_token_latency_ms` is the mean gap of each request, which others call TPOT.

A figure is shown as the mean of the rounds with its 95 % interval; the ratio is of the pairs that a round makes. Beside
each tool's mean TTFT stands the engine's own over the same run, from its histogram: who differs from it is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import pandas as pd
import yaml
from load_tools import GuideLlm

from tuner.measure.latency import student_t_975

PROMPT_TOKENS, OUTPUT_TOKENS = (32, 96), (16, 48)
"""Least and most, all between them equally likely. Unit: tokens."""

SERVED = "model"
ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "engine" / "models" / "embedded"


@dataclass(frozen=True, slots=True)
class Load:
    """Users who wait for their answers, or Poisson arrivals a second."""

    arrivals: Literal["users", "requests/s"]
    value: float

    def __str__(self) -> str:
        return f"{self.value:g} {self.arrivals}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One stage as a tool reports it, and the engine's own mean of TTFT meanwhile."""

    output_throughput: float
    in_flight: float
    ttft_p50_ms: float
    tpot_p50_ms: float
    ttft_mean_ms: float
    engine_ttft_mean_ms: float = math.nan

    @property
    def throughput_per_request(self) -> float:
        """Tokens/s of each request really in flight: a tool that holds fewer than asked gets fewer in all."""
        return self.output_throughput / self.in_flight


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="where GuideLLM's environment is made and kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="", help="users at once: 1,4,16")
    parser.add_argument("--rates", default="", help="Poisson arrivals, requests/s: 2,8")
    parser.add_argument("--seconds", type=int, default=20, help="of each stage")
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="a folder with weights and a tokenizer")
    parser.add_argument("--law", help="a simulated executor's law: no client can slow an engine that needs no CPU")
    options = parser.parse_args()
    guidellm = GuideLlm(options.cache.resolve(), options.model.resolve())
    print(f"GuideLLM {guidellm.prepare()}", file=sys.stderr)
    loads = [Load("users", float(load)) for load in options.loads.split(",") if load]
    loads += [Load("requests/s", float(rate)) for rate in options.rates.split(",") if rate]
    found: dict[tuple[str, Load], list[Figures]] = {}
    with tempfile.TemporaryDirectory() as folder, _engine(guidellm.tokenizer, options.law) as url:
        for number in range(options.rounds):
            for load in loads:
                for tool in ("kneetune", "GuideLLM") if number % 2 == 0 else ("GuideLLM", "kneetune"):
                    out = Path(folder) / f"{tool}-{load.arrivals[0]}{load.value:g}-{number}"
                    figures = _measured(tool, url, load, options.seconds, out, guidellm, seed=number)
                    found.setdefault((tool, load), []).append(figures)
                    print(f"round {number}, {load}, {tool}: {figures}", file=sys.stderr, flush=True)
    for line in _table(found, loads):
        print(line)


@contextlib.contextmanager
def _engine(model: Path, law: str | None) -> Iterator[str]:
    command = [sys.executable, "-m", "engine", "serve", str(model), "--port", "0", "--max-num-seqs", "64"]
    command += ["--served-model-name", SERVED, "--no-enable-prefix-caching"]
    command += ["--device-memory", "1G"] if law is None else ["--executor", "simulated", "--law", law]
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:1])
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment())
    os.sched_setaffinity(0, cpus[1:] or cpus)
    try:
        assert process.stderr is not None  # noqa: S101 - a pipe was asked for
        ready = next(json.loads(line) for line in process.stderr if line.startswith('{"event": "ready"'))
        yield f"http://{ready['host']}:{ready['port']}"
    finally:
        process.terminate()
        process.communicate()


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def _measured(tool: str, url: str, load: Load, seconds: int, out: Path, guidellm: GuideLlm, *, seed: int) -> Figures:
    before_s, before = _engine_ttfts(url)
    out.mkdir()
    if tool == "kneetune":
        figures = _ours(url, load, seconds, out)
    else:
        figures = _theirs(url, load, seconds, out, guidellm, seed=seed)
    after_s, after = _engine_ttfts(url)
    mean_ms = 1e3 * (after_s - before_s) / (after - before)
    return replace(figures, engine_ttft_mean_ms=mean_ms)


def _engine_ttfts(url: str) -> tuple[float, float]:
    """Sum and count of the engine's own times to first token since its start."""
    with urllib.request.urlopen(f"{url}/metrics") as page:  # noqa: S310 - our own server
        lines = [line for line in page.read().decode().splitlines() if line.startswith("vllm:time_to_first_token")]
    total_s, count = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:time_to_first_token_seconds_{name}"))
        for name in ("sum", "count")
    )
    return total_s, count


def _ours(url: str, load: Load, seconds: int, out: Path) -> Figures:
    lengths = [{"kind": "uniform", "low": low, "high": high} for low, high in (PROMPT_TOKENS, OUTPUT_TOKENS)]
    workload = out / "workload.yaml"
    workload.write_text(yaml.safe_dump(dict(zip(("input_len", "output_len"), lengths, strict=True))))
    at = ["--loads", f"{load.value:g}"] if load.arrivals == "users" else ["--rates", f"{load.value:g}"]
    command = [sys.executable, "-m", "tuner", "bench", url, "--workload", str(workload), *at]
    command += ["--time", f"{seconds}s", "--out", str(out / "bench")]
    subprocess.run(command, check=False, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stage = json.loads((out / "bench" / "stages.jsonl").read_text().splitlines()[-1])
    if not stage["valid"]:
        print(f"ours is invalid: {stage['invalid_reasons']}", file=sys.stderr)
    # All requests, as the engine counts all: those of the warm-up too.
    requests = pd.read_parquet(out / "bench" / "requests.parquet")
    return Figures(
        output_throughput=stage["output_throughput"]["value"],
        in_flight=stage["mean_in_flight"],
        ttft_p50_ms=stage["ttft_p50_ms"]["value"],
        tpot_p50_ms=stage["tpot_p50_ms"]["value"],
        ttft_mean_ms=1e3 * float((requests["first_token_s"] - requests["intended_s"]).mean()),
    )


def _theirs(url: str, load: Load, seconds: int, out: Path, guidellm: GuideLlm, *, seed: int) -> Figures:
    data = f"kind=synthetic_text,prompt_tokens={sum(PROMPT_TOKENS) // 2},output_tokens={sum(OUTPUT_TOKENS) // 2}"
    for name, (low, high) in (("prompt", PROMPT_TOKENS), ("output", OUTPUT_TOKENS)):
        data += f",{name}_tokens_min={low},{name}_tokens_max={high}"
    is_closed = load.arrivals == "users"
    profile = f"kind=concurrent,streams={load.value:g}" if is_closed else f"kind=poisson,rate={load.value:g}"
    command = [
        *(str(guidellm.executable), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},model={SERVED},request_format=/v1/completions"),
        *("--profile", profile, "--data", data, "--seed", f"kind=static,value={seed}"),
        *("--constraint", f"kind=max_duration,seconds={seconds}"),
        *("--tokenizer", f"kind=huggingface_auto,model={guidellm.tokenizer}"),
        *("--output", f"kind=json,path={out / 'result.json'}"),
    ]
    environment = os.environ | dict(guidellm.environment())
    environment.pop("PYTHONPATH", None)
    with (out / "output.txt").open("wb") as log:
        subprocess.run(command, check=True, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=out)
    metrics = json.loads((out / "result.json").read_text())["benchmarks"][0]["metrics"]
    return Figures(
        output_throughput=metrics["output_tokens_per_second"]["successful"]["mean"],
        in_flight=metrics["request_concurrency"]["successful"]["mean"],
        ttft_p50_ms=metrics["time_to_first_token_ms"]["successful"]["median"],
        tpot_p50_ms=metrics["inter_token_latency_ms"]["successful"]["median"],
        ttft_mean_ms=metrics["time_to_first_token_ms"]["successful"]["mean"],
    )


def _table(found: dict[tuple[str, Load], list[Figures]], loads: Sequence[Load]) -> Iterator[str]:
    yield "| load | figure | kneetune | GuideLLM | ratio |"
    yield "| --- | --- | --- | --- | --- |"
    for load in loads:
        for name in (*(each.name for each in fields(Figures)), "throughput_per_request"):
            ours, theirs = ([getattr(seen, name) for seen in found[tool, load]] for tool in ("kneetune", "GuideLLM"))
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            yield f"| {load} | {name} | {_interval(ours)} | {_interval(theirs)} | {_interval(ratios)} |"


def _interval(values: Sequence[float]) -> str:
    """The mean with the half width of its 95 % interval, by Student's t over the rounds."""
    mean = fmean(values)
    if len(values) < 2:
        return f"{mean:.4g}"
    half = student_t_975(len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean:.4g} ± {half:.2g}"


if __name__ == "__main__":
    main()
