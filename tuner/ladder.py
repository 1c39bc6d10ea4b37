"""Which load comes next: double past the knee, bisect around it, stand left of it, close with an overload."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.analysis.fence import fenced_beyond, is_held_back, recognised_fence
from tuner.analysis.graph_grid import grid_floor
from tuner.analysis.knee import find_knee, past_the_knee, points_of, suggest_bisection
from tuner.analysis.rates import RateSearch
from tuner.analysis.slo import derive_slo, load_left_of, slo_boundary
from tuner.answer import Slo
from tuner.frozen import Record
from tuner.records import StageKind, StageRecord

MOST_BETWEEN_RUNGS = 2
"""Stages added once the knee is bracketed: one to pin it, one to stand left of it."""

OPERATING_BAND = (0.75, 0.95)
"""Where an operating point should stand, as a share of the knee."""

OVERLOAD_FACTOR = 2
"""The closing stage's load, in fences."""


class LadderStep(Record):
    """One stage to measure."""

    kind: StageKind
    load: int | float
    """As `StageRecord.load`: users, or requests per second."""


class Ladder(Record):
    """Climb until the knee is behind: what a study trial does."""

    max_num_seqs: int | None
    """The fence; None: the engine does not tell, and it is recognised from what runs and waits."""

    max_load: int
    thinks: bool = False
    """Whether users pause between requests: more of them than the fence may then be needed to meet it."""

    slo: Slo | None = None
    """Limits in force, for the stage where an operating point should stand; None: those its own load 1 gives."""

    on_graph_grid: bool = False
    """Whether stages between rungs are measured where a fence may stand on an engine that captures graphs; whether it
    does shows only once it runs."""

    start: int = 2
    """The first rung after load 1. Those below it are climbed only where the knee turns out to be down there."""

    def fence(self, stages: Sequence[StageRecord]) -> int | None:
        """The fence as told, or as these stages show it; None while neither does."""
        return recognised_fence(stages) if self.max_num_seqs is None else self.max_num_seqs

    def rungs(self, fence: int | None) -> list[int]:
        """The loads to double through; where users think, whether the fence is met shows only as they are measured."""
        return rungs(None if self.thinks else fence, self.max_load)


class FixedSteps(Record):
    """Measure just these: what a confirmation does."""

    steps: tuple[LadderStep, ...]
    request_rate_rps: float | None = None
    """What the first step's load was seen to bring before: how long enough requests take is reckoned from it."""

    slo: Slo | None = None
    """Limits in force: a stage goes on while it is open whether it meets them."""


Plan = Ladder | FixedSteps | RateSearch


def next_step(plan: Plan, stages: Sequence[StageRecord]) -> LadderStep | None:
    """The stage to measure next, given those measured so far on this engine; None when the trial is done.

    An invalid stage is repeated once, then left out; an overload is not repeated: that an engine cannot settle past its
    fence is the finding.
    """
    if isinstance(plan, RateSearch):
        rate_rps = plan.so_far(stages).next_rps
        return None if rate_rps is None else LadderStep(kind=StageKind.RATE, load=rate_rps)
    repeat = _repeat_of_invalid(stages)
    if repeat is not None:
        return repeat
    match plan:
        case FixedSteps():
            measured = {(stage.kind, stage.load) for stage in stages}
            return next((step for step in plan.steps if (step.kind, step.load) not in measured), None)
        case Ladder():
            fence, stages = plan.fence(stages), _marked(plan, stages)
            return (
                _next_rung(plan, fence, stages)
                or _between_rungs(plan, stages)
                or _closing_overload(plan, fence, stages)
            )


def most_stages(plan: Plan) -> int:
    """How many stages `plan` takes at the most, repeats aside."""
    match plan:
        case FixedSteps():
            return len(plan.steps)
        case RateSearch():
            return plan.most_stages
        case Ladder():
            return len(plan.rungs(plan.max_num_seqs)) + MOST_BETWEEN_RUNGS + 1


def rungs(fence: int | None, max_load: int) -> list[int]:
    """The loads of the doubling ladder: 1, 2, 4, … and the fence (or the largest load allowed) as the last."""
    top = max_load if fence is None else min(fence, max_load)
    loads = [1]
    while loads[-1] * 2 < top:
        loads.append(loads[-1] * 2)
    return loads if loads[-1] == top else [*loads, top]


def _repeat_of_invalid(stages: Sequence[StageRecord]) -> LadderStep | None:
    if not stages or stages[-1].valid or stages[-1].kind is StageKind.OVERLOAD:
        return None
    last = stages[-1]
    tries = sum(stage.kind == last.kind and stage.load == last.load for stage in stages)
    return LadderStep(kind=last.kind, load=last.load) if tries == 1 else None


