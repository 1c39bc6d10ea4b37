"""A stage as somebody else's tool tells it, and whether it may be a point of a curve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from tuner.analysis.knee import LadderPoint

MOST_FAILED = 0.01
"""Share of requests that may fail in a stage."""

LITTLE_TOLERANCE = 0.1
"""How far completions per second times their mean latency may be from the concurrency of a closed loop."""

AT_THE_CAP = 0.9
"""Share of an open loop's cap on requests in flight from which on it is a closed loop in truth."""

FEWEST_FOR_P95 = 59
"""Samples from which on a p95 has a 95 % bound of its own: under it, it may be the slowest request."""


class Axis(StrEnum):
    """What the load of a ladder is."""

    CONCURRENCY = "concurrency"
    REQUEST_RATE = "request_rate"

    def text(self, load: float) -> str:
        """A load in words."""
        return f"{load:g} concurrent requests" if self is Axis.CONCURRENCY else f"{load:g} requests/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElsewhereStage:
    """One load and what was seen at it. None is unknown, never 0."""

    source: str
    """File, and the row in it where it has several."""

    axis: Axis
    load: float
    """Concurrent requests or requests per second; infinite where nothing paced the requests."""

    output_throughput: float
    """Output tokens per second."""

    output_throughput_half_width: float | None = None
    request_throughput_rps: float | None = None
    sent_rps: float | None = None
    """What was sent of an open loop's rate, which random arrivals scatter around."""

    num_sent: float | None = None
    """How many requests that were."""

    mean_in_flight: float | None = None
    mean_e2e_ms: float | None = None
    ttft_p95_ms: float | None = None
    itl_p95_ms: float | None = None
    e2e_p95_ms: float | None = None
    num_preemptions: int | None = None
    num_completed: int | None = None
    num_failed: int | None = None
    cap: float | None = None
    """Most requests in flight of an open loop."""

    fenced: bool = False
    kv_cache_usage_peak: float | None = None
    mean_running: float | None = None
    mean_waiting: float | None = None
    config: tuple[tuple[str, str], ...] = ()
    """What the file says of the engine: its parameters under vLLM's names, its model."""

    unfit: tuple[str, ...] = ()
    """Why its own tool says that it is no measurement."""

    @property
    def in_flight(self) -> float | None:
        """Mean requests in flight: as recorded, or by Little's law from completions per second and their mean E2E."""
        if self.mean_in_flight is not None:
            return self.mean_in_flight
        if self.request_throughput_rps is None or self.mean_e2e_ms is None:
            return None
        return self.request_throughput_rps * self.mean_e2e_ms / 1000


def reasons_to_leave_out(stage: ElsewhereStage) -> list[str]:
    """Why a stage is no point of the curve; none where it is one."""
    reasons = list(stage.unfit)
    if math.isinf(stage.load):
        reasons.append("its rate is unlimited: a burst that drains is no load")
    if not stage.output_throughput > 0:
        reasons.append(f"output_throughput is {stage.output_throughput:g}")
    failed, completed = stage.num_failed or 0, stage.num_completed or 0
    if failed > MOST_FAILED * (failed + completed):
        total = failed + completed
        reasons.append(f"{failed} of {total} requests failed, more than {MOST_FAILED:.0%}")
    return [*reasons, *_in_flight_faults(stage)]


def point_of(stage: ElsewhereStage, *, fence: float | None) -> LadderPoint:
    """The stage as the detector takes it: the load of an open loop is its mean number in flight (NaN if unknown)."""
    open_loop = stage.axis is Axis.REQUEST_RATE
    load = stage.load if not open_loop else math.nan if stage.in_flight is None else stage.in_flight
    enough = stage.num_completed is None or stage.num_completed >= FEWEST_FOR_P95
    return LadderPoint(
        load=load,
        rate_rps=stage.load if open_loop else None,
        throughput=stage.output_throughput,
        throughput_half_width=stage.output_throughput_half_width,
        ttft_p95_ms=stage.ttft_p95_ms if enough else None,
        itl_p95_ms=stage.itl_p95_ms if enough else None,
        num_preemptions=stage.num_preemptions,
        fenced=stage.fenced or (fence is not None and load > fence),
        valid=not reasons_to_leave_out(stage),
        kv_cache_usage_peak=stage.kv_cache_usage_peak,
        mean_running=stage.mean_running,
        mean_waiting=stage.mean_waiting,
    )


def _in_flight_faults(stage: ElsewhereStage) -> list[str]:
    """A closed loop must hold its concurrency, and an open one must not be held by its cap."""
    in_flight = stage.in_flight
    if in_flight is None or not math.isfinite(in_flight) or math.isinf(stage.load):
        return []
    if stage.axis is Axis.REQUEST_RATE:
        if stage.cap is None or in_flight < AT_THE_CAP * stage.cap:
            return []
        return [f"{in_flight:.3g} in flight at a cap of {stage.cap:g}: the cap paced the requests, not the rate"]
    if abs(in_flight - stage.load) < LITTLE_TOLERANCE * stage.load:
        return []
    seen = f"{in_flight:.3g} requests in flight on average, not {stage.load:g} (Little's law)"
    return [f"{seen}: more requests a stage make its filling and draining count for less"]
