"""Stages of ours beside `vllm bench serve` on one real vLLM server, in turn: do their figures agree?

    python benchmarks/vllm_bench_serve.py --vllm ENV/bin/vllm [--loads 1,4,8] [--rounds 3] [--seconds 30] [--raw FILE]

Both send prompts and ask for answers of lengths drawn alike. Theirs come from a file of digits, each of which the
tokenizer takes for one token, so that the lengths are exact; ours are token ids. What `vllm bench serve` reports
includes the time in which a run fills and drains. The first table therefore compares what is worked out from its times
of every request, between the end of the first wave and the last send, while as many are in flight as were asked for.
The second has what it reports itself.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from checkpoints import SHAPES, make_checkpoint
from tool_figures import OUTPUT_TOKENS, PROMPT_TOKENS, Figures, Found, Load, Measure, interleaved, kneetune_bench, table

from tuner.engines.registry import adapter_of
from tuner.engines.starting import serving
from tuner.job import EngineSpec, load_job
from tuner.parameters import SearchedValues
from tuner.provenance import hardware

SERVED = "model"
THEIRS = "vllm bench serve"


@dataclass(frozen=True, slots=True)
class Their:
    """The command, and what it needs of the server."""

    vllm: Path
    url: str
    tokenizer: Path
    seconds: int


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the command that starts it")
    parser.add_argument("--loads", default="1,4,8", help="users at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=30, help="of each stage, about")
    parser.add_argument("--raw", type=Path, help="where the figures of every round go, as JSON")
    options = parser.parse_args()
    loads = [Load("users", float(load)) for load in options.loads.split(",")]
    with tempfile.TemporaryDirectory() as folder, _server(options.vllm, Path(folder)) as url:
        whole: Found = {}
        their = Their(options.vllm, url, Path(folder) / "model", options.seconds)
        tools: dict[str, Measure] = {
            "kneetune": kneetune_bench(url, seconds=options.seconds),
            THEIRS: partial(_theirs, their, whole),
        }
        found = interleaved(url, tools, loads, rounds=options.rounds, folder=Path(folder))
    print("\n".join(table(found, loads)), end="\n\n")
    print("\n".join(table({key: found[key] for key in found if key[0] == "kneetune"} | whole, loads)))
    if options.raw is not None:
        rounds = [
            {"tool": tool, "load": str(load), **asdict(each)}
            for (tool, load), figures in (found | whole).items()
            for each in figures
        ]
        options.raw.write_text(json.dumps({"hardware": hardware(), "rounds": rounds}, indent=1) + "\n")


@contextlib.contextmanager
def _server(vllm: Path, folder: Path) -> Iterator[str]:
    """A vLLM with room for all, and no prefix cache."""
    make_checkpoint(SHAPES[1], folder / "model")
    given = {
        "name": "vllm",
        "command": [str(vllm)],
        "fixed": {"max_model_len": 1024, "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**30},
    }
    job = load_job("vllm-cpu", {"model": str(folder / "model"), "engine": given})
    engine: EngineSpec = job.engine
    config = job.config(SearchedValues(max_num_seqs=64, max_num_batched_tokens=1024, gpu_memory_utilization=0.5))
    adapter = adapter_of(engine)
    with serving(adapter, job.model, config, engine, served_model_name=SERVED, directory=folder) as running:
        yield running.base_url


def _theirs(their: Their, whole: Found, load: Load, out: Path, number: int) -> Figures:
    num_requests = _num_requests(whole, load, their.seconds)
    _write_prompts(out / "prompts.jsonl", num_requests, seed=int(load.value) + 100 * number)
    command = [
        *(str(their.vllm), "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", their.url, "--model", SERVED, "--tokenizer", str(their.tokenizer)),
        *("--dataset-name", "custom", "--dataset-path", str(out / "prompts.jsonl"), "--custom-output-len", "-1"),
        *("--skip-chat-template", "--num-prompts", str(num_requests), "--max-concurrency", f"{load.value:g}"),
        *("--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(out), "--result-filename", "result.json"),
    ]
    own = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    own.pop("PYTHONPATH", None)
    with (out / "output.txt").open("wb") as log:
        subprocess.run(command, check=True, env=own, stdout=log, stderr=subprocess.STDOUT, cwd=out)
    result = json.loads((out / "result.json").read_text())
    whole.setdefault((f"{THEIRS}, whole run", load), []).append(_as_reported(result))
    return _steady(result, int(load.value))


def _num_requests(whole: Found, load: Load, seconds: int) -> int:
    """As many as take that long, by the first round; that one is a guess."""
    seen = whole.get((f"{THEIRS}, whole run", load))
    rate_rps = seen[0].request_throughput if seen else 1.5 * load.value**0.7
    return max(3 * int(load.value), round(rate_rps * seconds))


def _write_prompts(path: Path, count: int, *, seed: int) -> None:
    """Digits are tokens of their own: so many digits are so many tokens."""
    rng = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            num_prompt, num_output = (int(rng.integers(low, high + 1)) for low, high in (PROMPT_TOKENS, OUTPUT_TOKENS))
            # Begins with a letter, or the reader of the file takes it for a number.
            prompt = "x" + "".join(map(str, rng.integers(0, 10, num_prompt - 1)))
            file.write(json.dumps({"prompt": prompt, "output_tokens": num_output}) + "\n")


def _as_reported(result: dict[str, Any]) -> Figures:
    """Their own figures, over the whole run."""
    return Figures(
        output_throughput=result["output_throughput"],
        request_throughput=result["request_throughput"],
        in_flight=result["request_throughput"] * result["mean_e2el_ms"] / 1e3,
        ttft_p50_ms=result["median_ttft_ms"],
        itl_p50_ms=result["median_itl_ms"],
        tpot_p50_ms=result["median_tpot_ms"],
        ttft_mean_ms=result["mean_ttft_ms"],
        prompt_tokens=result["total_input_tokens"] / result["completed"],
        output_tokens=result["total_output_tokens"] / result["completed"],
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as they stamped it. Unit: seconds, of their clock."""

    start_s: float
    tokens_s: tuple[float, ...]
    num_prompt: int

    @property
    def ttft_s(self) -> float:
        """From its send to its first token."""
        return self.tokens_s[0] - self.start_s

    @property
    def end_s(self) -> float:
        """Its last token."""
        return self.tokens_s[-1]


