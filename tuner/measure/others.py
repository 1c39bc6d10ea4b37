"""Other people's requests on the server that is measured: what it counts beyond what we sent. Pure.

Two looks, as each misses what the other sees. At every scrape, requests running and waiting beyond the most that we had
in flight shortly before: someone who is always there. Over the window, requests that ended beyond those of ours: many
short ones. Requests of ours that were hung up on are neither: the engine counts them as aborted, and is rid of them
long before half of a window is over.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tuner.load.log import LoadLog
from tuner.measure.prometheus import MetricsSnapshot, increase
from tuner.records import RequestRecord

FEWEST_SCRAPES = 10
"""So many must tell how full the engine was before that is held against the sender's count."""

STALE_S = 0.5
"""A gauge may be as old as an engine's step, and a scrape takes its time."""


def foreign_in_flight(samples: Sequence[MetricsSnapshot], log: LoadLog) -> float | None:
    """Median of the requests that run or wait and are not ours; None where too few scrapes say."""
    beyond = [
        max(0, sample.running + sample.waiting - log.in_flight.most(sample.at_s - STALE_S, sample.at_s))
        for sample in samples
        if sample.running is not None and sample.waiting is not None
    ]
    return float(statistics.median(beyond)) if len(beyond) >= FEWEST_SCRAPES else None


def foreign_ended(
    before: MetricsSnapshot | None, after: MetricsSnapshot | None, records: Sequence[RequestRecord]
) -> int | None:
    """Requests that ended between two scrapes, aborted ones aside, and are not ours; None where that is unknown."""
    if before is None or after is None:
        return None
    ended = increase(before.requests_ended, after.requests_ended)
    if ended is None:
        return None
    ours = sum(not record.unfinished and before.at_s <= record.finished_s < after.at_s for record in records)
    return max(0, ended - ours)
