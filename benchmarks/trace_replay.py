"""A published trace replayed against the built-in engine: does all of it arrive, and in time?

    python benchmarks/trace_replay.py AzureLLMInferenceTrace_conv.csv [--duration 10m --time-scale 0.3 --sample 0.1]

`kneetune bench` sends what of the trace fits the embedded model's context, at the trace's own times. Its records and
the engine's counters are held against the trace: requests, prompt tokens, output tokens.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import yaml
from prometheus_client.parser import text_string_to_metric_families
from served import served

from tuner.bench_answer import BenchAnswer
from tuner.load.workload import Workload
from tuner.records import StageRecord

COUNTERS = ("vllm:request_success", "vllm:prompt_tokens", "vllm:generation_tokens")


def main() -> None:
    """Replay, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--format", default="azure")
    parser.add_argument("--duration", default="10m", help="of the trace, by its own clock")
    parser.add_argument("--time-scale", type=float, default=0.3)
    parser.add_argument("--sample", type=float, default=0.1, help="share of its requests")
    options = parser.parse_args()
    trace = {"format": options.format, "path": str(options.trace.resolve()), "duration": options.duration}
    trace |= {"time_scale": options.time_scale, "sample": options.sample}
    workload = {"trace": trace, "arrivals": {"kind": "trace"}}
    with tempfile.TemporaryDirectory() as name, served("embedded", "--device-memory", "1G") as url:
        folder = Path(name)
        (folder / "trace.yaml").write_text(yaml.safe_dump(workload), encoding="utf-8")
        command = [sys.executable, "-m", "tuner", "bench", url, "--workload", str(folder / "trace.yaml")]
        subprocess.run([*command, "--out", str(folder / "out")], check=False)
        counted = _counters(url)
        answer = BenchAnswer.model_validate_json((folder / "out" / "bench.json").read_text(encoding="utf-8"))
        requests = pd.read_parquet(folder / "out" / "requests.parquet")
    for line in _lines(Workload.model_validate(workload), answer, requests, counted):
        print(line)


def _counters(url: str) -> tuple[int, ...]:
    """The engine's counters since its start, over all labels."""
    with urllib.request.urlopen(f"{url}/metrics") as page:  # noqa: S310 - our own server
        families = {each.name: each for each in text_string_to_metric_families(page.read().decode())}
    return tuple(
        round(sum(sample.value for sample in families[name].samples if sample.name == f"{name}_total"))
        for name in COUNTERS
    )


def _lines(workload: Workload, answer: BenchAnswer, requests: pd.DataFrame, counted: tuple[int, ...]) -> Iterator[str]:
    stage = answer.stages[-1]
    max_model_len = answer.server.max_model_len
    assert max_model_len is not None  # noqa: S101 - the built-in engine tells it
    trace = workload.fitting_trace(max_model_len)
    assert trace is not None  # noqa: S101 - it is one
    sent = requests[requests["stage"] == stage.index]
    whole = sent[sent["error"].isna() & ~sent["unfinished"]]
    yield "| | requests | prompt tokens | output tokens |"
    yield "| --- | --- | --- | --- |"
    yield _row(
        f"trace, up to {max_model_len} tokens a request",
        (len(trace.rows), sum(row.input_tokens for row in trace.rows), sum(row.output_tokens for row in trace.rows)),
    )
    outputs, prompts = int(whole["num_output_tokens"].sum()), int(whole["num_prompt_tokens"].sum())
    yield _row("answered", (len(whole), prompts, outputs))
    yield _row(f"engine's counters: {len(answer.stages)} of these and the first look", counted)
    yield f"{stage.num_left_out} requests left out as too long; {_late(stage)}"
    yield (
        f"{stage.measured_s:.1f} s, {stage.num_failed} failed, {stage.num_rejected} rejected, valid: {stage.valid} "
        f"{'; '.join(stage.invalid_reasons)}; TTFT p95 {stage.ttft_p95_ms.value:.0f} ms, "
        f"ITL p95 {stage.itl_p95_ms.value:.1f} ms, {stage.output_throughput.value:.0f} tokens/s, "
        f"client CPU {stage.client_cpu_share}"
    )


def _row(name: str, figures: tuple[int, ...]) -> str:
    return f"| {name} | {' | '.join(str(figure) for figure in figures)} |"


def _late(stage: StageRecord) -> str:
    return f"sent late by p95 {stage.send_slip_p95_ms:.2f}, p99 {stage.send_slip_p99_ms:.2f} ms"


if __name__ == "__main__":
    main()
