"""Where a stage's start-up transient ends. Pure."""

from __future__ import annotations

import numpy as np

from tuner.measure.latency import Floats, Window

BATCH = 5
"""Observations averaged before a cut is looked for: single ones are too noisy to tell a transient from chance."""

FEWEST_BATCHES = 20
"""Under so many a cut is as likely chance as transient, and intervals after it claim too much."""

SHORTEST_BIN_S = 0.02
BINS_OF_A_REQUEST = 5
"""An observation counts the events of a fifth of a request's time, so that a batch of five is one request long: what a
closed loop does is correlated over that time."""


def mser5(series: Floats) -> int:
    """How many leading observations to drop; at most half of them.

    The marginal standard error rule: of all cuts the one after which the mean of the rest has the smallest squared
    standard error, sum((z - mean)^2) / n^2 over the n batches that are left; a transient inflates the sum, a needless
    cut shrinks n. Batches are means of five (White, An effective truncation heuristic for bias reduction in simulation
    output, Simulation 69, 1997; batches of five: White, Cobb and Spratt, Winter Simulation Conference 2000).

    Args:
        series: observations at equal distances, (n,).
    """
    num_batches = len(series) // BATCH
    if num_batches < FEWEST_BATCHES:
        return 0
    means = series[: num_batches * BATCH].reshape(num_batches, BATCH).mean(axis=1)
    left = np.arange(num_batches, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    error = np.maximum(squares - sums**2 / left, 0.0) / left**2
    return int(error[: num_batches // 2 + 1].argmin()) * BATCH


def transient_end_s(times_s: Floats, span: Window, *, request_s: float) -> float:
    """When a stream of events had settled; the span's start where it is too short to tell.

    Args:
        times_s: when events arrived.
        span: from the end of warm-up until now; nothing before it is looked at.
        request_s: mean duration of a request.
    """
    bin_s = max(SHORTEST_BIN_S, request_s / BINS_OF_A_REQUEST)
    num_bins = int(span.length_s / bin_s)
    if num_bins < BATCH * FEWEST_BATCHES:
        return span.start_s
    counts, _ = np.histogram(times_s, bins=num_bins, range=(span.start_s, span.start_s + num_bins * bin_s))
    return span.start_s + mser5(counts.astype(np.float64)) * bin_s
