"""What the machine has, and what control groups allow this process of it: memory and CPU time, in version 1 or 2.

Without their files: no limit.

A group's limit also binds every group below it, so the tightest one from this process's group up to the root of the
mount counts (Linux: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst, scheduler/sched-bwc.rst).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_V1_UNLIMITED_BYTES = 2**62
"""Version 1 says `no limit` with the largest multiple of a page below 2 ** 63."""

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this process may use at most; None is no limit."""

    memory_bytes: int | None
    cpus: float | None
    """CPU time a second of wall time. Unit: CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ram:
    """The machine's memory."""

    total_bytes: int
    available_bytes: int
    """What can be had without swapping: free, or a cache that can go."""


def read_ram(*, meminfo: Path = _MEMINFO) -> Ram:
    """The machine's memory now (Linux: Documentation/filesystems/proc.rst, meminfo)."""
    lines = (line.split() for line in meminfo.read_text(encoding="ascii").splitlines())
    kibibytes = {name: int(size) for name, size, *_ in lines}
    return Ram(total_bytes=kibibytes["MemTotal:"] * 1024, available_bytes=kibibytes["MemAvailable:"] * 1024)


def read_limits(*, root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> Limits:
    """The limits in force now.

    Args:
        root: where control groups are mounted.
        membership: the file that says which groups this process is in.
    """
    memory_bytes, cpus = [], []
    for folder in _folders("memory", root, membership):
        texts = (_read(folder / name) for name in ("memory.max", "memory.limit_in_bytes"))
        memory_bytes += [memory_limit(text) for text in texts if text is not None]
    for folder in _folders("cpu", root, membership):
        if (both := _read(folder / "cpu.max")) is not None:
            cpus.append(cpu_quota(*both.split()))
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota is not None and period is not None:
            cpus.append(cpu_quota(quota, period))
    return Limits(memory_bytes=_tightest(memory_bytes), cpus=_tightest(cpus))


def oom_kills(*, root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Processes of this process's group that the kernel has killed for memory so far; None where no file says."""
    for folder in _folders("memory", root, membership):
        for name in ("memory.events", "memory.oom_control"):
            for line in (_read(folder / name) or "").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def memory_limit(text: str) -> int | None:
    """The limit that a `memory.max` or `memory.limit_in_bytes` states. Unit: bytes."""
    if text.strip() == "max":
        return None
    limit = int(text)
    return None if limit >= _V1_UNLIMITED_BYTES else limit


def cpu_quota(quota: str, period: str) -> float | None:
    """CPU time a period, as `cpu.max` states it, or the two `cpu.cfs_*_us`. Unit: CPUs."""
    return None if quota.strip() in ("max", "-1") else int(quota) / int(period)


def _tightest(limits: Iterable[_Number | None]) -> _Number | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _folders(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The folders whose files bind this process, its own group's first; some may not be there.

    A container may see its own group at the mount's root, under a path of the host's in `membership`.
    """
    for line in (_read(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            yield root / controllers / group


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
