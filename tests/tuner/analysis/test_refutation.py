"""What launches that broke a limit teach about the next choice."""

from __future__ import annotations

import pytest

from tests.fakes import records
from tuner.analysis.knee import find_knee
from tuner.analysis.profiles import ProductionChoice
from tuner.analysis.refutation import ConfirmedPair, with_room
from tuner.answer import Slo
from tuner.engine_config import EngineConfig
from tuner.records import Measured, StageKind, TrialRole

SLO = Slo(ttft_p95_ms=1000.0, itl_p95_ms=100.0)
CONFIG = EngineConfig(max_num_seqs=16, max_num_batched_tokens=1024, gpu_memory_utilization=0.7)


def _choice(*, ttft_ms: float, itl_ms: float) -> ProductionChoice:
    seen = records.stage(CONFIG, 16, index=0).model_copy(
        update={"ttft_p95_ms": records.estimate(ttft_ms), "itl_p95_ms": records.estimate(itl_ms)}
    )
    trial = records.trial(0, CONFIG, outcome=Measured(facts=records.facts(CONFIG), stages=(seen,)))
    return ProductionChoice(trial=trial, knee=find_knee([]), stage=seen, config=CONFIG, evidence=())


def _launched(*figures: tuple[float, float]) -> ConfirmedPair:
    launches = []
    for number, (ttft_ms, itl_ms) in enumerate(figures):
        stage = records.stage(CONFIG, 16, index=0, kind=StageKind.OPERATING).model_copy(
            update={"ttft_p95_ms": records.estimate(ttft_ms), "itl_p95_ms": records.estimate(itl_ms)}
        )
        outcome = Measured(facts=records.facts(CONFIG), stages=(stage,))
        launches.append(records.trial(number, CONFIG, role=TrialRole.CONFIRM_PRODUCTION, outcome=outcome))
    return ConfirmedPair(production=tuple(launches), baseline=())


def test_only_the_limit_that_was_broken_is_lowered_and_by_what_was_lacking() -> None:
    """The next choice would else stand where this one fell, or be kept from a limit that nothing was near."""
    limits = with_room(SLO, _choice(ttft_ms=400, itl_ms=95), _launched((900, 98), (500, 119)), slo=SLO)
    assert limits.ttft_p95_ms == SLO.ttft_p95_ms
    assert limits.itl_p95_ms == pytest.approx(100 * 95 / 119)


def test_the_room_of_one_refutation_is_kept_after_the_next() -> None:
    """Limits that start anew each time give the third choice no more room than the first had."""
    first = with_room(SLO, _choice(ttft_ms=400, itl_ms=95), _launched((500, 118.75)), slo=SLO)
    assert first.itl_p95_ms == pytest.approx(80)
    second = with_room(first, _choice(ttft_ms=900, itl_ms=75), _launched((1200, 90)), slo=SLO)
    assert second.itl_p95_ms == pytest.approx(80)
    assert second.ttft_p95_ms == pytest.approx(750)
