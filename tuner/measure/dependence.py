"""How many independent samples a series is worth whose values depend on those before. Pure.

Requests of one busy period wait for each other, so their latencies say the same thing many times over. For a quantile
only the indicator of lying above it counts (Woodruff, Confidence intervals for medians and other position measures,
JASA 47, 1952; for dependent series Heidelberger and Lewis, Quantile estimation in dependent sequences, Operations
Research 32, 1984): the share above it has the variance p (1 - p) / n times an inflation that the indicator's
autocorrelation gives, and n over the inflation is the number of independent samples.

The autocorrelations are summed as Geyer's initial monotone sequence (Practical Markov chain Monte Carlo, Statistical
Science 7, 1992). A short series shows few crossings of a high level, and looks less dependent there than it is; so
several levels are looked at, and the least favourable one counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVELS = (0.5, 0.75, 0.9, 0.95)
"""Quantiles of the series at whose crossings its dependence is looked at."""


def long_run_variance(series: Floats) -> float:
    """N times the variance of the series' mean: the sum of its autocovariances, by the initial monotone sequence."""
    count = len(series)
    if count < 2:
        return 0.0
    centred = series - series.mean()
    spectrum = np.fft.rfft(centred, 2 * count)
    covariances = np.fft.irfft(spectrum * np.conj(spectrum))[:count] / count
    pairs = covariances[0 : count - 1 : 2] + covariances[1:count:2]
    positive = int(np.argmax(pairs <= 0)) if np.any(pairs <= 0) else len(pairs)
    return max(0.0, float(2 * np.minimum.accumulate(pairs[:positive]).sum() - covariances[0]))


def effective_samples(values: Sequence[float] | Floats, sizes: Sequence[int] | None = None) -> int:
    """How many independent samples these are worth, at most one a part.

    Args:
        values: in the order of time.
        sizes: how many values in a row make up one part, as a request's gaps do; each is one by default. None is 0.
    """
    every = np.asarray(values, dtype=np.float64)
    counts = np.ones(len(every), dtype=np.int_) if sizes is None else np.asarray(sizes, dtype=np.int_)
    if len(counts) < 2:
        return len(counts)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    levels = np.unique(np.quantile(every, LEVELS, method="inverted_cdf"))
    return max(1, int(min(len(counts), *(_at_level(every > level, starts, counts) for level in levels))))


def _at_level(above: npt.NDArray[np.bool_], starts: npt.NDArray[np.int_], sizes: npt.NDArray[np.int_]) -> float:
    """Independent samples for the share of values above a level: the ratio of two sums over parts."""
    share = float(above.mean())
    if share == 0.0:
        return float(len(sizes))
    residuals = np.add.reduceat(above.astype(np.float64), starts) - share * sizes
    variance = long_run_variance(residuals) * len(sizes) / float(sizes.sum()) ** 2
    return share * (1 - share) / variance if variance > 0 else float(len(sizes))
