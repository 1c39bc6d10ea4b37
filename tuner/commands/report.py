"""`kneetune report`: write a run's report.html again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.store import RunStore


def report(run: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Write report.html of a finished run again, from its records."""
    typer.echo(str(write_run_report(RunStore.open(run))))


def write_run_report(store: RunStore) -> Path:
    """Write `report.html` into the run's directory; returns its path."""
    from reports.report import write_report

    path = store.path / "report.html"
    write_report(path, store.recommendation(), store.trials(), title=store.path.name)
    return path
