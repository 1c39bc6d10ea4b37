"""`kneetune bench` beside the truth: `python benchmarks/bench_truth.py`.

A simulated engine with known step times is served over real HTTP and measured; what its law implies for the very
requests that were sent is worked out by `law_truth.py`. Steps of 0.1 s and more keep what HTTP adds below the
differences looked for. A machine with other work on it wakes the engine and the client milliseconds late, which p95s
show: the engine's own lateness is printed, to tell the two apart. Takes some 8 minutes, however many `--runs`: engines
that only wait are measured side by side.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from law_truth import Truth, best_load, closed_loop
from served import served

from engine.config import EngineConfig
from tuner.bench_answer import BenchAnswer
from tuner.records import StageRecord

STEP_TIME = {"base_s": 0.1, "decode_token_s": 0.016, "prefill_token_s": 0.0002}
LAW = {
    "description": "0.1 s a step, 16 ms a decoding request, 0.2 ms a prompt token",
    "max_model_len": 2048,
    "dtype": "float32",
    "step_time": {"combine": "sum", **STEP_TIME},
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


@dataclass(frozen=True, slots=True)
class Compared:
    """One stage beside the law."""

    load: int
    num_completed: int
    valid: bool
    seen: tuple[float, ...]
    true: tuple[float, ...]

    @property
    def differences(self) -> tuple[float, ...]:
        """Of each figure, seen over true less 1, in percent."""
        return tuple(100 * (seen / true - 1) for seen, true in zip(self.seen, self.true, strict=True))


def _measure(folder: Path, law: Path, time: str) -> BenchAnswer:
    folder.mkdir()
    workload = folder / "workload.yaml"
    workload.write_text(yaml.safe_dump(WORKLOAD), encoding="utf-8")
    simulated = ("--executor", "simulated", "--law", str(law), "--max-num-seqs", str(FENCE))
    with served("embedded", *simulated, "--step-log", str(folder / "steps.jsonl")) as url:
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
        command = [sys.executable, "-m", "tuner", "bench", url, *options]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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


def _compared(config: EngineConfig, folder: Path, answer: BenchAnswer) -> list[Compared]:
    requests = pd.read_parquet(folder / "out" / "requests.parquet")
    return [
        Compared(
            load=stage.users,
            num_completed=stage.num_completed,
            valid=stage.valid,
            seen=_measured(stage),
            true=astuple(_truth(config, stage, requests)),
        )
        for stage in answer.stages
    ]


def _late_ms(step_log: Path) -> tuple[float, ...]:
    """How much later than by the law steps ended that followed another at once: median, p95 and p99."""
    steps = pd.read_json(step_log, lines=True)
    by_law_s = STEP_TIME["base_s"] + STEP_TIME["decode_token_s"] * steps["decodes"]
    by_law_s += STEP_TIME["prefill_token_s"] * steps["prefill_tokens"]
    ends_s = steps["at_s"] + steps["execute_s"]
    late_s = (ends_s.diff() - by_law_s)[steps["decodes"] > 0]
    return tuple(1e3 * np.quantile(late_s, (0.5, 0.95, 0.99)))


def _table(runs: Sequence[Sequence[Compared]]) -> Iterator[str]:
    """A row a load: what the law says in the first run that measured it, and the differences of all runs."""
    of_load: dict[int, list[Compared]] = defaultdict(list)
    for stage in sorted((stage for run in runs for stage in run), key=lambda each: each.load):
        of_load[stage.load].append(stage)
    yield f"| load | requests | {' | '.join(FIGURES)} |"
    yield f"| --- | --- | {' | '.join('---' for _ in FIGURES)} |"
    for load, stages in of_load.items():
        differences = zip(*(stage.differences for stage in stages), strict=True)
        cells = [
            f"{true:.4g} ({', '.join(f'{each:+.1f}' for each in found)} %)"
            for true, found in zip(stages[0].true, differences, strict=True)
        ]
        invalid = "" if all(stage.valid for stage in stages) else " (left out)"
        requests = ", ".join(str(stage.num_completed) for stage in stages)
        yield f"| {load}{invalid} | {requests} | {' | '.join(cells)} |"


def main() -> None:
    """Measure, work out, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time", default="90s", help="longest window of a stage")
    parser.add_argument("--runs", type=int, default=1, help="engines, each with a bench of its own, side by side")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        law = Path(name) / "known.yaml"
        law.write_text(yaml.safe_dump(LAW), encoding="utf-8")
        config = EngineConfig(model="embedded", executor="simulated", law=str(law), max_num_seqs=FENCE)
        folders = [Path(name) / f"run-{number}" for number in range(options.runs)]
        with ThreadPoolExecutor(options.runs) as pool:
            answers = list(pool.map(lambda folder: _measure(folder, law, options.time), folders))
        runs = [_compared(config, folder, answer) for folder, answer in zip(folders, answers, strict=True)]
        for line in _table(runs):
            print(line)
        for folder in folders:
            p50, p95, p99 = _late_ms(folder / "steps.jsonl")
            print(f"steps ended later than by the law: p50 {p50:.2f}, p95 {p95:.2f}, p99 {p99:.2f} ms")
        curve = _curve(config)
    knee = best_load(curve)
    power = {load: x**5.5 / load for load, x in curve.items()}
    for answer in answers:
        found = answer.finding
        print(f"knee by the law {knee}, found {found.load} {found.interval}")
        if found.load is not None:
            print(f"power there over the best: {power[round(found.load)] / power[knee]:.3f}")


if __name__ == "__main__":
    main()
