"""`kneetune plan`: what a job would do; starts nothing."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tuner.commands.words import duration_text
from tuner.engines.adapter import check_job
from tuner.engines.device_holders import in_the_way
from tuner.engines.registry import adapter_of
from tuner.gpus import visible_gpus, why_unusable
from tuner.inputs import InputError
from tuner.job import TuningJob, load_job
from tuner.placement import Placement, needs_gpu_count, place
from tuner.planning import JobPlan, plan_of
from tuner.space import combinations
from tuner.wording import setting

SHOWN_IMPOSSIBLE = 5
"""Impossible combinations listed one by one; the rest is counted."""


def plan(
    job: Annotated[str, typer.Argument(help="A job file, or a preset's name.", metavar="JOB.yaml")],
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what a job would do: settings, what is impossible and why, launches, stages, expected time."""
    tuning_job = load_job(job)
    print_plan(tuning_job, place_here(tuning_job), as_json=json)


def place_here(job: TuningJob) -> Placement:
    """Where the trials of `job` run on this machine, by the most GPUs that one of its settings takes.

    Raises:
        InputError: where not even one launch fits, or the engine cannot be told what the job says, naming what.
    """
    check_job(adapter_of(job.engine), job)
    configs = (job.config(values) for values in combinations(job.search_space))
    largest = max(configs, key=lambda config: config.num_devices)
    if needs_gpu_count(job.engine):
        unusable = why_unusable(devices_per_trial=largest.num_devices)
        if unusable is not None:
            raise InputError(unusable)
    return place(
        job.engine,
        largest=largest,
        num_gpus=len(visible_gpus()) if needs_gpu_count(job.engine) else 0,
        num_cpus=len(os.sched_getaffinity(0)),
        asked=job.parallel_trials,
    )


def print_plan(job: TuningJob, placement: Placement, *, as_json: bool) -> None:
    """Write the plan of `job`, its trials placed so, to stdout."""
    planned = plan_of(job, placement)
    busy = in_the_way(job.engine)
    if busy is not None:
        planned = planned.model_copy(update={"warnings": (*planned.warnings, busy)})
    if as_json:
        typer.echo(planned.model_dump_json(indent=1))
        return
    for line in _lines(planned):
        typer.echo(line)


def _lines(planned: JobPlan) -> list[str]:
    lines = [
        f"{planned.name}: model {planned.model} on the engine {planned.engine}",
        f"  workload {planned.workload}, burst {planned.burst}, SLO {planned.slo}",
    ]
    for parameter in planned.parameters:
        values = ", ".join(setting(value) for value in parameter.choices)
        lines += [f"  {parameter.name}: {values} {parameter.unit}".rstrip(), f"      {parameter.why}"]
    lines += [f"  condition: {condition}" for condition in planned.conditions]
    lines.append(f"{planned.num_combinations} combinations, {len(planned.impossible)} of them impossible:")
    lines += [f"  {rule}" for rule in planned.impossible[:SHOWN_IMPOSSIBLE]]
    if len(planned.impossible) > SHOWN_IMPOSSIBLE:
        lines.append(f"  … and {len(planned.impossible) - SHOWN_IMPOSSIBLE} more")
    launches = f"{planned.num_study_launches} launches to search, up to {planned.num_confirmation_launches} to confirm"
    at_once = "one trial at a time"
    if planned.parallel_trials > 1:
        at_once = f"{planned.parallel_trials} trials at a time to search, one to confirm and for the first ladder"
    expected = f"about {duration_text(planned.expected_s)} if a start takes {planned.assumed_start_s:g} s (a guess)"
    return [
        *lines,
        f"{launches}, up to {planned.most_stages} stages",
        at_once,
        *(f"warning: {warning}" for warning in planned.warnings),
        f"{expected}; the budget is {duration_text(planned.budget_s)}",
    ]
