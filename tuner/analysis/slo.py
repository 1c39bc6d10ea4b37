"""The SLO: derived where none was given, judged on a stage, and the operating point that stands inside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tuner.analysis.knee import LadderPoint
from tuner.answer import KneeFinding, LadderVerdict, Slo
from tuner.records import CLIMB_KINDS, Estimate, StageRecord

ITL_OVER_UNLOADED = 5.0
"""Derived limit of p95 ITL over the unloaded engine's median (Sarathi-Serve's strict SLO)."""

TTFT_OVER_UNLOADED = 10.0
UNPROVEN = 0.05
"""Violation of a p95 that holds by value but came from too few samples to have an interval."""

UNKNOWN = 10.0
"""Violation of a figure that is not known: it fails closed."""

KV_HEADROOM = 0.05
"""Share of the KV cache that must stay free."""


LEFT_OF_BOUNDARY = 0.97
"""Where to measure below an interpolated boundary, as a share of it: a stage on it is as likely over as inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloBoundary:
    """Where a ladder leaves the SLO."""

    limit: str
    """Which limit is crossed first: `ttft_p95` or `itl_p95`."""

    inside: float | None
    """Load of the last stage inside; None where the lowest stage is over already."""

    outside: float
    """Load of the first stage over the limit."""

    load: float | None
    """Interpolated between the two, not measured; None where there is nothing inside."""


def slo_boundary(
    points: Sequence[LadderPoint], *, ttft_p95_ms: float | None = None, itl_p95_ms: float | None = None
) -> SloBoundary | None:
    """The lowest load at which a p95 crosses its limit, between two stages; None where none does.

    Between neighbours the p95 is taken for a power of the load: a straight line in log-log. The first crossing counts,
    a later dip below the limit does not. Stages whose p95 is not known, invalid and fenced ones say nothing.

    Args:
        points: the ladder, in any order.
        ttft_p95_ms: the limit, or None for no limit.
        itl_p95_ms: likewise.
    """
    usable = sorted((p for p in points if p.valid and not p.fenced and p.name > 0), key=lambda point: point.name)
    series = {
        "ttft_p95": ([(p.name, p.ttft_p95_ms) for p in usable], ttft_p95_ms),
        "itl_p95": ([(p.name, p.itl_p95_ms) for p in usable], itl_p95_ms),
    }
    found = [_crossing(name, values, limit) for name, (values, limit) in series.items() if limit is not None]
    crossed = [boundary for boundary in found if boundary is not None]
    return min(crossed, key=lambda boundary: (boundary.load or 0.0, boundary.outside), default=None)


def load_left_of(boundary: SloBoundary) -> int | None:
    """A whole load just left of the boundary, to be measured; None where there is none between the two stages."""
    if boundary.inside is None or boundary.load is None:
        return None
    load = math.floor(LEFT_OF_BOUNDARY * boundary.load)
    return load if boundary.inside < load < boundary.outside else None


def highest_inside(
    points: Sequence[LadderPoint],
    knee: KneeFinding,
    *,
    ttft_p95_ms: float | None = None,
    itl_p95_ms: float | None = None,
) -> LadderPoint | None:
    """The operating point among stages that may come from elsewhere; None where there is none.

    Like `operating_point`, but headroom is not asked for, as others do not record it, and preemptions are only held
    against a stage that is known to have some.
    """
    usable = sorted((p for p in points if p.valid and not p.fenced), key=lambda point: point.name)
    if knee.verdict is LadderVerdict.ALREADY_SATURATED:
        usable = usable[:1]
    limit = knee.load if knee.load is not None else math.inf
    fit = [
        point
        for point in usable
        if point.name < limit
        and not point.num_preemptions
        and _within(point.ttft_p95_ms, ttft_p95_ms)
        and _within(point.itl_p95_ms, itl_p95_ms)
    ]
    return max(fit, key=lambda point: (point.throughput, -point.name), default=None)


def derive_slo(stages: Sequence[StageRecord]) -> Slo | None:
    """Limits from the unloaded engine: its valid ladder stage at load 1; None where there is none with both medians."""
    unloaded = next(
        (
            stage
            for stage in stages
            if stage.load == 1
            and stage.valid
            and stage.kind in CLIMB_KINDS
            and _known(stage.itl_p50_ms)
            and _known(stage.ttft_p50_ms)
        ),
        None,
    )
    if unloaded is None:
        return None
    return Slo(
        ttft_p95_ms=TTFT_OVER_UNLOADED * unloaded.ttft_p50_ms.value,
        itl_p95_ms=ITL_OVER_UNLOADED * unloaded.itl_p50_ms.value,
        derived=True,
    )


