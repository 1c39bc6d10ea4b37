"""The safe rate is one that was shown to be safe, found in few stages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.records import estimate
from tuner.analysis.safe_rate import MOST_STAGES, RELATIVE_STEP, RateStage, SafeRate, Told, safe_rate, told
from tuner.answer import Slo
from tuner.records import Estimate

SLO = Slo(ttft_p95_ms=500, itl_p95_ms=50)


def _stage(rate: float, true_rate: float) -> RateStage:
    """A server whose TTFT meets its limit, interval included, up to `true_rate`."""
    ttft = 500 / 1.08 * min(10.0, rate / true_rate)
    return RateStage(
        rate_rps=rate,
        shown_rps=rate,
        sent_rps=rate,
        ttft_p95_ms=estimate(ttft, spread=0.08),
        itl_p95_ms=estimate(20),
        oversaturated=rate > 2 * true_rate,
    )


def _search(
    true_rate: float, ceiling: float, *, floor: float = 0.0, most: int = MOST_STAGES
) -> tuple[list[RateStage], SafeRate]:
    stages: list[RateStage] = []
    found = safe_rate(stages, SLO, ceiling_rps=ceiling, floor_rps=floor, most_stages=most)
    while found.next_rps is not None:
        stages.append(_stage(found.next_rps, true_rate))
        found = safe_rate(stages, SLO, ceiling_rps=ceiling, floor_rps=floor, most_stages=most)
    return stages, found


@given(st.floats(0.001, 1000), st.floats(0.1, 1))
def test_the_search_ends_close_below_the_true_rate(ceiling: float, share: float) -> None:
    """Six stages at the most end at a rate that is safe, and no more than a third below the highest that is."""
    stages, found = _search(share * ceiling, ceiling)
    rates = [stage.rate_rps for stage in stages]

    assert len(stages) <= MOST_STAGES
    assert len(set(rates)) == len(rates)
    assert all(0 < rate <= ceiling for rate in rates)
    assert found.rate_rps is not None
    assert found.rate_rps <= share * ceiling * (1 + 1e-9)
    assert found.rate_rps >= min(share * ceiling, ceiling / (1 + RELATIVE_STEP)) / 1.34


@pytest.mark.parametrize("true_rate", [0.1, 0.22, 0.3, 0.4, 0.5])
def test_rates_below_one_a_second_are_rates(true_rate: float) -> None:
    """Between a single user's 0.21 requests/s and a maximum of 0.425 there is room for five: nothing is rounded."""
    stages, found = _search(true_rate, 0.425, floor=0.21, most=5)
    rates = sorted(stage.rate_rps for stage in stages)

    assert all(0.21 <= rate <= 0.425 for rate in rates)
    assert len(set(rates)) == len(rates) <= 5
    assert (found.rate_rps is None) == (true_rate < 0.21)
    assert found.rate_rps is None or 0.8 * min(true_rate, 0.425) <= found.rate_rps <= true_rate


def test_it_begins_below_the_closed_loops_throughput() -> None:
    """A closed loop's throughput is critical load in an open one: the first rate is 0.8 of it."""
    assert safe_rate([], SLO, ceiling_rps=10).next_rps == 8


def test_bounds_decide_and_not_values() -> None:
    """A p95 inside by luck or of too few requests leaves it open; one over its limit, or a growing queue, does not."""
    good = _stage(1.0, 2.0)
    lucky = replace(good, ttft_p95_ms=estimate(480, spread=0.08))
    few = replace(good, ttft_p95_ms=Estimate(value=9, num_samples=40))
    over = replace(good, itl_p95_ms=Estimate(value=51, num_samples=40))
    growing = replace(good, oversaturated=True)
    spoilt = replace(over, valid=False)

    assert [told(stage, SLO) for stage in (good, lucky, few)] == [Told.SAFE, Told.OPEN, Told.OPEN]
    assert [told(stage, SLO) for stage in (over, growing, spoilt)] == [Told.OVER, Told.OVER, Told.NOTHING]


def test_a_lucky_stage_above_an_unsafe_one_proves_nothing() -> None:
    """Safe at 2 and 4 but not at 3 is safe at 2."""
    stages = [_stage(2, 9), _stage(4, 9), _stage(3, 1)]
    found = safe_rate(stages, SLO, ceiling_rps=10)

    assert found.rate_rps == 2
    assert found.next_rps == pytest.approx(math.sqrt(6))


def test_a_higher_rate_that_was_shown_holds_over_a_lower_one_that_was_not() -> None:
    """What is merely open below, or could not be measured, does not take a proven rate away."""
    shown = _stage(4, 9)
    below = replace(_stage(2, 9), ttft_p95_ms=Estimate(value=9, num_samples=12))

    assert safe_rate([below, shown], SLO, ceiling_rps=10).rate_rps == 4
    assert safe_rate([replace(below, valid=False, given_up=True), shown], SLO, ceiling_rps=10).rate_rps == 4
    assert safe_rate([shown, replace(below, rate_rps=6, shown_rps=6)], SLO, ceiling_rps=10).not_shown_rps == 6
    assert safe_rate([replace(below, valid=False, given_up=True)], SLO, ceiling_rps=10).next_rps == 1


def test_the_rate_named_is_the_one_its_stage_speaks_for() -> None:
    """50 a second were asked for and 46.5 came: nobody has seen 50."""
    found = safe_rate([replace(_stage(50, 90), shown_rps=46.5)], SLO, ceiling_rps=60)

    assert found.rate_rps == 46.5
    assert found.next_rps == pytest.approx(math.sqrt(50 * 60))


def test_limits_far_away_take_no_interval() -> None:
    """25 a second with a p95 of 28 ms against 500 was called open for its few samples, and half the rate was named."""
    few = replace(_stage(25, 90), ttft_p95_ms=Estimate(value=28, num_samples=31), shown_rps=20.0, sent_rps=24.6)
    far = replace(few, ttft_p95_far_ms=120.0, itl_p95_far_ms=40.0)

    assert [told(stage, SLO) for stage in (few, far)] == [Told.OPEN, Told.SAFE]
    assert safe_rate([far], SLO, ceiling_rps=60).rate_rps == 24.6
    for not_far in (replace(far, ttft_p95_far_ms=501.0), replace(far, itl_p95_far_ms=None)):
        assert told(not_far, SLO) is Told.OPEN
    assert told(replace(far, oversaturated=True), SLO) is Told.OVER


def test_what_is_shown_near_the_limit_stays_what_it_was() -> None:
    """A far bound above the limit takes nothing from an interval inside it."""
    near = replace(_stage(25, 30), shown_rps=20.0, ttft_p95_far_ms=900.0, itl_p95_far_ms=900.0)

    assert safe_rate([near], SLO, ceiling_rps=60).rate_rps == 20.0


def test_invalid_stages_say_nothing_and_are_paid_for() -> None:
    """A stage the client spoilt moves no bound, but the search still ends."""
    spoilt = replace(_stage(8, 9), valid=False)

    assert safe_rate([spoilt], SLO, ceiling_rps=10).next_rps == 8
    assert safe_rate([spoilt] * MOST_STAGES, SLO, ceiling_rps=10) == SafeRate(
        stage=None, rate_rps=None, not_shown_rps=None, next_rps=None
    )


@pytest.mark.parametrize("ceiling", [0.0, -1.0, math.nan, math.inf])
def test_no_ceiling_no_search(ceiling: float) -> None:
    """A ceiling that is no rate is refused with its value."""
    with pytest.raises(ValueError, match=f"{ceiling:g}"):
        safe_rate([], SLO, ceiling_rps=ceiling)
