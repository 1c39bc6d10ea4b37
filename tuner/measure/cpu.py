"""How much CPU each of the engine's processes uses: a server that is saturated is seen apart from what computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """One look at a process tree."""

    root: tuple[int, float]
    """The first process, by pid and start time: pids are used again."""

    used_s: dict[tuple[int, float], float]
    """CPU seconds of each process since it started, user and system together."""


def cpu_times(root_pid: int | None) -> CpuTimes | None:
    """Look at a process and its descendants; None without a process, or where one may not be read or is gone."""
    if root_pid is None:
        return None
    import psutil  # of a server that is not ours to look at, nothing needs it

    try:
        root = psutil.Process(root_pid)
        used_s = {}
        for process in [root, *root.children(recursive=True)]:
            times = process.cpu_times()
            used_s[process.pid, process.create_time()] = times.user + times.system
    except psutil.Error:
        return None
    return CpuTimes(root=(root.pid, root.create_time()), used_s=used_s)


def cores_used(before: CpuTimes | None, after: CpuTimes | None, *, elapsed_s: float) -> tuple[float, ...] | None:
    """CPU use of each process between two looks, in cores: the first process, then the others, the busiest first.

    A process that began in between counts from its start; one that ended in between is left out.
    None where a look is missing, the first process was another one, or no time passed.
    """
    if before is None or after is None or before.root != after.root or elapsed_s <= 0:
        return None
    cores = {key: max(0.0, used_s - before.used_s.get(key, 0.0)) / elapsed_s for key, used_s in after.used_s.items()}
    first = cores.pop(after.root)
    return first, *sorted(cores.values(), reverse=True)
