"""What the stages of a running server answer: fence, knee, operating point, and what could not be known. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tuner.analysis.combine import operating_point_of
from tuner.analysis.diagnosis import diagnose
from tuner.analysis.fence import fenced_beyond, is_held_back, ladder_knee, recognised_fence
from tuner.analysis.no_safe_rate import none_safe
from tuner.analysis.open_loop import find_open_loop_knee, open_loop_point
from tuner.analysis.outage import outage
from tuner.analysis.rates import safe_rate_found
from tuner.analysis.slo import derive_slo, may_keep_headroom, operating_point
from tuner.answer import KneeFinding, OperatingPoint, SafeRateFigure, Slo
from tuner.engine_config import EngineConfig
from tuner.records import StageKind, StageRecord

FenceSource = Literal["told", "given", "recognised"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is known beside the stages. None: not given, not told."""

    slo_ttft_p95_ms: float | None = None
    slo_itl_p95_ms: float | None = None
    fence: int | None = None
    fence_source: FenceSource | None = None
    config: EngineConfig | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Benched:
    """What was found."""

    stages: tuple[StageRecord, ...]
    finding: KneeFinding
    because: tuple[str, ...]
    """Why the ladder ended early, where the server went away; why what binds at the knee is known, or is not, where
    the engine config was told."""

    slo: Slo | None
    operating_point: OperatingPoint | None
    safe_rate_rps: SafeRateFigure | None
    """None where no rate was tried, or none was shown to be safe."""

    fence: int | None
    fence_source: FenceSource | None
    warnings: tuple[str, ...]


def conclude(stages: Sequence[StageRecord], asked: Asked) -> Benched:
    """Find the fence, the knee, the operating point and the safe rate, and say what was not known.

    The knee is one of users where any were measured, else one of rates.
    """
    fence, source = asked.fence, asked.fence_source
    closed = [stage for stage in stages if stage.loop == "closed"]
    rated = [stage for stage in stages if stage.loop == "open"]
    if fence is None:
        fence = recognised_fence(closed)
        source = None if fence is None else "recognised"
        closed = fenced_beyond(closed, fence)
    if rated and not closed:
        finding, _ = find_open_loop_knee([open_loop_point(s) for s in rated], fence=fence, seed=asked.seed)
    else:
        finding = ladder_knee(closed, fence=fence, seed=asked.seed)
    because: tuple[str, ...] = ()
    if asked.config is not None and closed:
        diagnosed = diagnose(closed, finding, asked.config)
        finding, because = finding.model_copy(update={"binding": diagnosed.binding}), diagnosed.evidence
    gone = outage(stages)
    because = because if gone is None else (gone.sentence, *because)
    slo = _slo(closed, asked)
    point = None if slo is None else operating_point(closed, finding, slo, has_headroom=may_keep_headroom)
    warnings = [*finding.warnings, *_fence_warnings(closed, fence, source), *_unknown(stages)]
    warnings += [] if rated and not closed else _slo_warnings(slo, point)
    warnings += _rate_warnings(rated, slo)
    return Benched(
        stages=tuple(sorted([*closed, *rated], key=lambda stage: stage.index)),
        finding=finding,
        because=because,
        slo=slo,
        operating_point=None if point is None else operating_point_of([point]),
        safe_rate_rps=None if slo is None else safe_rate_found(rated, slo),
        fence=fence,
        fence_source=source,
        warnings=tuple(warnings),
    )


def ceiling_rps(stages: Sequence[StageRecord]) -> float | None:
    """The most requests per second that users who wait got out of the server; None where no stage was valid."""
    rates = [stage.request_throughput_rps for stage in stages if stage.loop == "closed" and stage.valid]
    return max((rate for rate in rates if rate > 0), default=None)


def _slo(stages: Sequence[StageRecord], asked: Asked) -> Slo | None:
    """The limits as given; one that was not given is derived from the unloaded server."""
    derived = derive_slo(stages)
    ttft_ms = asked.slo_ttft_p95_ms or (None if derived is None else derived.ttft_p95_ms)
    itl_ms = asked.slo_itl_p95_ms or (None if derived is None else derived.itl_p95_ms)
    if ttft_ms is None or itl_ms is None:
        return None
    is_derived = asked.slo_ttft_p95_ms is None or asked.slo_itl_p95_ms is None
    return Slo(ttft_p95_ms=ttft_ms, itl_p95_ms=itl_ms, derived=is_derived)


def _fence_warnings(stages: Sequence[StageRecord], fence: int | None, source: FenceSource | None) -> Iterator[str]:
    if source == "recognised":
        yield (
            f"the server does not tell max_num_seqs; {fence} ran at once and the rest waited, at more than one load: "
            "that is taken for its fence"
        )
    asked_past = sorted({stage.load for stage in stages if stage.fenced and stage.kind is not StageKind.OVERLOAD})
    if fence is not None and source != "recognised" and asked_past:
        yield (
            f"load {asked_past[0]} is past the fence: max_num_seqs lets {fence} requests run at once, and from there "
            "on they queue; a bend there is that limit, and no knee"
        )
    held = [stage for stage in stages if is_held_back(stage)]
    if fence is None and held:
        yield (
            f"at load {held[0].load} never more than {held[0].peak_running} requests ran while others waited: if that "
            "is the server's max_num_seqs, give it with --fence, for the bend there is then no knee"
        )


def _slo_warnings(slo: Slo | None, point: StageRecord | None) -> Iterator[str]:
    if slo is None:
        yield "no SLO: none was given, and there is no valid stage at load 1 to derive one from"
    elif point is None:
        yield "no stage left of the knee is inside the SLO with samples enough to prove it"
    elif point.num_preemptions is None or point.kv_cache_usage_peak is None:
        yield f"the headroom of load {point.load} is not proven: preemptions or KV use are not known"


def _rate_warnings(rated: Sequence[StageRecord], slo: Slo | None) -> Iterator[str]:
    if rated and slo is None:
        yield "no rate can be called safe without an SLO: give --slo-ttft-p95 and --slo-itl-p95"
    elif slo is not None and (why := none_safe(rated, slo)) is not None:
        yield why


def _unknown(stages: Sequence[StageRecord]) -> Iterator[str]:
    """What a tuning job would not accept to be without."""
    if stages and all(stage.mean_running is None for stage in stages):
        yield (
            "running and waiting requests are not known, so a fence cannot be told from saturation: the bend may be "
            "a limit of the server's (max_num_seqs); give it with --fence"
        )
    if stages and all(stage.num_preemptions is None for stage in stages):
        yield "preemptions are not known: the knee may lie beyond loads that preempt"
