"""An open loop's knee lies left of capacity where latencies are known, and at capacity where they are not."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.analysis.knee import LadderPoint
from tuner.analysis.open_loop import OpenLoopPoint, OpenLoopRule, find_open_loop_knee
from tuner.answer import LadderVerdict

RATES = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 9.0, 12.0)
TOKENS = 64
WINDOW_S = 60.0


def _point(rate: float, capacity: float, *, noise: float = 1.0, knows: str = "everything") -> OpenLoopPoint:
    """Some 4 u requests are served at a time and u / (1 - u) wait; past capacity the queue grows through the stage."""
    share = rate / capacity
    in_flight = 4 * share + share / (1 - share) if share < 1 else 4 + (rate - capacity) * WINDOW_S / 2
    served = min(rate, capacity) * noise
    point = LadderPoint(
        load=in_flight if knows == "everything" else math.nan, throughput=TOKENS * served, rate_rps=rate
    )
    return OpenLoopPoint(point=point, request_throughput_rps=None if knows == "tokens" else served)


def _power(rate: float, capacity: float) -> float:
    return float(min(rate, capacity) ** 5.5 / _point(rate, capacity).point.load)


@pytest.mark.parametrize("capacity", [3.0, 5.0, 7.0, 10.0])
def test_power_keeps_clear_of_capacity(capacity: float) -> None:
    """With latencies known the rate of most power is the answer, in 95 of 100 noisy runs within 90 % of it."""
    best = max(_power(rate, capacity) for rate in RATES if rate < capacity)
    kept = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        ladder = [_point(rate, capacity, noise=float(rng.uniform(0.95, 1.05))) for rate in RATES]
        finding, rule = find_open_loop_knee(ladder, num_bootstrap=1)
        assert rule is OpenLoopRule.POWER
        assert finding.load is not None
        assert finding.load < capacity
        kept.append(_power(finding.load, capacity) / best)

    assert np.mean(np.array(kept) >= 0.9) >= 0.95


@pytest.mark.parametrize("knows", ["tokens", "completions"])
@pytest.mark.parametrize("capacity", [3.0, 5.0, 7.0])
def test_without_latencies_the_last_rate_kept_up_with(capacity: float, knows: str) -> None:
    """Throughput alone tells capacity and no more, and 5 % of noise does not move it by a stage."""
    expected = max(rate for rate in RATES if capacity >= 0.95 * rate)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        ladder = [_point(rate, capacity, noise=float(rng.uniform(0.95, 1.05)), knows=knows) for rate in RATES]
        finding, rule = find_open_loop_knee(ladder, num_bootstrap=20)
        assert (rule, finding.load) == (OpenLoopRule.SATURATION, expected)
        assert finding.interval is not None
        assert finding.interval[0] <= expected <= finding.interval[1]


@pytest.mark.parametrize("knows", ["everything", "tokens", "completions"])
def test_ladders_without_a_knee(knows: str) -> None:
    """A straight line goes on, a flat one was saturated before it began, four rates are too few."""
    straight = [_point(rate, 1000.0, knows=knows) for rate in RATES]
    flat = [_point(rate, 0.3, knows=knows) for rate in RATES]

    assert find_open_loop_knee(straight)[0].verdict is LadderVerdict.NOT_REACHED
    assert find_open_loop_knee(flat)[0].verdict is LadderVerdict.ALREADY_SATURATED
    assert find_open_loop_knee(straight[:4])[0].verdict is LadderVerdict.TOO_FEW_STAGES
    assert find_open_loop_knee([])[0].verdict is LadderVerdict.TOO_FEW_STAGES


def _scattered(rate: float, capacity: float, rng: np.random.Generator) -> OpenLoopPoint:
    """120 random arrivals, or five seconds of them, that take a second each; past capacity the rest is not served."""
    window_s = max(5.0, 120 / rate)
    sent = int(rng.poisson(rate * window_s))
    in_flight_s = rng.poisson(rate, size=2)
    done = min(sent + int(in_flight_s[0] - in_flight_s[1]), int(capacity * window_s))
    point = LadderPoint(
        load=sent / window_s + max(0.0, rate - capacity) * 60, throughput=TOKENS * done / window_s, rate_rps=rate
    )
    noise = math.sqrt(2 * rate) / sent
    return OpenLoopPoint(point=point, request_throughput_rps=done / window_s, sent_rps=sent / window_s, noise=noise)


@pytest.mark.parametrize("rates", [(1, 2, 4, 8, 16), (10, 20, 30, 40, 50, 60)])
def test_chance_in_the_arrivals_is_no_knee(rates: tuple[float, ...]) -> None:
    """46 of 50 requests happened to come, and 46 were served: a server that keeps up with all has no knee."""
    ladders = [[_scattered(r, 1e6, np.random.default_rng((seed, int(r)))) for r in rates] for seed in range(150)]
    found = [find_open_loop_knee(ladder, num_bootstrap=1)[0].verdict for ladder in ladders]
    assert found.count(LadderVerdict.NOT_REACHED) >= 0.95 * len(found)


def test_chance_in_the_arrivals_hides_no_knee() -> None:
    """A server that holds half of the highest rate has a knee, however its arrivals scatter."""
    rates = (5, 10, 20, 30, 40, 60)
    ladders = [[_scattered(r, 30, np.random.default_rng((seed, r))) for r in rates] for seed in range(100)]
    found = [find_open_loop_knee(ladder, num_bootstrap=1)[0] for ladder in ladders]
    assert sum(each.load is not None and each.load <= 30 for each in found) >= 95


def test_a_fence_that_was_met_is_said() -> None:
    """Rates whose requests filled the fence end at a limit of one's own."""
    ladder = [_point(rate, 20.0) for rate in RATES]

    assert find_open_loop_knee(ladder, fence=3)[0].verdict is LadderVerdict.FENCED
    assert find_open_loop_knee(ladder, fence=64)[0].verdict is LadderVerdict.NOT_REACHED


