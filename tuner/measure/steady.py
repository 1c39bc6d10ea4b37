"""When a stage has settled, when it knows enough, and whether its figures agree with each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tuner.measure.latency import Floats, Window, e2e_s, percentile
from tuner.records import Estimate, RequestRecord

WARM_TOLERANCE = 0.25
"""Warm-up goes on while two halves of a request's time differ in rate by more than this share of their mean."""

UNSTEADY_TOLERANCE = 0.5
"""A measured window is not steady above this (one half 5/3 as fast as the other); smaller swings widen its interval."""

DRIFT_TOLERANCE = 0.5
"""A window in whose second half requests typically waited so much longer or shorter (share of the smaller) drifts."""

LITTLE_TOLERANCE = 0.10
"""X x R must agree with N within this share of N, beyond what the requests cut by the window's ends explain."""

FEWEST_FOR_LITTLE = 30
FEWEST_LATENCIES_FOR_LITTLE = 3.0

LOOK_GROWTH = 1.25
FEWEST_REQUEST_LENGTHS = 5.0
"""A window is first looked at when it is this many requests long: batch means need five batches of one."""

EARLY_STOP_WIDENING = 1.4
"""A stage that ends at the first narrow interval has picked a narrow one. On simulated streams that are correlated over
a request's time such intervals hold the true rate 86 to 88 times in 100; this much wider, 91 to 93 times."""


def has_trend(times_s: Sequence[float] | Floats, window: Window, *, tolerance: float) -> bool:
    """Whether events came clearly faster in one half of the window than in the other.

    Clearly: by more than this share of the mean, and by more than two standard deviations of a count.
    """
    counts, _ = np.histogram(np.asarray(times_s, dtype=np.float64), bins=2, range=(window.start_s, window.end_s))
    total = float(counts.sum())
    return bool(abs(float(counts[0]) - float(counts[1])) > max(tolerance * total / 2, 2 * total**0.5))


def drifts(latencies: Sequence[float]) -> bool:
    """Whether a latency clearly grew or shrank over the window: by its median, whose intervals are then apart.

    Args:
        latencies: in the order in which their requests ended.
    """
    middle = len(latencies) // 2
    halves = [percentile(half, 0.5) for half in (latencies[:middle], latencies[middle:])]
    fast, slow = sorted(halves, key=lambda median: median.value)
    if fast.high is None or slow.low is None:
        return False
    return slow.value > (1 + DRIFT_TOLERANCE) * fast.value and slow.low > fast.high


def is_warm(
    *, load: int, num_users_through: int, times_s: Sequence[float] | Floats, now_s: float, request_s: float
) -> bool:
    """Whether warm-up is over: the first wave has passed, and the last request's worth of time shows no trend.

    The first wave is one request of every user. All are sent at once, so their prefills queue behind each other, and
    an engine compiles for a batch size when it first meets it; no request of that wave tells how the load feels.

    Args:
        num_users_through: users whose first request has ended.
        times_s: when stream events arrived.
        request_s: mean duration of the requests that have ended so far.
    """
    if num_users_through < load:
        return False
    return not has_trend(times_s, Window(max(0.0, now_s - request_s), now_s), tolerance=WARM_TOLERANCE)


def is_precise(throughput: Estimate, *, target_relative_half_width: float) -> bool:
    """Whether a throughput's 95 % interval is as narrow as asked."""
    if throughput.low is None or throughput.high is None or throughput.value <= 0:
        return False
    return (throughput.high - throughput.low) / 2 <= target_relative_half_width * throughput.value


def is_open(p95_ms: Estimate, limit_ms: float) -> bool:
    """Whether a figure may as well be inside its limit as over it."""
    return p95_ms.low is not None and p95_ms.high is not None and p95_ms.low <= limit_ms <= p95_ms.high


def widened(throughput: Estimate) -> Estimate:
    """The figure with the interval that a stage which ended as soon as it was narrow may claim."""
    if throughput.low is None or throughput.high is None:
        return throughput
    low = throughput.value - EARLY_STOP_WIDENING * (throughput.value - throughput.low)
    high = throughput.value + EARLY_STOP_WIDENING * (throughput.high - throughput.value)
    return throughput.model_copy(update={"low": max(0.0, low), "high": high})


class Looks:
    """When a growing window is looked at: few times, far apart, since each look is a chance to stop at a fluke."""

    def __init__(self, min_s: float) -> None:
        self._next_s = min_s

    def is_due(self, length_s: float, *, request_s: float) -> bool:
        """Whether to look now; if so, the next look waits until the window is 1.25 times as long.

        Args:
            length_s: of the window.
            request_s: mean duration of a request; batches shorter than that are not independent.
        """
        if length_s < max(self._next_s, FEWEST_REQUEST_LENGTHS * request_s):
            return False
        self._next_s = LOOK_GROWTH * length_s
        return True


def littles_law_ratio(completed: Sequence[RequestRecord], window: Window, *, mean_in_flight: float) -> float | None:
    """X x R / N: completions a second times their mean latency over requests in flight as the sender counted them.

    1 in a long window. In one of length T the requests cut by its two ends put it off by up to R / T.
    Below 1 beyond that: failures held places. Above 1: latencies hold time that was not spent in flight.
    None where the window is too short to judge: under 30 completions, or under three of their mean latency.

    Args:
        completed: successes that ended inside the window.
        window: the measured one.
        mean_in_flight: time average over the window.
    """
    if len(completed) < FEWEST_FOR_LITTLE or mean_in_flight <= 0:
        return None
    latency_s = float(np.mean([e2e_s(record) for record in completed]))
    if window.length_s < FEWEST_LATENCIES_FOR_LITTLE * latency_s:
        return None
    return len(completed) / window.length_s * latency_s / mean_in_flight
