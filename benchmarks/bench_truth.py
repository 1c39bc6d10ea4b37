"""`kneetune bench` beside the truth: `python benchmarks/bench_truth.py`.

A simulated engine with known step times is served over real HTTP and measured; what its law implies for the very
requests that were sent is worked out by `law_truth.py`. Takes some 20 minutes; steps of 0.1 s and more keep what HTTP
and a busy machine add well below the differences looked for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

import pandas as pd
import yaml
from law_truth import Truth, best_load, closed_loop

from engine.config import EngineConfig
from tuner.bench_answer import BenchAnswer
from tuner.records import StageRecord

LAW = {
    "description": "0.1 s a step, 16 ms a decoding request, 0.2 ms a prompt token",
    "max_model_len": 2048,
    "dtype": "float32",
    "step_time": {"combine": "sum", "base_s": 0.1, "decode_token_s": 0.016, "prefill_token_s": 0.0002},
    "memory": {
        "total_bytes": 10**9,
        "weights_bytes": 1000,
        "activation_bytes_per_token": 1,
        "kv_bytes_per_token": 1000,
    },
}
WORKLOAD = {
    "input_len": {"kind": "uniform", "low": 64, "high": 160},
    "output_len": {"kind": "uniform", "low": 8, "high": 24},
}
FENCE = 128
MAX_LOAD = 64
LONG_RUN_S = (200.0, 2000.0)
"""Window of the law's own curve, which does not depend on what was sent."""

FIGURES = ("output tok/s", "TTFT p50", "TTFT p95", "ITL p50", "ITL p95")


@contextmanager
def _server(law: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "engine", "serve", "embedded", "--port", "0", "--executor", "simulated"]
    command += ["--law", str(law), "--max-num-seqs", str(FENCE)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None  # noqa: S101 - a pipe was asked for
        ready = next(json.loads(line) for line in process.stderr if line.startswith('{"event": "ready"'))
        yield f"http://{ready['host']}:{ready['port']}"
    finally:
        process.terminate()
        process.communicate()


def _measure(folder: Path, law: Path, time: str) -> BenchAnswer:
    workload = folder / "workload.yaml"
    workload.write_text(yaml.safe_dump(WORKLOAD), encoding="utf-8")
    with _server(law) as url:
        options = [
            "--workload",
            str(workload),
            "--max-load",
            str(MAX_LOAD),
            "--time",
            time,
            "--out",
            str(folder / "out"),
        ]
        subprocess.run([sys.executable, "-m", "tuner", "bench", url, *options], check=False)
    return BenchAnswer.model_validate_json((folder / "out" / "bench.json").read_text(encoding="utf-8"))


def _truth(config: EngineConfig, stage: StageRecord, requests: pd.DataFrame) -> Truth:
    """What the law implies for the requests of a stage over its window."""
    sent = requests[requests["stage"] == stage.index].sort_values("index")
    lengths = list(zip(sent["num_prompt_tokens"].astype(int), sent["asked_output_tokens"].astype(int), strict=True))
    end_s = stage.warm_up_s + stage.measured_s
    return closed_loop(config, lengths, load=stage.users, start_s=stage.warm_up_s, end_s=end_s)


def _measured(stage: StageRecord) -> tuple[float, ...]:
    return (
        stage.output_throughput.value,
        stage.ttft_p50_ms.value,
        stage.ttft_p95_ms.value,
        stage.itl_p50_ms.value,
        stage.itl_p95_ms.value,
    )


def _curve(config: EngineConfig) -> dict[int, float]:
    """The law's own throughput over load."""
    rng_lengths = [(64 + 13 * number % 97, 8 + 5 * number % 17) for number in range(97 * 17)]
    start_s, end_s = LONG_RUN_S
    return {
        load: closed_loop(config, rng_lengths, load=load, start_s=start_s, end_s=end_s).output_throughput
        for load in range(1, MAX_LOAD + 1)
    }


def main() -> None:
    """Measure, work out, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time", default="90s", help="longest window of a stage")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        law = folder / "known.yaml"
        law.write_text(yaml.safe_dump(LAW), encoding="utf-8")
        answer = _measure(folder, law, parser.parse_args().time)
        requests = pd.read_parquet(folder / "out" / "requests.parquet")
        config = EngineConfig(model="embedded", executor="simulated", law=str(law), max_num_seqs=FENCE)
        print(f"| load | requests | {' | '.join(FIGURES)} |")
        print(f"| --- | --- | {' | '.join('---' for _ in FIGURES)} |")
        for stage in sorted(answer.stages, key=lambda each: each.load):
            pairs = zip(_measured(stage), astuple(_truth(config, stage, requests)), strict=True)
            cells = [f"{seen:.4g} ({100 * (seen / true - 1):+.1f} %)" for seen, true in pairs]
            valid = "" if stage.valid else " (left out)"
            print(f"| {stage.load}{valid} | {stage.num_completed} | {' | '.join(cells)} |")
        curve = _curve(config)
        knee = best_load(curve)
        print(f"knee by the law {knee}, found {answer.finding.load} {answer.finding.interval}")
        if answer.finding.load is not None:
            power = {load: x**5.5 / load for load, x in curve.items()}
            print(f"power there over the best: {power[round(answer.finding.load)] / power[knee]:.3f}")


if __name__ == "__main__":
    main()
