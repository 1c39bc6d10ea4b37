"""Whether requests come faster than a server can serve them: its queue then grows without end. Pure.

The rule: over ten equal parts of the window both the mean number of requests in flight and the median TTFT of the
requests that ended in it rise by the Mann-Kendall test at 1 % each, and the number in flight rises by at least half of
its mean (Theil-Sen slope times length). One rising alone is not it: a queue that fills to its steady length shows in
flight, a colder cache shows in TTFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np

from tuner.load.log import LoadLog
from tuner.measure.latency import Window, e2e_s, finished_inside, ttft_s
from tuner.records import RequestRecord

NUM_PARTS = 10
FEWEST_PARTS = 7
"""Parts without an ended request say nothing of TTFT; with fewer left the test has no power at 1 %."""

FEWEST_ENDED = 50
"""Five a part: with fewer, a few requests that came close together raise both series by chance."""

FEWEST_S = 5.0
FEWEST_SERVICE_LENGTHS = 2.0
"""A window is to be twice as long at least as a request is served, from its first token on, or all its parts are the
same requests. The wait before the first token is not counted: it is what grows."""

SIGNIFICANT_Z = 2.326
"""One-sided, 1 %."""

LEAST_RISE = 0.5


def mann_kendall_z(values: Sequence[float]) -> float:
    """Standard score of Kendall's S for a rise over time, corrected for continuity and ties (Mann 1945, Kendall 1975).

    Zero where there are too few values to say anything.
    """
    count = len(values)
    score = int(sum(np.sign(later - earlier) for earlier, later in combinations(values, 2)))
    _, ties = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    variance = (count * (count - 1) * (2 * count + 5) - float(np.sum(ties * (ties - 1) * (2 * ties + 5)))) / 18
    return 0.0 if variance <= 0 else float(np.sign(score) * max(0, abs(score) - 1) / variance**0.5)


def is_oversaturated(log: LoadLog, window: Window) -> bool:
    """Whether the rule of this module holds in a window of an open loop."""
    ended = [record for record in finished_inside(log.records, window) if record.error is None]
    if len(ended) < FEWEST_ENDED or window.length_s < max(FEWEST_S, FEWEST_SERVICE_LENGTHS * _mean_service_s(ended)):
        return False
    edges = np.linspace(window.start_s, window.end_s, NUM_PARTS + 1)
    in_flight = [log.in_flight.mean(*map(float, part)) for part in pairwise(edges)]
    waits_s = _median_ttfts_s(ended, edges)
    rise = (NUM_PARTS - 1) * _theil_sen_slope(in_flight)
    return (
        mann_kendall_z(in_flight) > SIGNIFICANT_Z
        and rise >= LEAST_RISE * float(np.mean(in_flight))
        and len(waits_s) >= FEWEST_PARTS
        and mann_kendall_z(waits_s) > SIGNIFICANT_Z
    )


def _mean_service_s(ended: Sequence[RequestRecord]) -> float:
    return float(np.mean([e2e_s(record) - ttft_s(record) for record in ended]))


def _median_ttfts_s(ended: Sequence[RequestRecord], edges: Sequence[float] | np.ndarray) -> list[float]:
    part_of = np.searchsorted(edges, [record.finished_s for record in ended], side="right")
    waits_s = np.array([ttft_s(record) for record in ended])
    return [float(np.median(waits_s[part_of == part])) for part in range(1, NUM_PARTS + 1) if (part_of == part).any()]


def _theil_sen_slope(values: Sequence[float]) -> float:
    """Median slope over all pairs, a step apart each (Theil 1950, Sen 1968)."""
    pairs = combinations(enumerate(values), 2)
    return float(np.median([(later - earlier) / (j - i) for (i, earlier), (j, later) in pairs]))
