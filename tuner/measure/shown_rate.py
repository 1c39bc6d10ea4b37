"""Which rate a stage of arrivals speaks for: what was sent, less what too few looks at the server's state leave open.

TTFT depends on how many requests are in flight, and that number changes slowly: over about a request's time. A stage
of few such times has seen few independent states, however many requests passed through them, and a worse state may
still come. With k independent states all seen to be good, 95 % sure, states up to the quantile 0.05^(1/k) are good
(for k = 59 that is the 95 % quantile, and nothing is left open).

With fewer, the stage speaks for the lower rate whose own 95 % quantile of the number in flight is no higher than that.
The number in flight of random arrivals that do not wait has the variance of a Poisson variable, times the squared
variation of the gaps where those come in bursts (an infinite-server queue); waiting adds to it, but then the TTFTs
themselves depend on each other and their interval says so.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from tuner.measure.latency import Floats

CONFIDENCE = 0.95
QUANTILE = 0.95

ENOUGH_STATES = math.ceil(math.log(1 - CONFIDENCE) / math.log(QUANTILE))
"""59: so many independent states all good, and 95 % of states are."""


def share_shown(*, mean_in_flight: float, num_states: int, dispersion: float = 1.0) -> float:
    """Which share of the rate that was sent a stage speaks for, 0 to 1.

    Args:
        mean_in_flight: requests, time average.
        num_states: independent looks at the number in flight.
        dispersion: squared variation of the gaps between arrivals, at least 1 (`dispersion_of`).
    """
    if num_states >= ENOUGH_STATES or mean_in_flight <= 0:
        return 1.0
    normal = NormalDist()
    seen = normal.inv_cdf((1 - CONFIDENCE) ** (1 / max(1, num_states)))
    highest = mean_in_flight + seen * math.sqrt(dispersion * mean_in_flight)
    if highest <= 0:
        return 0.0
    # n + z sqrt(d n) = highest, solved for sqrt(n).
    z = normal.inv_cdf(QUANTILE) * math.sqrt(dispersion)
    root = (math.sqrt(z * z + 4 * highest) - z) / 2
    return min(1.0, root * root / mean_in_flight)


def dispersion_of(times_s: Floats) -> float:
    """Squared coefficient of variation of the gaps between these times, at least Poisson's 1."""
    gaps = np.diff(np.sort(times_s))
    if len(gaps) < 2 or gaps.mean() <= 0:
        return 1.0
    return max(1.0, float(gaps.var() / gaps.mean() ** 2))
