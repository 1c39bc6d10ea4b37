"""`kneetune clean`: end what earlier runs left alive, and only that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.engines.leftovers import end_leftovers
from tuner.inputs import InputError
from tuner.store import RunStore


def clean(
    runs: Annotated[Path, typer.Argument(help="A run directory, or the folder that holds some.")] = Path("runs"),
) -> None:
    """End engines that runs cut off have left alive, by what those runs recorded: pid, start time and mark.

    A run that is being written is left alone. Nothing is deleted.
    """
    if not runs.is_dir():
        raise InputError(f"{runs}: no such folder; name a run's directory, or the folder that holds some")
    stores = [RunStore.open(folder) for folder in [runs, *sorted(runs.iterdir())] if (folder / "job.yaml").is_file()]
    num_ended = sum(_clean(store) for store in stores)
    typer.echo(f"{len(stores)} runs looked through, {num_ended} engines ended")


def _clean(store: RunStore) -> int:
    """Clean up after one run; returns how many launches of it were still alive."""
    if store.is_locked():
        typer.echo(f"{store.path}: is being written, left alone")
        return 0
    with store.locked():
        ended = end_leftovers(store)
    for directory in ended:
        typer.echo(f"{directory}: its engine was alive and is ended")
    return len(ended)