def _steady(result: dict[str, Any], num_users: int) -> Figures:
    """Worked out as ours are: tokens that come in the window, requests that end in it."""
    answers = [
        Answer(start_s, tuple(itertools.accumulate(itls_s, initial=start_s + ttft_s)), int(num_prompt))
        for start_s, ttft_s, itls_s, num_prompt in zip(
            result["start_times"], result["ttfts"], result["itls"], result["input_lens"], strict=True
        )
    ]
    answers.sort(key=lambda answer: answer.start_s)
    from_s, to_s = max(answer.end_s for answer in answers[:num_users]), answers[-1].start_s
    length_s = to_s - from_s
    ended = [answer for answer in answers if from_s <= answer.end_s < to_s]
    gaps_s = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.tokens_s, answer.tokens_s[1:], strict=False)
        if from_s <= later < to_s
    ]
    overlaps_s = [max(0.0, min(answer.end_s, to_s) - max(answer.start_s, from_s)) for answer in answers]
    return Figures(
        output_throughput=sum(from_s <= at_s < to_s for answer in answers for at_s in answer.tokens_s) / length_s,
        request_throughput=len(ended) / length_s,
        in_flight=sum(overlaps_s) / length_s,
        ttft_p50_ms=1e3 * median(answer.ttft_s for answer in ended),
        itl_p50_ms=1e3 * median(gaps_s),
        tpot_p50_ms=1e3 * median((answer.end_s - answer.tokens_s[0]) / (len(answer.tokens_s) - 1) for answer in ended),
        ttft_mean_ms=1e3 * fmean(answer.ttft_s for answer in answers),
        prompt_tokens=fmean(answer.num_prompt for answer in ended),
        output_tokens=fmean(len(answer.tokens_s) for answer in ended),
    )


if __name__ == "__main__":
    main()
