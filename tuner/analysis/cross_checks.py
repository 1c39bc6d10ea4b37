"""Other rules for the knee, shown beside ours and never deciding."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from tuner.analysis.curve_family import FloatArray
from tuner.answer import CrossChecks

SMALL_GAIN_PER_DOUBLING = 1.1
_LARGEST_USL_ERROR = 0.2
_FARTHEST_USL_PEAK = 2.0
"""In highest loads: a peak farther out is extrapolated from next to nothing."""


def cross_check(loads: FloatArray, throughput: FloatArray) -> CrossChecks:
    """What the other rules say of valid, unfenced stages in rising load; (stages,) each, all positive."""
    if loads.size < 3:
        return CrossChecks()
    return CrossChecks(
        asymptote_crossing=_known(asymptote_crossing(loads, throughput)),
        usl=_known(usl_peak(loads, throughput)),
        kneedle=kneedle(loads, throughput),
        ten_percent_per_doubling=ten_percent_per_doubling(loads, throughput),
    )


def asymptote_crossing(loads: FloatArray, throughput: FloatArray) -> float:
    """Where the straight line through the lowest load meets the best throughput.

    Little's law: N* = X_max R(1), with R(1) = N / X at the lowest load.
    """
    return float(throughput.max() * (loads[0] / throughput[0]))


def usl_peak(loads: FloatArray, throughput: FloatArray) -> float | None:
    """The load where the Universal Scalability Law has its peak; None where it does not fit or has none in sight.

    X(N) = l N / (1 + s (N - 1) + k N (N - 1)), so N / X is linear in (1, N - 1, N (N - 1)): least squares on relative
    errors (Gunther, Guerrilla Capacity Planning, 2007). The peak is at sqrt((1 - s) / k).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        terms = np.stack([np.ones_like(loads), loads - 1.0, loads * (loads - 1.0)], axis=1)
        scaled = terms * (throughput / loads)[:, None]
    if not np.isfinite(scaled).all():
        return None
    solution, _, rank, _ = np.linalg.lstsq(scaled, np.ones_like(loads), rcond=None)
    error = float(np.abs(scaled @ solution - 1.0).max())
    base, contention, crosstalk = (float(value) for value in solution)
    if rank < terms.shape[1] or error > _LARGEST_USL_ERROR or crosstalk <= 0 or contention >= base:
        return None
    peak = math.sqrt((base - contention) / crosstalk)
    return peak if peak <= _FARTHEST_USL_PEAK * loads[-1] else None


def kneedle(loads: FloatArray, throughput: FloatArray) -> float | None:
    """The stage Kneedle names on the linear axis; None where it names none.

    Both axes are scaled to 0 to 1. A stage that stands farther above the diagonal than its neighbours is the knee once
    a later stage, before the next such stage, is lower by more than the mean step in load (Satopää et al., Finding a
    "Kneedle" in a Haystack, 2011, with S = 1). A ladder has too few stages to smooth them first.
    """
    height = float(np.ptp(throughput))
    if height == 0:
        return None
    above = (throughput - throughput.min()) / height - (loads - loads[0]) / (loads[-1] - loads[0])
    inner = above[1:-1]
    peaks = np.flatnonzero((inner > above[:-2]) & (inner >= above[2:])) + 1
    for peak, following in pairwise([*peaks.tolist(), loads.size]):
        if above[peak + 1 : following].min() < above[peak] - 1 / (loads.size - 1):
            return float(loads[peak])
    return None


def ten_percent_per_doubling(loads: FloatArray, throughput: FloatArray) -> float | None:
    """The first stage from which the next buys less than 10 % per doubling of load; None where all buy more."""
    elasticity = np.diff(np.log(throughput)) / np.diff(np.log(loads))
    small = np.flatnonzero(elasticity < math.log2(SMALL_GAIN_PER_DOUBLING))
    return float(loads[small[0]]) if small.size else None


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
