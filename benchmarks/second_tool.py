"""The same engine measured by `kneetune bench` and by GuideLLM, in turn: do their figures agree?

    python benchmarks/second_tool.py --cache FOLDER --model DIR [--rounds 3] [--loads 1,4] [--rates 4] [--seconds 20]

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
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from load_tools import GuideLlm
from served import served
from tool_figures import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Figures,
    Load,
    Measure,
    interleaved,
    kneetune_bench,
    table,
)

SERVED = "model"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="where GuideLLM's environment is made and kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="", help="users at once: 1,4,16")
    parser.add_argument("--rates", default="", help="Poisson arrivals, requests/s: 2,8")
    parser.add_argument("--seconds", type=int, default=20, help="of each stage")
    parser.add_argument("--model", type=Path, required=True, help="a folder with weights and a tokenizer")
    parser.add_argument("--law", help="a simulated executor's law: no client can slow an engine that needs no CPU")
    options = parser.parse_args()
    guidellm = GuideLlm(options.cache.resolve(), options.model.resolve())
    print(f"GuideLLM {guidellm.prepare()}", file=sys.stderr)
    loads = [Load("users", float(load)) for load in options.loads.split(",") if load]
    loads += [Load("requests/s", float(rate)) for rate in options.rates.split(",") if rate]
    with tempfile.TemporaryDirectory() as folder, _engine(guidellm.tokenizer, options.law) as url:
        tools: dict[str, Measure] = {
            "kneetune": kneetune_bench(url, seconds=options.seconds),
            "GuideLLM": partial(_guidellm, url, guidellm, options.seconds),
        }
        found = interleaved(url, tools, loads, rounds=options.rounds, folder=Path(folder))
    for line in table(found, loads):
        print(line)


@contextlib.contextmanager
def _engine(model: Path, law: str | None) -> Iterator[str]:
    arguments = ["--max-num-seqs", "64", "--served-model-name", SERVED, "--no-enable-prefix-caching"]
    arguments += ["--device-memory", "1G"] if law is None else ["--executor", "simulated", "--law", law]
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:1])
    with served(str(model), *arguments) as url:
        os.sched_setaffinity(0, cpus[1:] or cpus)
        yield url


def _guidellm(url: str, guidellm: GuideLlm, seconds: int, load: Load, out: Path, seed: int) -> Figures:
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
    own = os.environ | dict(guidellm.environment())
    own.pop("PYTHONPATH", None)
    with (out / "output.txt").open("wb") as log:
        subprocess.run(command, check=True, env=own, stdout=log, stderr=subprocess.STDOUT, cwd=out)
    metrics = json.loads((out / "result.json").read_text())["benchmarks"][0]["metrics"]
    return Figures(
        output_throughput=metrics["output_tokens_per_second"]["successful"]["mean"],
        in_flight=metrics["request_concurrency"]["successful"]["mean"],
        ttft_p50_ms=metrics["time_to_first_token_ms"]["successful"]["median"],
        tpot_p50_ms=metrics["inter_token_latency_ms"]["successful"]["median"],
        ttft_mean_ms=metrics["time_to_first_token_ms"]["successful"]["mean"],
    )


if __name__ == "__main__":
    main()
