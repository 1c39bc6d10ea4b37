"""What a stage of arrivals at a rate shows by now, and whether that settles if the rate is safe. Pure.

Latencies of an open loop depend on those before and count for less (`dependence`); the state of the server must have
been seen often enough, too (`shown_rate`). Limits far above all that was seen need less of both (`far_bound`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.answer import Slo
from tuner.load.log import LoadLog
from tuner.measure import latency
from tuner.measure.dependence import effective_samples
from tuner.measure.far_bound import far_bound
from tuner.measure.latency import Window
from tuner.measure.shown_rate import ENOUGH_STATES, dispersion_of, share_shown
from tuner.records import Estimate, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """What was sent inside a window, and what it met."""

    sent_rps: float
    num_states: int
    """Independent looks at the number of requests in flight."""

    share_shown: float
    """Which share of the rate the stage speaks for (`shown_rate`)."""


def arrivals_in(log: LoadLog, window: Window, times_s: Sequence[float]) -> Arrivals:
    """What was sent inside `window`.

    Args:
        log: of the stage, from its first send on.
        window: the measured one.
        times_s: when every request of the stage was to be sent.
    """
    inside = np.sort(np.array([at_s for at_s in times_s if window.holds(at_s)]))
    num_states = effective_samples(log.in_flight.just_before(inside))
    return Arrivals(
        sent_rps=len(inside) / window.length_s,
        num_states=num_states,
        share_shown=share_shown(
            mean_in_flight=log.in_flight.mean(window.start_s, window.end_s),
            num_states=num_states,
            dispersion=dispersion_of(inside),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FarBounds:
    """Upper bounds of both p95s that hold for whole rates, whatever states were not seen; None: too few looks."""

    ttft_p95_ms: float | None
    itl_p95_ms: float | None

    def are_inside(self, limits: Slo) -> bool:
        """Whether the limits are so far away that these bounds suffice."""
        pairs = ((self.ttft_p95_ms, limits.ttft_p95_ms), (self.itl_p95_ms, limits.itl_p95_ms))
        return all(bound is not None and bound <= limit for bound, limit in pairs)


def far_bounds(settled: Sequence[RequestRecord], window: Window, *, num_states: int) -> FarBounds:
    """The bounds by what ended well inside `window`, where the server's state was seen independently so often."""
    ordered = sorted((record for record in settled if record.error is None), key=latency.by_time)
    waits_ms = [1e3 * latency.ttft_s(record) for record in ordered]
    gaps = [found for record in ordered if (found := latency.itl_gaps_s(record, window))]
    merged_ms, sizes = [1e3 * gap for found in gaps for gap in found], [len(found) for found in gaps]
    return FarBounds(
        ttft_p95_ms=far_bound(waits_ms, num_looks=min(num_states, effective_samples(waits_ms))),
        itl_p95_ms=far_bound(merged_ms, sizes, num_looks=min(num_states, effective_samples(merged_ms, sizes))),
    )


def is_settled(log: LoadLog, settled: Sequence[RequestRecord], window: Window, limits: Slo) -> bool:
    """Whether it is settled that the rate is over a limit, or inside both: far inside, or with states enough seen.

    Args:
        log: of the stage so far.
        settled: successes that ended inside `window`.
        window: what counts so far.
        limits: on both p95s.
    """
    waits_ms = [1e3 * latency.ttft_s(record) for record in sorted(settled, key=latency.by_time)]
    gaps = (latency.itl_percentile(settled, window, q, are_dependent=True) for q in (0.5, 0.95))
    itl_p50, itl_p95 = (latency.scaled(gap, 1e3) for gap in gaps)
    ttft_p50, ttft_p95 = (latency.dependent_percentile(waits_ms, q) for q in (0.5, 0.95))
    if _is_over(ttft_p50, ttft_p95, limits.ttft_p95_ms) or _is_over(itl_p50, itl_p95, limits.itl_p95_ms):
        return True
    num_states = arrivals_in(log, window, [record.intended_s for record in log.records]).num_states
    if far_bounds(settled, window, num_states=num_states).are_inside(limits):
        return True
    is_inside = _is_inside(ttft_p95, limits.ttft_p95_ms) and _is_inside(itl_p95, limits.itl_p95_ms)
    return is_inside and num_states >= ENOUGH_STATES


def _is_inside(p95_ms: Estimate, limit_ms: float) -> bool:
    return p95_ms.high is not None and p95_ms.high <= limit_ms


def _is_over(p50_ms: Estimate, p95_ms: Estimate, limit_ms: float) -> bool:
    """Where samples are too few for a p95 the median may tell: the p95 is above it."""
    return any(each.low is not None and each.low > limit_ms for each in (p50_ms, p95_ms))
