"""`kneetune doctor`: is this machine fit to measure."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from tuner.doctor import Fitness, examine


def doctor(
    runs: Annotated[Path, typer.Option(help="Where run directories are made.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at cores, neighbours, clock, memory, limits, disk and device; exit 1 if nothing can be measured here."""
    findings = examine(runs)
    if json:
        typer.echo(jsonlib.dumps([finding.model_dump(mode="json") for finding in findings], indent=1))
    else:
        for finding in findings:
            typer.echo(f"{finding.fitness.value:<9} {finding.subject:<11} {finding.found}")
            if finding.advice is not None:
                typer.echo(f"{'':21} {finding.advice}")
    raise typer.Exit(1 if any(finding.fitness is Fitness.BAD for finding in findings) else 0)
