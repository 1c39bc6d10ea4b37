"""What a load generator has seen so far, of the server and of itself."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tuner.load.in_flight import InFlight
from tuner.records import RequestRecord

Floats = npt.NDArray[np.float64]


class SentPrompt(NamedTuple):
    """A prompt as it was sent. Unit: tokens."""

    num_tokens: int
    num_shared_tokens: int
    """What of it a prefix cache may know by design."""

    @property
    def shared_share(self) -> float:
        """That, as a share of the prompt."""
        return self.num_shared_tokens / self.num_tokens


@dataclass(slots=True)
class LoadLog:
    """What a load generator has seen so far. Times in seconds from its first send."""

    origin_s: float = 0.0
    """The first send, by `perf_counter`."""

    records: list[RequestRecord] = field(default_factory=list)
    """In the order in which requests ended, and were read."""

    sent: dict[int, SentPrompt] = field(default_factory=dict)
    """By request index."""

    event_times_s: array[float] = field(default_factory=lambda: array("d"))
    """When stream events arrived: a live meter for progress and steadiness; figures come from `records`."""

    in_flight: InFlight = field(default_factory=InFlight)
    """Requests in flight over time."""

    loop_lags: list[tuple[float, float]] = field(default_factory=list)
    """(time, how late the event loop woke a sleeper)."""

    late_returns: list[tuple[float, float]] = field(default_factory=list)
    """(time, how late a user came back from a pause by the generator's own doing)."""

    cpu_times_s: list[tuple[float, float]] = field(default_factory=list)
    """(time, CPU time that the event loop's thread has used so far)."""

    num_in_flight: int = 0

    def now_s(self) -> float:
        """Seconds since the first send."""
        return perf_counter() - self.origin_s

    def note_events(self, at_s: float, num_events: int) -> None:
        """Count stream events that arrived in one read."""
        if num_events == 1:
            self.event_times_s.append(at_s - self.origin_s)
        else:
            self.event_times_s.extend([at_s - self.origin_s] * num_events)

    def events_since(self, at_s: float) -> Floats:
        """When stream events arrived from then on: a copy of the meter's end, however long the meter is."""
        return np.array(self.event_times_s[bisect_left(self.event_times_s, at_s) :])

    def note_flight(self, change: int) -> None:
        """A request took off (+1) or ended (-1)."""
        self.num_in_flight += change
        self.in_flight.step(self.now_s(), self.num_in_flight)

    def cpu_share(self, start_s: float, end_s: float) -> float | None:
        """Share of one core that the generator used over a window; None where it was not looked at twice in it."""
        inside = [look for look in self.cpu_times_s if start_s <= look[0] < end_s]
        if len(inside) < 2:
            return None
        (from_s, used_before_s), (to_s, used_after_s) = inside[0], inside[-1]
        return (used_after_s - used_before_s) / (to_s - from_s)

    def event_rate(self, start_s: float, end_s: float) -> float:
        """Stream events a second over a window."""
        count = bisect_left(self.event_times_s, end_s) - bisect_left(self.event_times_s, start_s)
        return count / (end_s - start_s)

    def mean_held_back(self, start_s: float, end_s: float) -> float:
        """Time average of the users whose pause was over and who were not let send yet (Little's law)."""
        return sum(late_s for at_s, late_s in self.late_returns if start_s <= at_s < end_s) / (end_s - start_s)
