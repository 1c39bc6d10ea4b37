"""What a job would do, before it does anything: settings, launches, stages, expected time."""

from __future__ import annotations

import math

from tuner.climb import rate_stage_s
from tuner.engines.registry import adapter_of
from tuner.frozen import Record
from tuner.job import TuningJob
from tuner.ladder import Ladder, most_stages
from tuner.parameters import Choice, SearchedValues
from tuner.placement import Placement
from tuner.space import combinations
from tuner.wording import total_concurrency

CONFIRMATION_LAUNCHES = 6
"""Production, a rival where it was a close call, and the defaults, twice each."""

CONFIRMATION_STAGES = 2
"""The operating point and twice its load."""

PROTECTIVE_CHOICE = 2
"""Candidates for the protective profile that are hit with the burst, one launch each, so that there is a choice."""

MAX_PROTECTIVE_LAUNCHES = 3
"""So many where none held."""

PROTECTIVE_STAGES = 2
"""The operating point and the burst."""

SAFE_RATE_STAGES = 3
"""Rates of arrivals that production is tried with, on one launch."""

SAFE_RATE_STEP = 0.1
"""A safe and an unsafe rate closer than this are close enough in a tuning job."""


class ParameterPlan(Record):
    """One searched parameter, its values and why these."""

    name: str
    choices: tuple[Choice, ...]
    unit: str
    why: str


class JobPlan(Record):
    """The size of a job, known before it starts."""

    name: str
    model: str
    engine: str
    """Its name, and `simulated` with the law where nothing real would be measured."""

    workload: str
    burst: str
    slo: str
    parameters: tuple[ParameterPlan, ...]
    conditions: tuple[str, ...]
    num_combinations: int
    impossible: tuple[str, ...]
    """Combinations no launch will be spent on, each with the rule or the condition it breaks."""

    parallel_trials: int
    """Launches of the search that run at once; those that confirm go one by one."""

    warnings: tuple[str, ...]
    """What about the place where the trials run is not as it was asked for, or as it should be."""

    num_study_launches: int
    num_confirmation_launches: int
    most_stages: int
    expected_s: float
    """If every launch takes the assumed start, every stage half its longest time and those of the safe rate all of it,
    cut at the budget."""

    assumed_start_s: float
    """A guess at one engine start; a plan says that it is one."""

    budget_s: float


def plan_of(job: TuningJob, placement: Placement) -> JobPlan:
    """The plan of `job`, its trials placed so."""
    reasons = [job.impossible(values) for values in combinations(job.search_space)]
    impossible = tuple(reason for reason in reasons if reason is not None)
    num_possible = len(reasons) - len(impossible)
    study = min(job.budget.trials, num_possible)
    confirmations = CONFIRMATION_LAUNCHES + MAX_PROTECTIVE_LAUNCHES + 1
    fence = max(job.config(values).fence for values in combinations(job.search_space))
    ladder_stages = most_stages(Ladder(max_num_seqs=fence, max_load=job.max_load, thinks=job.workload.thinks))
    confirming_stages = CONFIRMATION_LAUNCHES * CONFIRMATION_STAGES + MAX_PROTECTIVE_LAUNCHES * PROTECTIVE_STAGES
    # The first ladder is climbed alone: the others need what it tells.
    turns = min(study, 1 + math.ceil((study - 1) / placement.parallel_trials))
    start_s = (turns + confirmations) * adapter_of(job.engine).assumed_start_s
    stage_s = (turns * ladder_stages + confirming_stages) * longest_stage_s(job) / 2 + safe_rate_s(job, start_s=0.0)
    return JobPlan(
        name=job.name,
        model=job.model,
        engine=job.engine.described,
        workload=job.workload.name,
        burst=job.burst.name,
        slo=_slo_text(job),
        parameters=tuple(_parameter(job, name) for name in job.search_space.searched),
        conditions=tuple(condition.text for condition in job.search_space.conditions),
        num_combinations=len(reasons),
        impossible=impossible,
        parallel_trials=placement.parallel_trials,
        warnings=(*placement.warnings, *_queueing(job)),
        num_study_launches=study,
        num_confirmation_launches=confirmations,
        most_stages=study * ladder_stages + confirming_stages + SAFE_RATE_STAGES,
        expected_s=min(job.budget.time, start_s + stage_s),
        assumed_start_s=adapter_of(job.engine).assumed_start_s,
        budget_s=job.budget.time,
    )


def _queueing(job: TuningJob) -> tuple[str, ...]:
    """Where an expected load is above what one deployment runs at once, several cores' limits taken together."""
    configs = (job.config(values) for values in combinations(job.search_space))
    widest = max(configs, key=lambda config: config.fence)
    users = None if job.expected is None else job.expected.users
    if users is None or users <= widest.fence:
        return ()
    told = f"{users} users are expected, and the widest setting runs {total_concurrency(widest)} at once"
    return (f"{told}: from there on requests wait, or take another replica",)


def longest_stage_s(job: TuningJob) -> float:
    """Warm-up and measurement of one stage at their limits. Unit: seconds."""
    return job.measure.max_warm_up + job.measure.max_time


def safe_rate_s(job: TuningJob, *, start_s: float, rate_rps: float = math.inf) -> float:
    """What the safe rate's launch usually takes: stages under a rate rarely use half of their longest warm-up.

    Args:
        job: with how long its stages may take.
        start_s: of one engine.
        rate_rps: what the closed loop brings; inf where it is not known yet.
    """
    stage_s = job.measure.max_warm_up / 2 + rate_stage_s(job.measure, rate_rps=rate_rps)
    return start_s + SAFE_RATE_STAGES * stage_s


def default_values(job: TuningJob) -> SearchedValues:
    """The engine's own defaults: trial 0. Of what else is searched none is set. The installed engine is asked."""
    return adapter_of(job.engine).installed(job).defaults


def cautious_values(job: TuningJob) -> SearchedValues:
    """The cautious start, its budget cut to what one request can use: trial 1.

    A searched parameter it does not name starts at its first choice.
    """
    space = job.search_space
    first = {name: space.choices(name)[0] for name in space.searched if getattr(space.cautious_start, name) is None}
    start = space.cautious_start.model_copy(update=first)
    length = start.max_model_len or job.engine.fixed.max_model_len
    if length is None:
        return start
    budget = max(start.max_num_seqs, min(start.max_num_batched_tokens, start.max_num_seqs * length))
    return start.model_copy(update={"max_num_batched_tokens": budget})


def _slo_text(job: TuningJob) -> str:
    limits = job.limits()
    if limits is None:
        return "derived from the unloaded engine"
    return f"p95 TTFT {limits.ttft_p95_ms:g} ms, p95 ITL {limits.itl_p95_ms:g} ms"


def _parameter(job: TuningJob, name: str) -> ParameterPlan:
    parameter = job.search_space.parameter(name)
    return ParameterPlan(name=name, choices=parameter.choices, unit=parameter.unit, why=" ".join(parameter.why.split()))
