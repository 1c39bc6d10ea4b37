"""How many requests are in flight over time: a look costs the same however long a stage has run."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class InFlight:
    """Requests in flight, a step for each change. Times in seconds, never before the one of the step before."""

    def __init__(self, steps: Iterable[tuple[float, int]] = ()) -> None:
        self._times_s = array("d")
        self._counts = array("q")
        # Request-seconds up to each step: the area between any two moments is then a difference.
        self._areas_s = array("d")
        for at_s, count in steps:
            self.step(at_s, count)

    def step(self, at_s: float, count: int) -> None:
        """From `at_s` on there are `count`."""
        self._areas_s.append(self._area_until(at_s))
        self._times_s.append(at_s)
        self._counts.append(count)

    def mean(self, start_s: float, end_s: float) -> float:
        """Time average over a window, by integration."""
        return (self._area_until(end_s) - self._area_until(start_s)) / (end_s - start_s)

    def most(self, start_s: float, end_s: float) -> int:
        """The most at any moment of a span, its ends included."""
        first, last = (bisect_right(self._times_s, at_s) for at_s in (start_s, end_s))
        return max(self._counts[max(0, first - 1) : last], default=0)

    def just_before(self, times_s: Floats) -> Floats:
        """How many there were just before each of these moments."""
        counts = np.concatenate(([0.0], np.array(self._counts, dtype=np.float64)))
        met: Floats = counts[np.searchsorted(np.array(self._times_s), times_s, side="left")]
        return met

    def _area_until(self, at_s: float) -> float:
        last = bisect_right(self._times_s, at_s) - 1
        return 0.0 if last < 0 else self._areas_s[last] + self._counts[last] * (at_s - self._times_s[last])
