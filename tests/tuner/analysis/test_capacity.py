"""How much one replica holds, and how many an expected load takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.records import estimate, production_profile
from tests.tuner.measure.helpers import record
from tuner.analysis.capacity import Attainment, Reach, attainment, capacity, is_inside, reach, wilson_interval
from tuner.answer import Expected, Slo
from tuner.wording import held

SLO = Slo(ttft_p95_ms=500.0, itl_p95_ms=100.0)
RATE = estimate(5.0, spread=0.1)


def _stage(load: float, inside: int, of: int = 100) -> Attainment:
    return Attainment(load=load, num_inside=inside, num_requests=of)


def test_wilson_as_published() -> None:
    """Newcombe's (1998) worked examples of the score method: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for inside, of, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson_interval(inside, of) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 5000), st.data())
def test_the_interval_holds_the_share_and_stays_inside_one(of: int, data: st.DataObject) -> None:
    """All of 60 requests inside is not a certainty, and never more than all."""
    inside = data.draw(st.integers(0, of))
    low, high = wilson_interval(inside, of)
    assert 0 <= low <= inside / of + 1e-12
    assert inside / of - 1e-12 <= high <= 1
    assert low < high


def test_a_request_is_inside_by_its_own_ttft_and_tpot() -> None:
    """A user is content or not: a mean over users is nobody's experience."""
    assert is_inside(record(times_s=(0.4, 0.49)), SLO)
    assert is_inside(record(times_s=(0.4,)), SLO)
    assert not is_inside(record(times_s=(0.6, 0.65)), SLO)
    assert not is_inside(record(times_s=(0.4, 0.6)), SLO)
    assert not is_inside(record(times_s=(0.4, 0.45), error="died"), SLO)
    assert not is_inside(record(times_s=(), finished_s=0.3), SLO)


def test_failures_count_and_warm_up_does_not() -> None:
    """A refused user was not served; one that was still being served has no verdict yet."""
    good = record(times_s=(0.4, 0.45))
    refused = record(times_s=(), finished_s=0.1, error="503").model_copy(update={"rejected": True})
    early, open_ = good.model_copy(update={"warm_up": True}), good.model_copy(update={"unfinished": True})
    assert attainment(4, [good, good, refused, early, open_], SLO) == _stage(4, 2, 3)
    assert math.isnan(attainment(4, [early], SLO).share.value)


def test_the_reach_ends_below_the_first_load_that_surely_falls_short() -> None:
    """One unlucky stage does not hide the loads past it; a lucky one past the knee does not count."""
    ladder = [_stage(1, 100), _stage(8, 88), _stage(16, 99), _stage(32, 40), _stage(64, 99)]
    assert reach(ladder, 0.9) == Reach(shown=_stage(16, 99))
    assert reach([_stage(1, 10)], 0.9) == Reach()
    assert reach([_stage(1, 0, 0), _stage(2, 100)], 0.9) == Reach(shown=_stage(2, 100))


def test_a_share_that_only_luck_may_have_put_over_the_target_is_open() -> None:
    """56 of 60 inside is 93 %, and 84 % is as likely: who plans replicas by it finds one request in six late."""
    found = reach([_stage(8, 60, 60), _stage(16, 56, 60), _stage(32, 20, 60)], 0.9)
    assert found == Reach(shown=_stage(8, 60, 60), open_up_to=_stage(16, 56, 60))
    answer = capacity(
        production_profile(),
        closed=[_stage(16, 56, 60)],
        open_=[_stage(2.5, 56, 60)],
        target=0.9,
        request_rate_rps=RATE,
    )
    assert (answer.load, answer.open_load, answer.rate_rps, answer.open_rate_rps) == (None, 16, None, 2.5)
    assert "is shown at no load, open up to 16" in held(answer)
    assert "open up to 2.5 requests/s" in held(answer)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=6))
