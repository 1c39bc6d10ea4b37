"""Who holds a CPU's device before anything is launched: an engine outside every job is in the way of all its launches.

The engines know it of each other, and are asked by a command of theirs. Of a GPU its driver tells, at each launch
(`device_memory`).
"""

from __future__ import annotations

import subprocess
import sys

import psutil
from pydantic import TypeAdapter, ValidationError

from tuner.engines.family import MARK
from tuner.frozen import Record
from tuner.gpus import visible_gpus
from tuner.job import EngineSpec
from tuner.placement import needs_gpu_count

CPU_DEVICE = "cpu:0"
_MOST_S = 60.0


class Holder(Record):
    """A process and what it has claimed of a device."""

    device: str
    pid: int
    num_bytes: int


def in_the_way(engine: EngineSpec) -> str | None:
    """Who would keep the launches of a job on `engine` from their memory, in a sentence; None where nobody would."""
    on_gpu = needs_gpu_count(engine) and bool(visible_gpus())
    # Another engine than ours knows nothing of such claims.
    if engine.name != "builtin" or engine.law is not None or on_gpu:
        return None
    return sentence(cpu_holders())


def sentence(holders: tuple[Holder, ...]) -> str | None:
    """Who holds what, and what to do; None where nobody does."""
    if not holders:
        return None
    held = ", ".join(f"pid {each.pid} holds {each.num_bytes / 2**20:.0f} MiB" for each in holders)
    pids = " ".join(str(each.pid) for each in holders)
    return f"an engine that belongs to no job is on {holders[0].device}: {held}; stop it first: kill {pids}"


def cpu_holders() -> tuple[Holder, ...]:
    """Engines on the CPU that no job has launched: those of jobs take turns. None where that cannot be known."""
    command = [sys.executable, "-m", "engine", "holders", "--device", CPU_DEVICE, "--json"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_S, check=True).stdout
        found = TypeAdapter(tuple[Holder, ...]).validate_json(said)
    except (OSError, subprocess.SubprocessError, ValidationError):
        # The launch asks again, and says itself what is wrong.
        return ()
    return tuple(each for each in found if not _is_of_a_job(each.pid))


def _is_of_a_job(pid: int) -> bool:
    try:
        return MARK in psutil.Process(pid).environ()
    except psutil.Error:
        return False
