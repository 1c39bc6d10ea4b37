"""Climbs on a running engine: measures what a plan asks for, stage by stage, however the engine came to run."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.analysis.no_safe_rate import OPEN_STRETCH
from tuner.analysis.rates import RateSearch
from tuner.analysis.slo import derive_slo
from tuner.engines.running import reset_prefix_cache
from tuner.job import MeasureSpec
from tuner.ladder import FixedSteps, LadderStep, Plan, next_step
from tuner.load.arrivals import OpenArrivals, Poisson, Replayed
from tuner.load.workload import Workload
from tuner.measure import saturation
from tuner.measure.stage import StageSpec, Target, measure_stage
from tuner.records import PrefixCacheReset, StageKind, StageRecord
from tuner.stopping import run_until_told
from tuner.store import keep_stage

FEWEST_REQUESTS = 20
REQUESTS_PER_USER = 8
"""At low load a rung ends with fewer requests than a p95 needs: it serves the curve, no answer stands there."""

WARM_UP_TURNS = 2.5
"""A crowd needs longer to settle than the job's limit may allow: so many times what serving each of it once takes."""

MAX_STRETCH = 3.0
"""A slow engine gets so many times the job's time to complete the requests a p95 needs."""

MAX_TURN_S = 20.0
"""But no crowd is waited for longer. Unit: seconds."""


POISSON = Poisson(kind="poisson")
RATE_REQUESTS = 2
"""A stage under a rate is judged by its p95s alone: it has so many times the requests that they need."""

RATE_MARGIN = 1.5
"""Arrivals come as they please, and a start-up transient is cut off: time for so many times the requests."""

MOST_RATE_STAGE_S = 600.0
"""But no rate is waited for longer. Unit: seconds."""

RATE_STAGE_S = 20.0
"""Shortest time that is allowed to it then: dependent latencies are worth few independent ones. Unit: seconds."""

