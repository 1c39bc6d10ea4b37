"""Requests in flight: a look that is cheap must say what counting every moment says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.load.in_flight import InFlight

TIMES_S = st.floats(0.0, 100.0)
STEPS = st.lists(st.tuples(TIMES_S, st.integers(0, 5000)), max_size=40).map(
    lambda steps: sorted(steps, key=lambda s: s[0])
)


def _mean(steps: list[tuple[float, int]], start_s: float, end_s: float) -> float:
    """What each step adds to the area, one by one."""
    ends_s = [at_s for at_s, _ in steps[1:]] + [end_s]
    parts = zip(steps, ends_s, strict=False)
    return sum(n * max(0.0, min(to_s, end_s) - max(at_s, start_s)) for (at_s, n), to_s in parts) / (end_s - start_s)


def test_the_time_in_flight_is_integrated_over_the_window() -> None:
    """The average of samples would miss what happens between them."""
    flight = InFlight([(0.0, 1), (1.0, 2), (2.0, 4), (4.0, 0)])
    assert flight.mean(0.5, 4.5) == pytest.approx((0.5 * 1 + 1 * 2 + 2 * 4 + 0.5 * 0) / 4)
    assert flight.mean(3.0, 3.5) == pytest.approx(4.0)


@given(STEPS, TIMES_S, st.floats(0.01, 100.0))
def test_a_window_holds_what_its_steps_hold(steps: list[tuple[float, int]], start_s: float, length_s: float) -> None:
    """A mean that drifts from the steps would call a held load not held, or a queue that grows steady."""
    flight, end_s = InFlight(steps), start_s + length_s
    assert flight.mean(start_s, end_s) == pytest.approx(_mean(steps, start_s, end_s), rel=1e-6, abs=1e-6)
    at_its_start = [count for at_s, count in steps if at_s <= start_s][-1:]
    assert flight.most(start_s, end_s) == max(
        [*at_its_start, *(count for at_s, count in steps if start_s < at_s <= end_s)], default=0
    )


@given(STEPS, st.lists(TIMES_S, max_size=10))
def test_a_request_does_not_meet_itself(steps: list[tuple[float, int]], times_s: list[float]) -> None:
    """The state an arrival sees is the one before it: counting itself would be a state nobody met."""
    met = InFlight(steps).just_before(np.array(times_s, dtype=np.float64))
    assert met.tolist() == [next((n for at_s, n in reversed(steps) if at_s < time_s), 0) for time_s in times_s]
