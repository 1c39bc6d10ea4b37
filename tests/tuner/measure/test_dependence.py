"""Samples that depend on each other count for fewer, and a server seen in few states has shown little."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.measure.dependence import effective_samples, long_run_variance
from tuner.measure.latency import dependent_percentile, percentile
from tuner.measure.shown_rate import ENOUGH_STATES, dispersion_of, share_shown


def _autoregressive(phi: float, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    series = np.empty(count)
    series[0] = rng.standard_normal()
    for index, noise in enumerate(rng.standard_normal(count - 1), start=1):
        series[index] = phi * series[index - 1] + (1 - phi**2) ** 0.5 * noise
    return series


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_the_long_run_variance_is_the_textbooks(phi: float) -> None:
    """Of an AR(1) series of variance 1 it is (1 + phi) / (1 - phi); within a fifth on average of fifty long series."""
    found = np.mean([long_run_variance(_autoregressive(phi, 4000, seed)) for seed in range(50)])
    assert found == pytest.approx((1 + phi) / (1 - phi), rel=0.2)


def test_each_request_said_ten_times_is_one_request() -> None:
    """Ten requests that waited for the same one to end are one sample, not ten: else chance looks like certainty."""
    waits = np.random.default_rng(0).exponential(size=100)
    assert effective_samples(waits) > 50
    assert effective_samples(np.repeat(waits, 10)) < 120
    assert dependent_percentile(np.repeat(waits[:30], 10), 0.95).low is None
    assert percentile(np.repeat(waits[:30], 10), 0.95).low is not None


def test_gaps_of_a_request_are_one_part() -> None:
    """A thousand gaps of fifty requests count as fifty at the most."""
    gaps = np.random.default_rng(0).exponential(size=1000)
    assert effective_samples(gaps, [20] * 50) <= 50
    assert effective_samples(np.repeat([1.0, 9.0] * 5, 100), [20] * 50) < 25


@given(st.lists(st.floats(0, 1e6), max_size=200))
def test_never_more_samples_than_there_are(values: list[float]) -> None:
    """Whatever the series, its worth is a count from one to its length."""
    assert min(1, len(values)) <= effective_samples(values) <= len(values)


def test_a_server_seen_in_few_states_speaks_for_a_lower_rate() -> None:
    """A minute of ten-second requests has seen the load's chance fluctuation a few times: a worse one will come."""
    shares = [share_shown(mean_in_flight=25, num_states=states) for states in (1, 3, 10, 30, ENOUGH_STATES)]
    assert shares == sorted(shares)
    assert shares[0] < 0.6
    assert shares[2] == pytest.approx(0.85, abs=0.05)
    assert shares[-1] == 1.0
    assert share_shown(mean_in_flight=400, num_states=5) > share_shown(mean_in_flight=25, num_states=5)
    assert share_shown(mean_in_flight=25, num_states=5, dispersion=4) < share_shown(mean_in_flight=25, num_states=5)


def test_bursts_are_seen_in_the_gaps() -> None:
    """Arrivals in clumps fill a server further than Poisson's; even ones are not credited for it."""
    rng = np.random.default_rng(0)
    assert dispersion_of(np.cumsum(rng.gamma(0.25, 4.0, size=5000))) == pytest.approx(4, rel=0.2)
    assert dispersion_of(np.arange(100.0)) == 1.0
    assert dispersion_of(np.array([1.0])) == 1.0