def test_preemptions_and_a_collapse() -> None:
    """Preempting stages are no answer, and throughput that falls past its peak does not move capacity down."""
    ladder = [_point(rate, 8.5) for rate in RATES]
    preempting = [
        dataclasses.replace(p, point=dataclasses.replace(p.point, num_preemptions=50 if p.point.name >= 4 else 0))
        for p in ladder
    ]
    falling = [_point(rate, 5.0, noise=min(1.0, 6 / rate), knows="tokens") for rate in RATES]

    finding, _ = find_open_loop_knee(preempting)
    assert finding.load == 2
    assert "50 preemptions at 4 requests/s, so the knee moves left to 2" in finding.signals
    assert find_open_loop_knee(falling)[0].load == 4


def test_requests_in_flight_that_fall_are_warned_of() -> None:
    """A stage that something else disturbed is levelled out, and the reader told."""
    ladder = [_point(rate, 8.5) for rate in RATES]
    ladder[2] = dataclasses.replace(ladder[2], point=dataclasses.replace(ladder[2].point, load=9.0))

    finding, _ = find_open_loop_knee(ladder)
    assert any("do not rise with the rate" in warning for warning in finding.warnings)
    assert finding.load == find_open_loop_knee([_point(rate, 8.5) for rate in RATES])[0].load


numbers = st.one_of(st.floats(), st.sampled_from([0.0, 1.0, 2.0, 4.0, 1e308, 5e-324]))
any_point = st.builds(
    OpenLoopPoint,
    point=st.builds(
        LadderPoint,
        load=numbers,
        throughput=numbers,
        rate_rps=st.none() | numbers,
        ttft_p95_ms=st.none() | numbers,
        num_preemptions=st.none() | st.integers(0, 10**6),
        fenced=st.booleans(),
        valid=st.booleans(),
    ),
    request_throughput_rps=st.none() | numbers,
)


@settings(max_examples=100)
@given(st.lists(any_point, max_size=12))
def test_any_open_ladder_has_an_answer(ladder: list[OpenLoopPoint]) -> None:
    """No table of rates, however odd, ends in an exception, and its order never matters."""
    finding, _ = find_open_loop_knee(ladder, num_bootstrap=5)

    assert find_open_loop_knee(ladder[::-1], num_bootstrap=5)[0].verdict is finding.verdict
    assert (finding.load is not None) == (finding.verdict is LadderVerdict.KNEE)
    assert finding.load is None or finding.load in {each.point.rate_rps for each in ladder}
