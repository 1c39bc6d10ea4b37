"""What a job would do, before it does anything: settings, launches, stages, expected time. Pure."""

from __future__ import annotations

from tuner.engines import builtin
from tuner.job import TuningJob
from tuner.ladder import Ladder, most_stages
from tuner.records import Record
from tuner.space import SEARCHED, SearchedName, SearchedValues, broken_rule, combinations

ASSUMED_START_S = 8.0
"""A guess at one engine start, used until a launch has been seen; a plan says that it is one. Unit: seconds."""

CONFIRMATION_LAUNCHES = 4
"""Production and the defaults, twice each."""

CONFIRMATION_STAGES = 2
"""The operating point and twice its load."""

MAX_PROTECTIVE_LAUNCHES = 2
"""Candidates for the protective profile that are tried with the burst, one launch each."""

PROTECTIVE_STAGES = 2
"""The operating point and the burst."""


class ParameterPlan(Record):
    """One searched parameter, its values and why these."""

    name: SearchedName
    choices: tuple[float, ...]
    unit: str
    why: str


class JobPlan(Record):
    """The size of a job, known before it starts."""

    name: str
    model: str
    engine: str
    workload: str
    burst: str
    slo: str
    parameters: tuple[ParameterPlan, ...]
    num_combinations: int
    impossible: tuple[str, ...]
    """Combinations no launch will be spent on, each with its rule."""

    num_study_launches: int
    num_confirmation_launches: int
    most_stages: int
    expected_s: float
    """If every launch takes the assumed start and every stage half its longest time, cut at the budget."""

    assumed_start_s: float
    budget_s: float


def plan_of(job: TuningJob) -> JobPlan:
    """The plan of `job`."""
    settings = [job.config(values) for values in combinations(job.search_space)]
    rules = [broken_rule(config, max_model_len=job.engine.fixed.max_model_len) for config in settings]
    impossible = tuple(rule for rule in rules if rule is not None)
    num_possible = len(settings) - len(impossible)
    study = min(job.budget.trials, num_possible)
    confirmations = CONFIRMATION_LAUNCHES + MAX_PROTECTIVE_LAUNCHES
    fence = int(max(job.search_space.choices("max_num_seqs")))
    study_stages = study * most_stages(Ladder(max_num_seqs=fence, max_load=job.max_load))
    stages = study_stages + CONFIRMATION_LAUNCHES * CONFIRMATION_STAGES + MAX_PROTECTIVE_LAUNCHES * PROTECTIVE_STAGES
    return JobPlan(
        name=job.name,
        model=job.model,
        engine=job.engine.name,
        workload=job.workload.name,
        burst=job.burst.name,
        slo=_slo_text(job),
        parameters=tuple(_parameter(job, name) for name in SEARCHED),
        num_combinations=len(settings),
        impossible=impossible,
        num_study_launches=study,
        num_confirmation_launches=confirmations,
        most_stages=stages,
        expected_s=min(job.budget.time, (study + confirmations) * ASSUMED_START_S + stages * longest_stage_s(job) / 2),
        assumed_start_s=ASSUMED_START_S,
        budget_s=job.budget.time,
    )


def longest_stage_s(job: TuningJob) -> float:
    """Warm-up and measurement of one stage at their limits. Unit: seconds."""
    return job.measure.max_warm_up + job.measure.max_time


def default_values(job: TuningJob) -> SearchedValues:
    """The engine's own defaults: trial 0."""
    del job  # one engine so far
    return builtin.DEFAULTS


def cautious_values(job: TuningJob) -> SearchedValues:
    """The cautious start, its budget cut to what one request can use: trial 1."""
    start = job.search_space.cautious_start
    length = job.engine.fixed.max_model_len
    if length is None:
        return start
    budget = max(start.max_num_seqs, min(start.max_num_batched_tokens, start.max_num_seqs * length))
    return start.model_copy(update={"max_num_batched_tokens": budget})


def _slo_text(job: TuningJob) -> str:
    limits = job.limits()
    if limits is None:
        return "derived from the unloaded engine"
    return f"p95 TTFT {limits.ttft_p95_ms:g} ms, p95 ITL {limits.itl_p95_ms:g} ms"


def _parameter(job: TuningJob, name: SearchedName) -> ParameterPlan:
    parameter = getattr(job.search_space.parameters, name)
    return ParameterPlan(name=name, choices=parameter.choices, unit=parameter.unit, why=" ".join(parameter.why.split()))