FORGET_S = 10.0
"""The last stage's requests, which were hung up on, are gone sooner than that; while there are any, nothing is
forgotten. Unit: seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """What is measured on one running engine, and how."""

    plan: Plan
    workload: Workload
    burst: Workload
    """What a stage of kind `burst` sends instead."""

    arrivals: OpenArrivals = POISSON
    """How requests come in a stage under a rate, unless the workload says itself."""

    measure: MeasureSpec
    entropy: tuple[int, int]
    """(study seed, trial): no two climbs send one prompt twice."""

    fence: int | None
    """Most requests that run at once; None: not known, and no stage is taken to be past it."""

    max_model_len: int
    """Longest context of the engine: requests of a trace that are longer are not sent."""

    caches_prefixes: bool
    """Whether the engine may keep prefixes; before a stage whose requests share some it is asked to forget them."""

    rate_rps: float = math.inf
    """Requests per second of one user, to reckon with until a stage has shown some; inf where nothing is known."""


def climb(
    task: Climb,
    target: Target,
    *,
    kept: Sequence[StageRecord],
    directory: Path,
    goes_on: Callable[[Sequence[StageRecord]], bool],
) -> Iterator[StageRecord]:
    """Measure stage after stage until the plan has no next one, the engine stalls or `goes_on` says no.

    Args:
        kept: stages measured earlier; they are not repeated.
        directory: each stage is kept here the moment it has ended.
        goes_on: asked before each stage, with all there are.

    Raises:
        WorkloadError: where the workload does not fit the engine.
    """
    import uvloop  # what only plans or judges stages needs none

    stages = list(kept)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while not stalled(stages) and goes_on(stages) and (step := next_step(task.plan, stages)) is not None:
            spec = stage_spec(task, step, stages)
            reset = run_until_told(runner, _forget_prefixes(task, spec.workload, target))
            measured = run_until_told(runner, measure_stage(spec, target))
            measured = replace(measured, record=measured.record.model_copy(update={"prefix_cache_reset": reset}))
            stages.append(measured.record)
            keep_stage(directory, measured)
            yield measured.record


async def _forget_prefixes(task: Climb, workload: Workload, target: Target) -> PrefixCacheReset | None:
    """Have what earlier stages left in the prefix cache forgotten; None where that cannot matter."""
    if not (task.caches_prefixes and workload.shares_prefixes):
        return None
    why_not = await reset_prefix_cache(target.endpoint, patience_s=FORGET_S)
    return "done" if why_not is None else "not reset"


def stalled(stages: Sequence[StageRecord]) -> bool:
    """Whether the engine had work in the last stage and did none of it."""
    return bool(stages) and stages[-1].ended_by == "stalled"


def stage_spec(task: Climb, step: LadderStep, stages: Sequence[StageRecord]) -> StageSpec:
    """How long a stage may take and how much it must see, by what the stages before it have shown."""
    if step.kind is StageKind.RATE:
        return _rate_spec(task, step, stages)
    measure, index = task.measure, len(stages)
    workload = task.burst if step.kind is StageKind.BURST else task.workload
    longer = workload.mean_request_tokens(task.max_model_len) / task.workload.mean_request_tokens(task.max_model_len)
    rate_rps = _request_rate_rps(task, stages)
    users = int(step.load)
    turn_s = min(longer * users / rate_rps, MAX_TURN_S)
    min_requests = measure.min_requests
    if step.kind is StageKind.LADDER:
        min_requests = min(min_requests, max(FEWEST_REQUESTS, REQUESTS_PER_USER * users))
    enough_s = min(longer * min_requests / rate_rps, MAX_STRETCH * measure.max_time)
    return StageSpec(
        index=index,
        kind=step.kind,
        load=users,
        # Nothing is above a fence that is not known.
        max_num_seqs=sys.maxsize if task.fence is None else task.fence,
        workload=workload,
        entropy=(*task.entropy, index),
        min_requests=min_requests,
        min_s=measure.min_time,
        max_s=max(measure.max_time, turn_s, enough_s),
        max_warm_up_s=max(measure.max_warm_up, WARM_UP_TURNS * turn_s),
        target_relative_half_width=measure.precision,
        limits=task.plan.slo or derive_slo(stages),
    )


def _rate_spec(task: Climb, step: LadderStep, stages: Sequence[StageRecord]) -> StageSpec:
    """A stage under a rate lasts long enough to tell a queue that grows without end; a trace lasts as long as it is."""
    workload, measure, index = task.workload, task.measure, len(stages)
    if workload.loop != "open":
        workload = workload.model_copy(update={"arrivals": task.arrivals})
    max_s = rate_stage_s(measure, rate_rps=step.load)
    trace = workload.fitting_trace(task.max_model_len)
    if isinstance(workload.arrivals, Replayed) and trace is not None:
        max_s += len(trace.rows) / step.load
    return StageSpec(
        index=index,
        kind=step.kind,
        load=step.load,
        max_num_seqs=sys.maxsize if task.fence is None else task.fence,
        workload=workload,
        entropy=(*task.entropy, index),
        min_requests=RATE_REQUESTS * measure.min_requests,
        min_s=max(measure.min_time, saturation.FEWEST_S),
        max_s=max_s,
        max_warm_up_s=max(measure.max_warm_up, WARM_UP_TURNS * _request_s(task, stages)),
        # Its throughput is the rate it was given; how random arrivals scatter around it is no reason to go on.
        target_relative_half_width=math.inf,
        limits=task.plan.slo,
    )


def _request_s(task: Climb, stages: Sequence[StageRecord]) -> float:
    """How long a request takes, by what was known before and by the stages so far; 0 where nothing is."""
    seen = [1e-3 * stage.e2e_p50_ms.value for stage in stages if stage.e2e_p50_ms.num_samples]
    before = task.plan.request_s if isinstance(task.plan, RateSearch) else 0.0
    return min(max(before, 1 / task.rate_rps, *seen), MAX_TURN_S)


def rate_stage_s(measure: MeasureSpec, *, rate_rps: float) -> float:
    """Longest time of a stage under this rate, in seconds; used up only while its verdict is open."""
    enough_s = RATE_MARGIN * RATE_REQUESTS * measure.min_requests / rate_rps
    return max(OPEN_STRETCH * measure.max_time, RATE_STAGE_S, min(enough_s, MOST_RATE_STAGE_S))


def _request_rate_rps(task: Climb, stages: Sequence[StageRecord]) -> float:
    """The best request rate seen on this engine so far, or what was known before."""
    seen = [stage.request_throughput_rps for stage in stages if stage.valid and stage.request_throughput_rps > 0]
    before = task.plan.request_rate_rps if isinstance(task.plan, FixedSteps) else None
    return max(seen, default=task.rate_rps if before is None else before)
