"""When a stage has settled, and whether its figures fit together."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.measure.helpers import record
from tuner.measure import steady
from tuner.measure.latency import Window
from tuner.records import Estimate


def test_warm_up_outlasts_the_first_wave() -> None:
    """First requests at a new load are many times slower; with one user still in its first, nothing is measured."""
    even = np.linspace(0, 10, 1000)
    first_wave = partial(steady.is_warm, load=4, times_s=even, now_s=10.0, request_s=2.0)
    assert not first_wave(num_users_through=3)
    assert first_wave(num_users_through=4)


def test_warm_up_outlasts_a_trend() -> None:
    """A rate that still climbs is not the load's own rate."""
    climbing = np.sqrt(np.linspace(0, 100, 1000))
    assert not steady.is_warm(load=1, num_users_through=1, times_s=climbing, now_s=10.0, request_s=10.0)
    assert steady.is_warm(load=1, num_users_through=1, times_s=climbing, now_s=10.0, request_s=1.0)


@given(st.integers(30, 2000), st.integers(0, 1))
def test_a_lasting_difference_is_a_trend_and_an_even_stream_is_none(count: int, fast_half: int) -> None:
    """One half three times as fast as the other is no steady state, whichever half it is."""
    even = np.linspace(0, 9.999, count)
    assert not steady.has_trend(even, Window(0, 10), tolerance=0.5)
    fast = (even >= 5) == bool(fast_half)
    lopsided = np.concatenate((even, even[fast], even[fast]))
    assert steady.has_trend(lopsided, Window(0, 10), tolerance=0.5)


def test_the_noise_of_a_few_events_is_no_trend() -> None:
    """Load 1 gives a few dozen tokens a second: a prefill in one half must not keep warm-up going for ever."""
    counts = (14, 22)
    times = np.concatenate([np.linspace(half, half + 0.99, count) for half, count in enumerate(counts)])
    assert not steady.has_trend(times, Window(0, 2), tolerance=0.25)
    assert steady.has_trend(np.repeat(times, 100), Window(0, 2), tolerance=0.25)


@pytest.mark.parametrize(("low", "high", "precise"), [(95.0, 105.0, True), (94.0, 106.0, False), (None, None, False)])
def test_precise_means_the_half_width_asked_for(low: float | None, high: float | None, precise: bool) -> None:  # noqa: FBT001 - a table's column
    """A stage ends early only when its throughput is known as well as was asked."""
    estimate = Estimate(value=100.0, low=low, high=high, num_samples=10)
    assert steady.is_precise(estimate, target_relative_half_width=0.05) is precise


def test_nothing_is_never_precise() -> None:
    """Zero tokens in every batch have no spread, and are no answer."""
    assert not steady.is_precise(Estimate(value=0, low=0, high=0, num_samples=10), target_relative_half_width=0.05)


def test_littles_law_holds_for_a_full_house() -> None:
    """Four users back to back, windows cutting through requests: the ratio has no edge effect."""
    records = [
        record(index=4 * n + user, intended_s=n + user / 4, times_s=(n + user / 4 + 1.0,))
        for n in range(-1, 10)
        for user in range(4)
    ]
    for window in (Window(2.0, 7.0), Window(2.13, 2.71)):
        assert steady.littles_law_ratio(records, window, mean_in_flight=4.0) == pytest.approx(1.0)


def test_littles_law_shows_places_that_failures_held() -> None:
    """If half of the places were held by requests that failed, latency and throughput describe the other half."""
    records = [record(index=n, intended_s=0.0, times_s=(10.0,), error="cut" if n % 2 else None) for n in range(4)]
    assert steady.littles_law_ratio(records, Window(1.0, 9.0), mean_in_flight=4.0) == pytest.approx(0.5)
    assert steady.littles_law_ratio([], Window(1.0, 9.0), mean_in_flight=0.0) is None