def violations(stage: StageRecord, slo: Slo) -> dict[str, float]:
    """How far each p95 is over its limit, as the log of their ratio: 0 or less is inside.

    A p95 without an interval came from too few samples: nobody ranks on it, so it is at least `UNPROVEN` over.
    """
    return {
        "ttft_p95": _violation(stage.ttft_p95_ms, slo.ttft_p95_ms),
        "itl_p95": _violation(stage.itl_p95_ms, slo.itl_p95_ms),
    }


def complies(stage: StageRecord, slo: Slo) -> bool:
    """Whether both p95s are known, proven and inside."""
    return max(violations(stage, slo).values()) <= 0


def over_within_the_fence(stage: StageRecord, slo: Slo) -> str:
    """Which p95s of a stage below the fence are known and over their limit, in words; empty where none is.

    A higher fence does not mend those. TTFT of users who think is left out: on average they may all run, and some of
    their requests wait at the fence all the same.
    """
    tails = [("ITL", stage.itl_p95_ms, slo.itl_p95_ms)]
    if not stage.thinks:
        tails.insert(0, ("TTFT", stage.ttft_p95_ms, slo.ttft_p95_ms))
    over = [(name, p95.value, limit) for name, p95, limit in tails if p95.value > limit]
    return " and ".join(f"p95 {name} is {value:.3g} of {limit:.3g} ms" for name, value, limit in over)


def least_violating_stage(stages: Sequence[StageRecord], slo: Slo) -> StageRecord | None:
    """The valid, unfenced ladder stage whose worse p95 is least over its limit, the higher throughput among equals."""
    ladder = [stage for stage in stages if stage.valid and not stage.fenced and stage.kind in CLIMB_KINDS]
    return min(
        ladder,
        key=lambda stage: (max(violations(stage, slo).values()), -stage.output_throughput.value, stage.load),
        default=None,
    )


def keeps_headroom(stage: StageRecord) -> bool:
    """Whether nothing was preempted and the KV cache kept its headroom; what is unknown fails."""
    return stage.has_no_preemptions and not stage.is_unknown("kv_cache_usage_peak") and may_keep_headroom(stage)


def may_keep_headroom(stage: StageRecord) -> bool:
    """Whether nothing is known against its headroom: for servers that cannot tell, and where that is said."""
    return not stage.num_preemptions and (stage.kv_cache_usage_peak or 0.0) <= 1 - KV_HEADROOM


def operating_point(
    stages: Sequence[StageRecord],
    knee: KneeFinding,
    slo: Slo,
    *,
    has_headroom: Callable[[StageRecord], bool] = keeps_headroom,
) -> StageRecord | None:
    """The stage of highest throughput left of the knee, inside the SLO and with headroom; None where there is none.

    Left of a knee means strictly left. A fence is a limit we set, so it is safe to stand at it: without a knee every
    unfenced stage may be it, except on a ladder that is saturated from its first stage, where only that one may.
    """
    ladder = [stage for stage in stages if stage.valid and not stage.fenced and stage.kind in CLIMB_KINDS]
    if not ladder:
        return None
    if knee.verdict is LadderVerdict.ALREADY_SATURATED:
        first = min(stage.load for stage in ladder)
        ladder = [stage for stage in ladder if stage.load == first]
    limit = knee.load if knee.verdict is LadderVerdict.KNEE and knee.load is not None else math.inf
    fit = [stage for stage in ladder if stage.load < limit and has_headroom(stage) and complies(stage, slo)]
    fit = [stage for stage in fit if math.isfinite(stage.output_throughput.value)]
    return max(fit, key=lambda stage: (stage.output_throughput.value, -stage.load), default=None)


def _within(value: float | None, limit: float | None) -> bool:
    """Whether a figure is known and inside a limit that was given."""
    return limit is None or (value is not None and value <= limit)


def _crossing(name: str, series: list[tuple[float, float | None]], limit: float) -> SloBoundary | None:
    known = [(load, value) for load, value in series if value is not None and math.isfinite(value) and value > 0]
    if known and known[0][1] > limit:
        return SloBoundary(limit=name, inside=None, outside=known[0][0], load=None)
    for (low, before), (high, after) in pairwise(known):
        if after > limit:
            # Differences of logarithms: a ratio of figures from elsewhere may overflow. They are equal where two p95s
            # differ by less than a logarithm shows; the boundary is then the stage inside.
            rise = math.log(after) - math.log(before)
            part = (math.log(limit) - math.log(before)) / rise if rise > 0 else 0.0
            load = low * (high / low) ** part
            return SloBoundary(limit=name, inside=low, outside=high, load=min(high, max(low, load)))
    return None


def _violation(measured: Estimate, limit: float) -> float:
    if not _known(measured):
        return UNKNOWN
    amount = math.log(measured.value / limit)
    return amount if measured.has_interval else max(amount, UNPROVEN)


def _known(estimate: Estimate) -> bool:
    return estimate.num_samples > 0 and math.isfinite(estimate.value) and estimate.value > 0