def test_repeats_of_a_rate_are_one_rate(counts: list[tuple[int, int]]) -> None:
    """One good try among bad ones at the same rate is not what that rate holds."""
    repeats = [_stage(4.0, min(inside, of), of) for inside, of in counts]
    whole = _stage(4.0, sum(one.num_inside for one in repeats), sum(one.num_requests for one in repeats))
    assert reach(repeats, 0.9) == reach([whole], 0.9)


def test_a_rate_whose_queue_grew_without_end_holds_nothing() -> None:
    """Nearly all are inside while a queue begins to grow: the share says how long was watched, not what is held."""
    grew = replace(_stage(4.0, 100), oversaturated=True)
    assert reach([_stage(2.0, 100), grew, _stage(5.0, 100)], 0.9) == Reach(shown=_stage(2.0, 100))
    assert reach([grew, _stage(4.0, 99)], 0.9) == Reach(shown=_stage(4.0, 99))


def test_replicas_for_users_follow_the_fence() -> None:
    """45 users on a fence of 20: the third replica keeps five of them out of the queue."""
    found = capacity(
        production_profile(),
        closed=[_stage(16, 99)],
        open_=[],
        target=0.9,
        request_rate_rps=RATE,
        expected=Expected(users=45),
    )
    assert found.replicas == 3
    assert found.reason == "3 replicas: 45 users at 20 running requests each"
    assert (found.load, found.rate_rps) == (16, None)


def test_replicas_for_a_rate_take_the_larger_of_rate_and_concurrency() -> None:
    """By the lower bound of the rate, 4.5 of 5 a second: a figure's noise must not cost the SLO."""

    def found(**given: object) -> tuple[int | None, str]:
        answer = capacity(production_profile(), closed=[], open_=[], target=0.9, request_rate_rps=RATE, **given)  # type: ignore[arg-type]
        return answer.replicas, answer.reason or ""

    replicas, reason = found(expected=Expected(rate_rps=10))
    assert replicas == 3
    assert "3 by at least 4.5 requests/s at the closed-loop operating point, critical load" in reason
    assert "2 by 32 requests in flight at 20 running each" in reason
    replicas, reason = found(expected=Expected(rate_rps=10), safe_rate_rps=estimate(3.0, spread=0.1))
    assert replicas == 4
    assert "the safe rate of at least 2.7 requests/s" in reason
    assert found() == (None, "")


def test_no_replicas_are_reckoned_by_a_rate_above_those_that_failed() -> None:
    """Where every rate tried was unsafe, the closed loop's higher one is no answer: it buys too few replicas."""
    found = capacity(
        production_profile(),
        closed=[],
        open_=[_stage(4.0, 20), _stage(2.0, 40)],
        target=0.9,
        request_rate_rps=RATE,
        expected=Expected(rate_rps=10),
        price_per_device_hour=3.6,
        mean_output_tokens=64.0,
    )
    assert found.replicas is None
    assert "no rate was safe, down to 2 requests/s" in (found.reason or "")


def test_cost_follows_the_price_and_the_load_that_pays_it() -> None:
    """Half-empty replicas make each token dearer: the expected rate, not the best case, is what is paid for."""
    profile = production_profile()
    tokens_per_s = profile.operating_point.output_throughput.value
    common = {"closed": [], "open_": [], "target": 0.9, "request_rate_rps": RATE, "price_per_device_hour": 3.6}
    full = capacity(profile, **common)  # type: ignore[arg-type]
    assert full.cost_per_million_tokens == pytest.approx(1e3 / tokens_per_s)
    expected = capacity(profile, **common, expected=Expected(rate_rps=10), mean_output_tokens=64.0)  # type: ignore[arg-type]
    assert expected.cost_per_million_tokens == pytest.approx(3 * 1e3 / 640)
    assert capacity(profile, **{**common, "price_per_device_hour": None}).cost_per_million_tokens is None  # type: ignore[arg-type]


def test_users_and_rate_are_either_or() -> None:
    """Two expectations that disagree would be answered by one of them, silently."""
    with pytest.raises(ValueError, match="either users or rate_rps"):
        Expected()
    with pytest.raises(ValueError, match="either users or rate_rps"):
        Expected(users=3, rate_rps=1.0)
