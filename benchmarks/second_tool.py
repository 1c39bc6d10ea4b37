"""The same engine measured by `kneetune bench` and by GuideLLM, in turn: do their figures agree?

    python benchmarks/second_tool.py --cache FOLDER [--rounds 3] [--loads 1,2,4] [--seconds 20]

One built-in engine with a random model of 29 million parameters serves both; each round goes ours, theirs or theirs,
ours. Lengths are fixed, GuideLLM is given the engine's own tokenizer. Its `inter_token_latency_ms` is the mean gap of
each request, which others call TPOT. Whatever a tool's figures differ by from round to round is shown as its range.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoints import SHAPES, make_checkpoint
from load_tools import GuideLlm

MODEL = SHAPES[1]
PORT = 8197
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One stage as a tool reports it."""

    output_throughput: float
    ttft_p50_ms: float
    tpot_p50_ms: float


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="where GuideLLM's environment is made and kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="1,2,4")
    parser.add_argument("--seconds", type=int, default=20, help="of each stage")
    parser.add_argument("--law", help="a simulated executor's law: no client can slow an engine that needs no CPU")
    options = parser.parse_args()
    model = options.cache.resolve() / MODEL.name
    if not model.exists():
        make_checkpoint(MODEL, model)
    guidellm = GuideLlm(options.cache.resolve(), model)
    print(f"GuideLLM {guidellm.prepare()}", file=sys.stderr)
    loads = [int(load) for load in options.loads.split(",")]
    found: dict[tuple[str, int], list[Figures]] = {}
    with tempfile.TemporaryDirectory() as folder, _engine(model, Path(folder), options.law) as url:
        for number in range(options.rounds):
            for load in loads:
                for tool in ("kneetune", "GuideLLM") if number % 2 == 0 else ("GuideLLM", "kneetune"):
                    out = Path(folder) / f"{tool}-{load}-{number}"
                    measure = _ours if tool == "kneetune" else _theirs
                    figures = measure(url, load, options.seconds, out, guidellm, model)
                    found.setdefault((tool, load), []).append(figures)
                    print(f"round {number}, load {load}, {tool}: {figures}", file=sys.stderr)
    for line in _table(found, loads):
        print(line)
    return 0


@contextlib.contextmanager
def _engine(model: Path, folder: Path, law: str | None) -> Iterator[str]:
    url = f"http://127.0.0.1:{PORT}"
    command = [
        *(sys.executable, "-m", "engine", "serve", str(model), "--port", str(PORT)),
        *(("--device-memory", "2G") if law is None else ("--executor", "simulated", "--law", law)),
        *("--served-model-name", MODEL.name, "--max-num-seqs", "64", "--no-enable-prefix-caching"),
    ]
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=_environment())
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", PORT), timeout=1).close()
                break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def _ours(url: str, load: int, seconds: int, out: Path, _: GuideLlm, __: Path) -> Figures:
    workload = out.with_suffix(".yaml")
    lengths = (
        f"input_len: {{kind: fixed, tokens: {PROMPT_TOKENS}}}\noutput_len: {{kind: fixed, tokens: {OUTPUT_TOKENS}}}\n"
    )
    workload.write_text(lengths)
    command = [
        *(sys.executable, "-m", "tuner", "bench", url, "--workload", str(workload), "--loads", str(load)),
        *("--time", f"{seconds}s", "--out", str(out)),
    ]
    subprocess.run(command, check=False, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stage = json.loads((out / "stages.jsonl").read_text().splitlines()[-1])
    if not stage["valid"]:
        print(f"ours is invalid: {stage['invalid_reasons']}", file=sys.stderr)
    return Figures(
        output_throughput=stage["output_throughput"]["value"],
        ttft_p50_ms=stage["ttft_p50_ms"]["value"],
        tpot_p50_ms=stage["tpot_p50_ms"]["value"],
    )


def _theirs(url: str, load: int, seconds: int, out: Path, guidellm: GuideLlm, model: Path) -> Figures:
    out.mkdir()
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    command = [
        *(
            str(guidellm.executable),
            "run",
            "--disable-console",
            "--backend",
            f"kind=openai_http,target={url},model={MODEL.name},request_format=/v1/completions",
        ),
        *("--profile", f"kind=concurrent,streams={load}", "--data", data),
        *("--constraint", f"kind=max_duration,seconds={seconds}"),
        *("--tokenizer", f"kind=huggingface_auto,model={model}"),
        *("--output", f"kind=json,path={out / 'result.json'}"),
    ]
    environment = os.environ | dict(guidellm.environment())
    with (out / "output.txt").open("wb") as log:
        subprocess.run(command, check=True, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=out)
    metrics = json.loads((out / "result.json").read_text())["benchmarks"][0]["metrics"]
    return Figures(
        output_throughput=metrics["output_tokens_per_second"]["successful"]["mean"],
        ttft_p50_ms=metrics["time_to_first_token_ms"]["successful"]["median"],
        tpot_p50_ms=metrics["inter_token_latency_ms"]["successful"]["median"],
    )


def _table(found: dict[tuple[str, int], list[Figures]], loads: Sequence[int]) -> Iterator[str]:
    yield "| load | figure | kneetune | GuideLLM | ratio |"
    yield "| --- | --- | --- | --- | --- |"
    for load in loads:
        for name, unit in (("output_throughput", "tokens/s"), ("ttft_p50_ms", "ms"), ("tpot_p50_ms", "ms")):
            ours, theirs = ([getattr(each, name) for each in found[tool, load]] for tool in ("kneetune", "GuideLLM"))
            ratio = statistics.fmean(ours) / statistics.fmean(theirs)
            yield f"| {load} | {name.removesuffix('_ms')}, {unit} | {_spread(ours)} | {_spread(theirs)} | {ratio:.3f} |"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4g} ({min(values):.4g}–{max(values):.4g})"


if __name__ == "__main__":
    raise SystemExit(main())
