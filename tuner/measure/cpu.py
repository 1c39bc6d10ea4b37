"""Who uses the CPUs: each of the engine's processes apart, and what has nothing to do with the measurement."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What the CPUs that this process may use have done since the machine started, all together. Unit: seconds."""

    used_s: float
    """By programs, or taken by other machines on the same hardware."""

    idle_s: float
    own_s: float
    """By this process."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """One look at a process tree."""

    root: tuple[int, float]
    """The first process, by pid and start time: pids are used again."""

    used_s: dict[tuple[int, float], float]
    """CPU seconds of each process since it started, user and system together."""

    host: HostTimes | None = None
    """What the CPUs had done by then."""


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
    try:
        each = psutil.cpu_times(percpu=True)
    except OSError:
        return CpuTimes(root=(root.pid, root.create_time()), used_s=used_s)
    cpus = [each[cpu] for cpu in os.sched_getaffinity(0) if cpu < len(each)]
    # Interrupts are not counted: most are the stage's own traffic.
    host = HostTimes(
        used_s=sum(cpu.user + cpu.nice + cpu.system + cpu.steal for cpu in cpus),
        idle_s=sum(cpu.idle + cpu.iowait for cpu in cpus),
        own_s=time.process_time(),
    )
    return CpuTimes(root=(root.pid, root.create_time()), used_s=used_s, host=host)


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


@dataclass(frozen=True, slots=True)
class OtherWork:
    """What was left of the CPUs, and what others took of them. Unit: cores."""

    other_cores: float
    idle_cores: float


def other_work(before: CpuTimes | None, after: CpuTimes | None, *, elapsed_s: float) -> OtherWork | None:
    """What neither the engine nor this process, which sends the load, did between two looks; None as `cores_used`."""
    engine = cores_used(before, after, elapsed_s=elapsed_s)
    if engine is None or before is None or after is None or before.host is None or after.host is None:
        return None
    was, now = before.host, after.host
    own_s = now.own_s - was.own_s + elapsed_s * sum(engine)
    return OtherWork(
        other_cores=max(0.0, now.used_s - was.used_s - own_s) / elapsed_s,
        idle_cores=max(0.0, now.idle_s - was.idle_s) / elapsed_s,
    )
