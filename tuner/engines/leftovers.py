"""What earlier runs left alive: a worker killed at the wrong moment, a machine that came back from sleep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tuner.engines.device_memory import ReadMemory, memory_reader
from tuner.engines.device_return import DeviceFull, device_after, read_reading
from tuner.engines.family import Launch, end, living, read_launch
from tuner.gpus import VARIABLE
from tuner.job import EngineSpec
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


@contextlib.contextmanager
def nothing_left_alive(store: RunStore) -> Iterator[None]:
    """See to it that a run that breaks off in here leaves no process of an engine.

    An engine's first process ends with its worker, but what that has started may live on, as vLLM's core does where its
    server is ended before it is up. The caller holds the run's lock.
    """
    try:
        yield
    except BaseException:
        end_leftovers(store)
        raise


def end_lost_launch(directory: Path, engine: EngineSpec, read: ReadMemory | None = None) -> DeviceFull | None:
    """End what a trial left whose worker died, and wait for its device's memory; what is wrong with it, if anything is.

    Args:
        directory: the trial's.
        engine: what it launched.
        read: looks at the device's memory; None asks the driver of the GPUs that the trial was on.
    """
    launch, before = read_launch(directory), read_reading(directory)
    if launch is not None:
        end(launch)
    shown = {VARIABLE: ",".join(use.device for use in before)}
    return device_after(directory, before, read or memory_reader(engine, shown, num_gpus=len(before)))[1]
