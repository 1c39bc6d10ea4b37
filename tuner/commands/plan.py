"""`kneetune plan`: what a job would do; starts nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.commands.words import duration_text
from tuner.job import TuningJob, load_job
from tuner.planning import JobPlan, plan_of
from tuner.wording import setting

SHOWN_IMPOSSIBLE = 5
"""Impossible combinations listed one by one; the rest is counted."""


def plan(
    job: Annotated[str, typer.Argument(help="A job file, or a preset's name.", metavar="JOB.yaml")],
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what a job would do: settings, what is impossible and why, launches, stages, expected time."""
    print_plan(load_job(job), as_json=json)


def print_plan(job: TuningJob, *, as_json: bool) -> None:
    """Write the plan of `job` to stdout."""
    planned = plan_of(job)
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
    expected = f"about {duration_text(planned.expected_s)} if a start takes {planned.assumed_start_s:g} s (a guess)"
    return [
        *lines,
        f"{launches}, up to {planned.most_stages} stages",
        f"{expected}; the budget is {duration_text(planned.budget_s)}",
    ]
