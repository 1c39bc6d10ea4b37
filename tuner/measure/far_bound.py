"""An upper bound of a p95 by few independent looks, wide of the mark and good for limits far away. Pure.

The samples are cut into k stretches, as many as they are worth independent looks, and the p95 of each is taken. All k
lie at or below the worst of them, M, so that 95 % sure at least the share q = 0.05^(1/k) of all stretches does. How bad
the others are nobody has seen. Where the hazard rate of their distribution does not fall (increasing on average; Barlow
and Proschan, Statistical Theory of Reliability and Life Testing, 1975, chapter 4), the p95 is at most

    M ln(0.05) / ln(1 - q)

which is 2.2 M for ten looks and M for 59. Waiting times have exponential tails, but also a share that does not wait at
all, and few looks are counted too high: hence the margin, and no bound from fewer than `FEWEST_LOOKS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tuner.measure.latency import Floats
from tuner.measure.shown_rate import CONFIDENCE, ENOUGH_STATES, QUANTILE

FEWEST_LOOKS = 10
MARGIN = 2.5


def far_bound(values: Sequence[float] | Floats, sizes: Sequence[int] | None = None, *, num_looks: int) -> float | None:
    """The bound, in the unit of the values; None for too few looks.

    Args:
        values: in the order of time.
        sizes: how many values in a row make up one part, as a request's gaps do; each is one by default.
        num_looks: how many independent looks they are worth, or those at the server's state where these are fewer.
    """
    every = np.asarray(values, dtype=np.float64)
    parts = np.arange(1, len(every)) if sizes is None else np.cumsum(np.asarray(sizes, dtype=np.int_))[:-1]
    looks = min(num_looks, ENOUGH_STATES, len(parts) + 1)
    if len(every) == 0 or looks < FEWEST_LOOKS:
        return None
    cuts = parts[(np.arange(1, looks) * (len(parts) + 1)) // looks - 1]
    worst = max(float(np.quantile(each, QUANTILE, method="inverted_cdf")) for each in np.split(every, cuts))
    seen = (1 - CONFIDENCE) ** (1 / looks)
    return MARGIN * worst * max(1.0, math.log(1 - QUANTILE) / math.log(1 - seen))
