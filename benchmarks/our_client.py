"""The tuner's own stage as a program: `our_client.py URL closed|poisson LOAD TOKENS SECONDS RESULT.json`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import uvloop

from tuner.load.arrivals import Closed, Poisson
from tuner.load.connection import Endpoint
from tuner.load.lengths import Fixed
from tuner.load.workload import Workload
from tuner.measure.latency import Window, itl_gaps_s, ttft_s
from tuner.measure.stage import MeasuredStage, StageSpec, Target, measure_stage
from tuner.records import StageKind

PROMPT_TOKENS = 128
MAX_MODEL_LEN, MAX_NUM_SEQS = 32_768, 4096


def main() -> int:
    """Measure one stage and write what it reports."""
    url, arrivals, load, tokens, seconds, result = sys.argv[1:]
    workload = Workload(
        input_len=Fixed(kind="fixed", tokens=PROMPT_TOKENS),
        output_len=Fixed(kind="fixed", tokens=int(tokens)),
        arrivals=Closed() if arrivals == "closed" else Poisson(kind="poisson"),
    )
    spec = StageSpec(
        index=0,
        kind=StageKind.LADDER if arrivals == "closed" else StageKind.RATE,
        load=int(load) if arrivals == "closed" else float(load),
        max_num_seqs=MAX_NUM_SEQS,
        workload=workload,
        entropy=(0, 0, 0, 0),
        max_s=float(seconds),
        # Never precise enough: all tools measure for as long.
        target_relative_half_width=0.0,
    )
    target = Target(endpoint=Endpoint.from_url(url), model="stub", max_model_len=MAX_MODEL_LEN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(measure_stage(spec, target))
    Path(result).write_text(json.dumps(_reported(measured)))
    print(measured.record.model_dump_json(indent=1))
    return 0


def _reported(measured: MeasuredStage) -> dict[str, object]:
    stage = measured.record
    window = Window(stage.wall_s - stage.measured_s, stage.wall_s)
    ended = [record for record in measured.requests if not record.warm_up]
    completed = [record for record in ended if record.error is None]
    kept = [record for record in measured.requests if record.error is None]
    first_sent_s = min(record.sent_s for record in measured.requests)
    return {
        "ttft_ms": _spread([1e3 * ttft_s(record) for record in completed]),
        "itl_ms": _spread([1e3 * gap for record in kept for gap in itl_gaps_s(record, window)]),
        "itl_of": "gaps",
        "num_completed": len(completed),
        "num_failed": len(ended) - len(completed),
        "mean_in_flight": stage.mean_in_flight,
        "window_s": (window.start_s - first_sent_s, window.end_s - first_sent_s),
    }


def _spread(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "p95": None, "p99": None}
    return {
        "mean": float(np.mean(values)),
        "p95": float(np.quantile(values, 0.95)),
        "p99": float(np.quantile(values, 0.99)),
    }


if __name__ == "__main__":
    raise SystemExit(main())
