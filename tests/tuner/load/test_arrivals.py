"""Requests come when they should: at the rate asked for, in order, and with the spread that was named."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.load.arrivals import (
    Constant,
    Gamma,
    OpenArrivals,
    Poisson,
    Replayed,
    constant_s,
    gamma_s,
    mean_rate_rps,
    open_times_s,
    poisson_s,
    rates_between,
    replayed_s,
    users_between,
)

RATES = st.floats(1e-3, 1e4)


@given(
    RATES,
    st.sampled_from([Poisson(kind="poisson"), Constant(kind="constant"), Gamma(kind="gamma", burstiness=0.3)]),
    st.integers(0, 2**32),
)
def test_times_never_fall_and_repeat_with_their_seed(rate: float, arrivals: OpenArrivals, seed: int) -> None:
    """Two stages of one seed are the same load; a time before the last could not be sent."""

    def drawn(of: int) -> list[float]:
        return list(islice(open_times_s(arrivals, rate_rps=rate, rng=np.random.default_rng(of)), 600))

    times = drawn(seed)
    assert times == drawn(seed)
    assert times[0] >= 0
    assert all(before <= after < math.inf for before, after in pairwise(times))


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    """As vLLM defines it: squared variation of gaps is one over it, and the rate stays."""
    gaps = np.diff(list(islice(gamma_s(4.0, burstiness=burstiness, rng=np.random.default_rng(0)), 40_000)))
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_a_poisson_process_counts_as_one() -> None:
    """As many arrivals in a second as their variance: independent users."""
    times = list(islice(poisson_s(20.0, np.random.default_rng(3)), 40_000))
    counts, _ = np.histogram(times, bins=int(times[-1]), range=(0, int(times[-1])))
    assert counts.mean() == pytest.approx(20, rel=0.05)
    assert counts.var() == pytest.approx(20, rel=0.1)


def test_constant_times_do_not_drift() -> None:
    """A thousandth of a gap lost each time is minutes in an hour."""
    assert next(islice(constant_s(3.0), 2_999_999, None)) == 1e6


@given(st.lists(st.floats(0, 1e6), min_size=2).map(sorted), RATES)
def test_a_trace_keeps_its_pattern_at_any_rate(times: list[float], rate: float) -> None:
    """Gaps are scaled alike; the mean rate is the one asked for."""
    if times[-1] - times[0] < 1e-3:
        with pytest.raises(ValueError, match="requests within"):
            mean_rate_rps([times[0]] * len(times))
        return
    replayed = list(replayed_s(times, rate_rps=rate))
    assert replayed[0] == 0
    assert len(replayed) == len(times)
    assert mean_rate_rps(replayed) == pytest.approx(rate)
    scale = replayed[-1] / (times[-1] - times[0])
    assert replayed == pytest.approx([(at_s - times[0]) * scale for at_s in times])


def test_a_trace_without_times_is_not_replayed() -> None:
    """Chats without dates cannot be sent when they were sent."""
    with pytest.raises(ValueError, match="does not say when"):
        open_times_s(Replayed(kind="trace"), rate_rps=1.0, rng=np.random.default_rng(0), trace_s=None)


def test_a_slow_engine_gets_rates_below_one() -> None:
    """A capacity of 0.4 requests/s tested at 0, or only at 1, is not tested."""
    rates = rates_between(0.21, 0.425, 5)
    assert len(set(rates)) == 5
    assert rates == sorted(rates)
    assert all(0.21 <= rate <= 0.425 for rate in rates)
    assert (rates[0], rates[-1]) == (0.21, 0.425)


@given(st.floats(1e-6, 1e6), st.floats(1, 1e3), st.integers(1, 40))
def test_rates_rise_inside_their_range_and_are_never_rounded(low: float, factor: float, num_stages: int) -> None:
    """Whatever the engine: distinct, rising, above zero, inside."""
    high = low * factor
    rates = rates_between(low, high, num_stages)
    assert 1 <= len(rates) <= num_stages
    assert all(low <= rate <= high for rate in rates)
    assert all(before < after for before, after in pairwise(rates))


@given(st.integers(1, 4096), st.integers(0, 4096), st.integers(1, 40))
def test_users_are_whole_and_at_least_one(low: int, span: int, num_stages: int) -> None:
    """Half a user sends nothing."""
    users = users_between(low, low + span, num_stages)
    assert 1 <= len(users) <= num_stages
    assert all(isinstance(load, int) and low <= load <= low + span for load in users)
    assert all(before < after for before, after in pairwise(users))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.0, 1.0), (1.0, math.inf), (-1.0, 1.0)])
def test_no_range_is_no_ladder(low: float, high: float) -> None:
    """A rate of zero would wait for ever."""
    with pytest.raises(ValueError, match="requests/s"):
        rates_between(low, high, 3)
