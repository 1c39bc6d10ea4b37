"""What time it is for a simulated device: the machine's own, or one that jumps from step to step."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock that can be waited on. Seconds from an origin of its own, never backwards."""

    def now_s(self) -> float:
        """The time now."""
        ...

    def wait_until(self, deadline_s: float) -> None:
        """Return at `deadline_s`, or at once where that is past."""
        ...


class RealClock:
    """The machine's clock. Deadlines are absolute, so that what one wait oversleeps is not added to the next."""

    def now_s(self) -> float:
        """`perf_counter`, which Linux keeps for the whole machine."""
        return time.perf_counter()

    def wait_until(self, deadline_s: float) -> None:
        """Sleep; typically some 0.1 ms too long, for which the next deadline is that much nearer."""
        while (left_s := deadline_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class VirtualClock:
    """A clock that only moves when it is waited on: hours of simulated serving in seconds."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """The time it was last waited for."""
        return self._now_s

    def wait_until(self, deadline_s: float) -> None:
        """Be at `deadline_s` at once."""
        self._now_s = max(self._now_s, deadline_s)
