"""How long a stage may take, by what is known of the requests before it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.records import CHOSEN, estimate, rate_stage
from tuner.climb import OPEN_STRETCH, RATE_STAGE_S, WARM_UP_TURNS, Climb, stage_spec
from tuner.job import MeasureSpec
from tuner.ladder import FixedSteps, LadderStep
from tuner.load.workload import load_workload
from tuner.records import StageKind

STEP = LadderStep(kind=StageKind.RATE, load=50.0)


def _task(*, first_request_s: float = 1e-3, max_time: float = 30.0) -> Climb:
    workload = load_workload("chat-short")
    return Climb(
        plan=FixedSteps(steps=(STEP,)),
        workload=workload,
        burst=workload,
        measure=MeasureSpec.model_validate({"max_time": f"{max_time:g}s", "max_warm_up": f"{max_time:g}s"}),
        entropy=(0, 0),
        fence=None,
        max_model_len=512,
        caches_prefixes=False,
        rate_rps=1 / first_request_s,
    )


def test_a_rate_that_nothing_came_before_fills_as_long_as_the_first_request_says() -> None:
    """Without a ladder the only thing known is the request that was sent to look: it must not count for nothing."""
    assert stage_spec(_task(), STEP, []).max_warm_up_s == 30
    assert stage_spec(_task(first_request_s=18.0), STEP, []).max_warm_up_s == pytest.approx(18 * WARM_UP_TURNS)


def test_a_rate_that_was_measured_while_it_filled_fills_longer_when_it_is_repeated() -> None:
    """Requests take longer under load than alone; the same limits again would spoil the second try, too."""
    spoilt = rate_stage(CHOSEN, 50.0).model_copy(update={"valid": False, "e2e_p50_ms": estimate(19_000.0)})
    assert stage_spec(_task(), STEP, [spoilt]).max_warm_up_s == pytest.approx(19 * WARM_UP_TURNS)


def test_a_replay_lasts_as_long_as_what_of_it_is_sent(tmp_path: Path) -> None:
    """Requests that are too long to be sent are not waited for: else a run is told to take hours it never takes."""
    rows = [{"at_s": n, "input_tokens": 600 if n % 10 else 9, "output_tokens": 1} for n in range(100)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trace = {"trace": {"path": str(tmp_path / "t.jsonl"), "format": "jsonl"}, "arrivals": {"kind": "trace"}}
    task = _task()
    replay = replace(task, workload=load_workload(trace))
    step = LadderStep(kind=StageKind.RATE, load=0.1)
    assert stage_spec(replay, step, []).max_s == pytest.approx(stage_spec(task, step, []).max_s + 10 / 0.1)


def test_a_rate_whose_verdict_is_open_gets_more_time_but_not_any() -> None:
    """Dependent waits are worth few samples: a stage needs time to settle them, and a user's job has an end."""
    assert stage_spec(_task(max_time=4.0), STEP, []).max_s == RATE_STAGE_S
    assert stage_spec(_task(max_time=30.0), STEP, []).max_s == OPEN_STRETCH * 30
