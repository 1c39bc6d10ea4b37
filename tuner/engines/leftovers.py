"""What earlier runs left alive: a worker killed at the wrong moment, a machine that came back from sleep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tuner.engines.family import Launch, end, living, read_launch
from tuner.store import RunStore


def leftovers(store: RunStore) -> Iterator[tuple[Path, Launch]]:
    """The trials of a run that nobody writes, and their launches, of which a process lives."""
    for directory in sorted((store.path / "trials").glob("*")):
        launch = read_launch(directory)
        if launch is not None and living(launch):
            yield directory, launch


def end_leftovers(store: RunStore) -> list[Path]:
    """End what a run left alive; returns the trials it was of. The caller holds the run's lock."""
    ended = []
    for directory, launch in leftovers(store):
        end(launch)
        ended.append(directory)
    return ended
