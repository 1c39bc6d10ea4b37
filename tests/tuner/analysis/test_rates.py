"""The safe rate, told from stages: between the last rate that held and the first that did not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.records import CHOSEN, SLO, estimate, rate_stage, stage
from tuner import wording
from tuner.analysis.no_safe_rate import none_safe, open_rates
from tuner.analysis.rates import RateSearch, safe_rate_found
from tuner.ladder import next_step
from tuner.records import StageKind, StageRecord


def _searched(search: RateSearch, holds_rps: float) -> list[StageRecord]:
    """The stages of a search on an engine that holds so many requests per second."""
    stages: list[StageRecord] = []
    while (step := next_step(search, stages)) is not None:
        assert step.kind is StageKind.RATE
        made = rate_stage(CHOSEN, step.load, index=len(stages))
        ttft = estimate(100.0 if step.load <= holds_rps else 1e5)
        stages.append(made.model_copy(update={"ttft_p95_ms": ttft, "itl_p95_ms": estimate(20.0), "ended_by": "time"}))
    return stages


@given(holds=st.floats(0.2, 1.2), ceiling=st.floats(0.01, 1000.0), most=st.integers(1, 8))
def test_the_rate_found_was_measured_safe_and_the_bracket_holds_the_truth(
    holds: float, ceiling: float, most: int
) -> None:
    """The rate that is published was tried itself; the search is bounded and never above the closed loop."""
    search = RateSearch(slo=SLO, ceiling_rps=ceiling, most_stages=most, relative_step=0.1)
    stages = _searched(search, holds * ceiling)
    found = safe_rate_found(stages, SLO)
    assert 1 <= len(stages) <= most
    assert all(stage.load <= ceiling for stage in stages)
    if found is None:
        assert min(stage.load for stage in stages) > holds * ceiling
        return
    assert found.value in {stage.load for stage in stages}
    assert found.low == found.value <= holds * ceiling
    assert found.high is None or found.high > holds * ceiling


def test_a_rate_that_cannot_be_held_still_is_left_after_two_tries() -> None:
    """A search that repeats one unsteady rate until its stages are spent finds nothing."""
    search = RateSearch(slo=SLO, ceiling_rps=10.0, most_stages=6)
    unsteady = rate_stage(CHOSEN, 8.0).model_copy(update={"valid": False, "invalid_reasons": ("not steady",)})
    again = next_step(search, [unsteady])
    assert again is not None
    assert again.load == 8.0
    lower = next_step(search, [unsteady, unsteady])
    assert lower is not None
    assert lower.load < 8.0


def test_users_who_wait_say_nothing_of_a_rate() -> None:
    """Closed-loop stages of the same launch are not counted as rates."""
    search = RateSearch(slo=SLO, ceiling_rps=10.0)
    closed = [stage(CHOSEN, load, kind=StageKind.OPERATING) for load in (8, 16)]
    assert safe_rate_found(closed, SLO) is None
    first = next_step(search, closed)
    assert first is not None
    assert first.load == 8.0


def test_a_queue_that_grew_by_chance_gets_a_second_chance() -> None:
    """One unlucky look at a low rate does not make every rate above it unsafe."""
    search = RateSearch(slo=SLO, ceiling_rps=10.0, most_stages=6)
    lucky = {"ttft_p95_ms": estimate(50.0, num_samples=20), "itl_p95_ms": estimate(20.0), "ended_by": "oversaturated"}
    by_chance = rate_stage(CHOSEN, 2.0).model_copy(update=lucky)
    held = rate_stage(CHOSEN, 8.0).model_copy(
        update={"ttft_p95_ms": estimate(90.0), "itl_p95_ms": estimate(20.0), "ended_by": "time"}
    )
    found = safe_rate_found([by_chance, held], SLO)
    assert found is not None
    assert found.value == 8.0
    assert safe_rate_found([by_chance, by_chance, held], SLO) is None
    spoilt = by_chance.model_copy(update={"valid": False})
    assert safe_rate_found([spoilt, spoilt, held], SLO) == found
    first = rate_stage(CHOSEN, 8.0).model_copy(update=lucky)
    again = next_step(search, [first])
    assert again is not None
    assert again.load == 8.0


def test_a_rate_that_stays_open_is_said_to_be_and_a_lower_one_is_tried() -> None:
    """It had all its time. The same again would not settle it; at a lower rate requests depend less on each other."""
    few = {"ttft_p95_ms": estimate(50.0, num_samples=20), "itl_p95_ms": estimate(20.0, num_samples=20)}
    stage_ = rate_stage(CHOSEN, 8.0).model_copy(update={**few, "ended_by": "time"})
    lower = next_step(RateSearch(slo=SLO, ceiling_rps=10.0), [stage_])
    assert lower is not None
    assert lower.load == 4.0
    over = stage_.model_copy(update={"load": 9.0, "itl_p95_ms": estimate(1e5)})
    spoilt = stage_.model_copy(update={"load": 2.0, "valid": False})
    said = none_safe([stage_, over, spoilt], SLO)
    assert said is not None
    assert "9 requests/s: over a limit; 8 requests/s: open" in said
    assert "2 requests/s: not measured validly" in said


def test_what_was_offered_and_sent_stands_beside_the_safe_rate() -> None:
    """A gateway set to the 50 that were asked for lets more in than was ever tried."""
    held = {"ttft_p95_ms": estimate(90.0), "itl_p95_ms": estimate(20.0), "ended_by": "precise"}
    sent = {"sent_rps": 46.5, "shown_rps": 44.0}
    found = safe_rate_found([rate_stage(CHOSEN, 50.0).model_copy(update={**held, **sent})], SLO)
    assert found is not None
    assert (found.value, found.low, found.offered_rps, found.sent_rps) == (44.0, 44.0, 50.0, 46.5)
    assert wording.safe_rate(found).startswith("44 requests/s (offered 50, sent 46.5)")
    assert none_safe([], SLO) is None


def test_who_is_told_that_a_rate_is_open_is_told_how_long_would_settle_it() -> None:
    """More time without a value is a guess, and a stage of twice the time is often no better."""
    inside = {"ttft_p95_ms": estimate(90.0), "itl_p95_ms": estimate(20.0), "ended_by": "time", "measured_s": 20.0}
    base = rate_stage(CHOSEN, 8.0).model_copy(update=inside)
    few = base.model_copy(update={"ttft_p95_ms": estimate(90.0, num_samples=10), "num_completed": 240})
    (told,) = open_rates([few], SLO)
    assert told.why == "its 240 requests are worth 10 independent ones for the p95 TTFT, and 59 are needed"
    assert (round(told.needed_s), told.time_option) == (118, "--time 60s")
    wide = estimate(0.8 * SLO.ttft_p95_ms, spread=0.5)
    (told,) = open_rates([base.model_copy(update={"ttft_p95_ms": wide})], SLO)
    assert "the upper bound of its p95 TTFT" in told.why
    assert told.needed_s == pytest.approx(4 * 20.0)
    (told,) = open_rates([base.model_copy(update={"shown_rps": 0.0, "num_states": 4})], SLO)
    assert "in 4 independent states, and 59 are needed" in told.text
    (told,) = open_rates([base.model_copy(update={"itl_p95_ms": estimate(float("nan"), num_samples=0)})], SLO)
    assert (told.time_option, told.text) == (None, "open, as it has no ITL: no time settles it")
    assert open_rates([few, base], SLO) == []
