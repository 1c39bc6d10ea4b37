"""When a stage has settled, when it knows enough, and whether its figures agree with each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tuner.measure.latency import Floats, Window
from tuner.records import Estimate, RequestRecord

WARM_TOLERANCE = 0.25
"""Warm-up goes on while two halves of a request's time differ in rate by more than this share of their mean."""

UNSTEADY_TOLERANCE = 0.5
"""A measured window is not steady above this (one half 5/3 as fast as the other); smaller swings widen its interval."""

LITTLE_TOLERANCE = 0.10
"""N and X x R must agree within this share of N."""


def has_trend(times_s: Sequence[float] | Floats, window: Window, *, tolerance: float) -> bool:
    """Whether events came clearly faster in one half of the window than in the other.

    Clearly: by more than this share of the mean, and by more than two standard deviations of a count.
    """
    counts, _ = np.histogram(np.asarray(times_s, dtype=np.float64), bins=2, range=(window.start_s, window.end_s))
    total = float(counts.sum())
    return bool(abs(float(counts[0]) - float(counts[1])) > max(tolerance * total / 2, 2 * total**0.5))


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


def littles_law_ratio(records: Iterable[RequestRecord], window: Window, *, mean_in_flight: float) -> float | None:
    """X x R / N over the window: 1 when throughput, latency and concurrency are figures of one system.

    X x R is the time that requests which did not fail spent inside the window, divided by its length. Counting
    residence, not whole latencies of finished requests, leaves no edge effect in a window of a few requests' length.
    N is what the sender counted in flight. Below 1: failures held places, or latencies leave out waiting that
    happened. None where nothing was in flight.
    """
    if mean_in_flight <= 0:
        return None
    residence_s = sum(
        max(0.0, min(record.finished_s, window.end_s) - max(record.intended_s, window.start_s))
        for record in records
        if record.error is None
    )
    return residence_s / window.length_s / mean_in_flight
