"""A device given back: its memory is where it was before the launch, or nobody launches there again.

The decisions are pure, on two readings; the waits are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from tuner.engines.device_memory import ReadMemory
from tuner.engines.device_use import DeviceUse, Reading
from tuner.engines.family import living, read_launch
from tuner.frozen import Record
from tuner.records import Failed, FailureKind

TOLERANCE_BYTES = 300 * 2**20
"""A device is as it was before when no more than this is in use beyond it: drivers keep some context for a while."""

OTHERS_BYTES = 2**29
"""A start is told from a setting's fault by others' change of more than this."""

RETURN_S = 15.0
"""What a driver gets to take back the memory of processes that have ended. Unit: seconds."""

FREE_S = 30.0
"""What others get to free what a start was short of. Unit: seconds."""

_POLL_S = 0.2
_READING = TypeAdapter[tuple[DeviceUse, ...]](tuple[DeviceUse, ...])


class NotFree(Record):
    """What a start was short of, as the engine said."""

    requested_bytes: int
    holders: tuple[int, ...] = ()
    """Pids of the engines that hold what is missing, where the engine knows: on a CPU."""


class DeviceFull(Record):
    """A device that is not as it was before a launch, although that has ended: no further launch goes there."""

    device: str
    text: str
    """What is wrong with it, and what to do: a sentence for people."""


def device_full(before: Reading, after: Reading, ours: Collection[int] = ()) -> DeviceFull | None:
    """What keeps the next launch from a device, or None where it is as it was.

    What was unknown before is no measure and keeps nobody off; what has become unknown since is no pass.

    Args:
        ours: pids of the launch that outlived its end.
    """
    if ours:
        pids = ", ".join(map(str, sorted(ours)))
        return _full("this machine" if not before else _names(before), f"processes {pids} of a launch outlive SIGKILL")
    if before is None:
        return None
    if after is None:
        return _full(_names(before), "how much of its memory is in use cannot be read any more")
    for earlier, later in zip(before, after, strict=True):
        left = left_bytes(earlier, later)
        if left > TOLERANCE_BYTES:
            holders = "".join(f", pid {pid} holds {num / 2**30:.2f} GiB" for pid, num in (later.by_pid or {}).items())
            return _full(
                later.device,
                f"{left} bytes ({left / 2**30:.2f} GiB) more are in use than before the launch, "
                f"{RETURN_S:g} s after its last process ended{holders}",
            )
    return None


def _full(device: str, fault: str) -> DeviceFull:
    way_out = "`kneetune clean` ends what runs left alive, nvidia-smi shows who holds memory"
    return DeviceFull(device=device, text=f"nothing is launched on {device} any more: {fault}; {way_out}")


def _names(reading: tuple[DeviceUse, ...]) -> str:
    return ", ".join(use.device for use in reading)


def left_bytes(before: DeviceUse, after: DeviceUse) -> int:
    """How much more is in use than before, less what other processes are seen to have taken; below 0 where less is."""
    return after.used_bytes - before.used_bytes - sum(_changes(before, after).values())


def others_changed_bytes(before: Reading, after: Reading) -> int | None:
    """The most that anybody else took or freed on a device between two readings without a process of ours.

    By process where the driver shows them; what no process explains counts too. None where it is unknown.
    """
    if before is None or after is None:
        return None
    changes = [
        abs(change)
        for earlier, later in zip(before, after, strict=True)
        for change in (left_bytes(earlier, later), *_changes(earlier, later).values())
    ]
    return max(changes, default=0)


def _changes(before: DeviceUse, after: DeviceUse) -> dict[int, int]:
    """What each process took since (freed: below 0); empty where they are not seen."""
    if before.by_pid is None or after.by_pid is None:
        return {}
    return {
        pid: after.by_pid.get(pid, 0) - before.by_pid.get(pid, 0) for pid in before.by_pid.keys() | after.by_pid.keys()
    }


def unless_disturbed(failed: Failed, before: Reading, after: Reading, *, missing: NotFree | None = None) -> Failed:
    """Why a start failed: for others' sake, where they changed its memory meanwhile, or hold what it asked for.

    A setting that a rule refuses is refused whatever the memory. On a CPU nobody is an intruder: what is available
    there is all there is for a setting.

    Args:
        before: the device as the launch found it, held by nobody but others.
        missing: what the start was short of, where it found less free than it asked for.
    """
    held = max((use.used_bytes for use in before or ()), default=0)
    if missing is not None and failed.kind is FailureKind.OOM_STARTUP and held > OTHERS_BYTES:
        detail = f"others hold {held / 2**30:.2f} GiB of the device: {failed.detail}"
        return Failed(kind=FailureKind.INFRASTRUCTURE, detail=detail)
    changed = others_changed_bytes(before, after)
    told = (FailureKind.INVALID_CONFIG, FailureKind.INFRASTRUCTURE)
    if failed.kind in told or changed is None or changed <= OTHERS_BYTES:
        return failed
    detail = (
        f"others changed the device's memory by {changed / 2**30:.2f} GiB during the start, which failed with "
        f"{failed.kind.value}: {failed.detail}"
    )
    return Failed(kind=FailureKind.INFRASTRUCTURE, detail=detail)


def device_after(directory: Path, before: Reading, read: ReadMemory) -> tuple[Reading, DeviceFull | None]:
    """How a launch left its device, once the driver had time to take the memory back; and why nobody may use it.

    Args:
        directory: the trial's, which says whose processes to look for.
        before: how it found the device.
        read: looks again.
    """
    deadline = time.perf_counter() + RETURN_S
    while device_full(before, after := read()) is not None and time.perf_counter() < deadline:
        time.sleep(_POLL_S)
    launch = read_launch(directory)
    ours = [] if launch is None else [process.pid for process in living(launch)]
    return after, device_full(before, after, ours)


def is_free(
    missing: NotFree, *, available_bytes: int | None, is_alive: Callable[[int], bool] = psutil.pid_exists
) -> bool:
    """Whether what a start was short of is there now; unknown is no.

    What engines on a CPU hold of a shared budget is promised to them and not in use: one of them has to end.
    """
    if missing.holders and all(is_alive(pid) for pid in missing.holders):
        return False
    return available_bytes is not None and available_bytes >= missing.requested_bytes


def wait_for_free(missing: NotFree, read: ReadMemory) -> None:
    """Wait until what a start was short of is free, or the time is up."""
    deadline = time.perf_counter() + FREE_S
    while not is_free(missing, available_bytes=available_bytes(read())) and time.perf_counter() < deadline:
        time.sleep(_POLL_S)


def available_bytes(reading: Reading) -> int | None:
    """What is free on the fullest device, on a CPU what the machine has available; None where it is unknown."""
    if reading is None:
        return None
    return min((use.total_bytes - use.used_bytes for use in reading), default=psutil.virtual_memory().available)


def write_reading(directory: Path, reading: Reading) -> None:
    """Record how a trial found its devices, for whoever has to judge them after it if its own process dies."""
    if reading:
        (directory / "device_memory.json").write_bytes(_READING.dump_json(reading))


def read_reading(directory: Path) -> tuple[DeviceUse, ...]:
    """How a trial found its devices; empty where nothing was recorded, or only half of it."""
    try:
        return _READING.validate_json((directory / "device_memory.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return ()
