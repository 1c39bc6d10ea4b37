"""A bound for limits far away must hold, or a rate is called safe that is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.measure.far_bound import FEWEST_LOOKS, MARGIN, far_bound
from tuner.measure.shown_rate import ENOUGH_STATES


def test_few_looks_bound_nothing() -> None:
    """Nine looks could all have met a quiet minute."""
    assert far_bound(np.ones(500), num_looks=FEWEST_LOOKS - 1) is None
    assert far_bound([], num_looks=99) is None
    assert far_bound(np.ones(500), [50] * (FEWEST_LOOKS - 1) + [50], num_looks=99) is not None
    assert far_bound(np.ones(450), [50] * (FEWEST_LOOKS - 1), num_looks=99) is None


@given(st.integers(FEWEST_LOOKS, 200), st.floats(0.001, 1e4))
def test_it_lies_above_all_that_was_seen_and_closer_the_more_that_is(looks: int, size: float) -> None:
    """More looks at the same values never widen it, and never narrow it below the margin."""
    values = np.full(1000, size)
    bound, wider = far_bound(values, num_looks=looks), far_bound(values, num_looks=FEWEST_LOOKS)

    assert bound is not None
    assert wider is not None
    assert MARGIN * size * (1 - 1e-9) <= bound <= wider * (1 + 1e-9)
    if looks >= ENOUGH_STATES:
        assert bound == pytest.approx(MARGIN * size, rel=0.01)


def test_one_bad_stretch_counts_however_long_the_others_are() -> None:
    """A p95 over all would not see a burst of two stretches in fifty."""
    values = np.ones(1000)
    values[500:540] = 30.0
    bound = far_bound(values, num_looks=50)

    assert bound is not None
    assert bound >= MARGIN * 30


@pytest.mark.parametrize("looks", [10, 20, 59])
def test_it_holds_for_exponential_tails(looks: int) -> None:
    """Independent stretches of a memoryless wait: the true p95, ln 20, is missed in none of 500."""
    rng = np.random.default_rng(7)
    bounds = [far_bound(np.repeat(rng.exponential(1.0, looks), 5), num_looks=looks) for _ in range(500)]

    assert sum(bound is None or bound < np.log(20) for bound in bounds) == 0


def test_gaps_of_a_request_stay_together() -> None:
    """A cut inside a request would make two looks of one."""
    gaps = np.concatenate([np.full(7, float(index)) for index in range(20)])

    assert far_bound(gaps, [7] * 20, num_looks=20) == far_bound(np.arange(20.0), num_looks=20)