def _marked(plan: Ladder, stages: Sequence[StageRecord]) -> Sequence[StageRecord]:
    """The stages with those past a recognised fence marked; where the fence was told they are already."""
    return stages if plan.max_num_seqs is not None else fenced_beyond(stages, plan.fence(stages))


def _next_rung(plan: Ladder, fence: int | None, stages: Sequence[StageRecord]) -> LadderStep | None:
    if any(stage.kind is not StageKind.LADDER for stage in stages):
        return None
    climbed = {stage.load for stage in stages}
    left = [load for load in plan.rungs(fence) if load not in climbed]
    above = [load for load in left if load == 1 or load >= plan.start]
    # What looks like a knee may be a fence that nobody told of: one rung more shows which.
    unclear = fence is None and any(is_held_back(stage) for stage in stages)
    if plan.thinks and any(stage.fenced for stage in stages):
        above = []
    if above and (unclear or not past_the_knee(points_of(stages))):
        return LadderStep(kind=StageKind.LADDER, load=above[0])
    skipped = [load for load in left if load < plan.start]
    if skipped and _knee_is_lower(stages):
        return LadderStep(kind=StageKind.LADDER, load=skipped[-1])
    return None


def _knee_is_lower(stages: Sequence[StageRecord]) -> bool:
    """Whether the knee is not above the lowest rung that was climbed after load 1, or there are too few to say."""
    knee = find_knee(points_of(stages), num_bootstrap=0).load
    return knee is None or knee <= min((stage.load for stage in stages if stage.load > 1), default=1)


def _between_rungs(plan: Ladder, stages: Sequence[StageRecord]) -> LadderStep | None:
    """First the bisection that pins the knee, then a stage where an operating point should stand, if there is none."""
    between = {stage.load for stage in stages if stage.kind is StageKind.BISECT}
    closed = any(stage.kind is StageKind.OVERLOAD for stage in stages)
    if closed or len(between) >= MOST_BETWEEN_RUNGS:
        return None
    pinned = None if between else suggest_bisection(points_of(stages), on_graph_grid=plan.on_graph_grid)
    load = _where_to_stand(plan, stages) if pinned is None else pinned
    return None if load is None else LadderStep(kind=StageKind.BISECT, load=load)


def _where_to_stand(plan: Ladder, stages: Sequence[StageRecord]) -> int | None:
    """Just left of where the limits are left, if they are left before the knee; otherwise just left of the knee."""
    points, slo = points_of(stages), plan.slo or derive_slo(stages)
    knee = find_knee(points, num_bootstrap=0).load
    limit = None if slo is None else slo_boundary(points, ttft_p95_ms=slo.ttft_p95_ms, itl_p95_ms=slo.itl_p95_ms)
    if limit is None or limit.load is None or (knee is not None and limit.load >= OPERATING_BAND[1] * knee):
        if plan.on_graph_grid:
            return _on_the_grid(math.inf if knee is None else OPERATING_BAND[1] * knee, stages)
        return None if knee is None else _left_of_the_knee(knee, stages)
    load = load_left_of(limit)
    if plan.on_graph_grid:
        return None if load is None else _on_the_grid(load, stages)
    near = limit.inside is not None and limit.inside >= OPERATING_BAND[0] * limit.load
    return None if near or load in {stage.load for stage in stages} else load


def _on_the_grid(most: float, stages: Sequence[StageRecord]) -> int | None:
    """The largest fence up to `most`, and within the ladder, that has a captured graph; None where it was measured."""
    measured = {stage.load for stage in stages}
    load = grid_floor(max(1.0, min(most, max(stage.load for stage in stages if not stage.fenced))))
    return None if load in measured else load


def _left_of_the_knee(knee: float, stages: Sequence[StageRecord]) -> int | None:
    low, high = (share * knee for share in OPERATING_BAND)
    load = round(math.sqrt(low * high))
    measured = {stage.load for stage in stages}
    if load in measured or not low <= load <= high or any(low <= other <= high for other in measured):
        return None
    return load


def _closing_overload(plan: Ladder, fence: int | None, stages: Sequence[StageRecord]) -> LadderStep | None:
    """One stage past the fence, unless a ladder that did not know of it has been there already."""
    if fence is None or any(stage.kind is StageKind.OVERLOAD for stage in stages):
        return None
    top = max(stages, key=lambda stage: stage.load)
    pausing = math.ceil(top.load - top.mean_in_flight) if plan.thinks else 0
    load = min(OVERLOAD_FACTOR * fence + pausing, plan.max_load)
    if load <= fence or any(stage.load >= load for stage in stages):
        return None
    return LadderStep(kind=StageKind.OVERLOAD, load=load)
