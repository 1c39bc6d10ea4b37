"""Where the start-up transient of a stage ends: what is not cut off makes a load look slower or faster than it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.measure.latency import Floats, Window
from tuner.measure.transient import BATCH, FEWEST_BATCHES, mser5, transient_end_s


def _events(rng: np.random.Generator, rates: Floats, *, step_s: float) -> Floats:
    counts = rng.poisson(rates * step_s)
    return np.repeat(np.arange(len(rates)) * step_s, counts) + rng.uniform(0, step_s, counts.sum())


@pytest.mark.parametrize("first_rate", [0.0, 100.0, 900.0])
def test_a_slow_or_a_fast_start_is_cut_off(first_rate: float) -> None:
    """Two seconds of another rate in front of eight: never less is cut off, and typically little more."""
    cuts = []
    for seed in range(21):
        rates = np.where(np.arange(1000) < 200, first_rate, 300.0)
        times_s = _events(np.random.default_rng(seed), rates, step_s=0.01)
        cuts.append(transient_end_s(times_s, Window(0.0, 10.0), request_s=0.2))
    assert min(cuts) >= 1.99
    assert np.median(cuts) <= 3.0


def test_a_steady_stream_is_hardly_cut() -> None:
    """Samples are dear: of a stream without a transient a few hundredths go on average."""
    cuts = [
        transient_end_s(
            _events(np.random.default_rng(seed), np.full(1000, 300.0), step_s=0.01), Window(0, 10), request_s=0.3
        )
        for seed in range(200)
    ]
    assert np.mean(cuts) < 0.1 * 10


@given(st.lists(st.floats(0, 1e6), max_size=200))
def test_at_most_half_is_cut(series: list[float]) -> None:
    """Whatever was counted, at least half is left, and nothing is judged by fewer batches than can tell."""
    dropped = mser5(np.array(series))
    assert 0 <= dropped <= len(series) / 2
    if len(series) < BATCH * FEWEST_BATCHES:
        assert dropped == 0


@given(st.floats(0, 100), st.floats(0, 1), st.floats(0, 10))
def test_a_window_too_short_to_tell_is_kept_whole(start_s: float, length_s: float, request_s: float) -> None:
    """A window of a few requests has no settled part that could be told from the rest."""
    span = Window(start_s, start_s + length_s)
    assert span.start_s <= transient_end_s(np.array([start_s]), span, request_s=request_s) <= span.end_s
    assert transient_end_s(np.array([start_s]), span, request_s=length_s) == start_s
