"""Is this machine fit to measure: what is looked at, what is judged, and what to do about it."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Sequence
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import psutil

from tuner.engines.device_holders import cpu_holders, sentence
from tuner.engines.device_lock import device_names, open_lock, wait_for_turn
from tuner.engines.family import MARK
from tuner.frozen import Record
from tuner.gpus import same_for_all, visible_gpus
from tuner.provenance import PACKAGES

BUSY_SHARE = 0.2
"""More of a core than this, used by others, shows in the figures."""

SAMPLE_S = 1.0
FEWEST_CORES = 2
"""One for the engine's server, one for the load; the engine's own computing wants more, or a GPU."""

FEWEST_FILES = 4096
"""Each request of a load is an open file, on both sides."""

LEAST_DISK_BYTES = 2 * 2**30
LEAST_MEMORY_BYTES = 4 * 2**30
_STEADY_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock")
_NETWORK_DISKS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "glusterfs", "ceph")


class Fitness(StrEnum):
    """What was found of one thing."""

    GOOD = "good"
    DOUBTFUL = "doubtful"
    """Figures may be disturbed."""

    BAD = "bad"
    """Nothing can be measured like this."""

    UNKNOWN = "unknown"


class Finding(Record):
    """One thing that was looked at."""

    subject: str
    fitness: Fitness
    found: str
    advice: str | None = None
    """What to do, where it is not good."""


def examine(runs: Path) -> list[Finding]:
    """Look at everything; takes a second or two and starts nothing but `nvidia-smi`, where there is one."""
    return [
        judge_cores(len(os.sched_getaffinity(0))),
        judge_busy(_busy_others()),
        judge_governor(_read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))),
        judge_clock(_read(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"))),
        judge_memory(psutil.virtual_memory().available, psutil.swap_memory().percent),
        judge_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        judge_disk(runs),
        judge_device(_lock_holder(), _engines_of_ours(), _gpu_users(), in_the_way=sentence(cpu_holders())),
        _versions(),
    ]


def judge_cores(num_cores: int) -> Finding:
    """Cores this process may use."""
    found = f"{num_cores} cores may be used"
    if num_cores >= FEWEST_CORES:
        return Finding(subject="cores", fitness=Fitness.GOOD, found=found)
    advice = "engine, its server and the load share one core: the load will be the limit; give this more cores"
    return Finding(subject="cores", fitness=Fitness.BAD, found=found, advice=advice)


def judge_busy(others: Sequence[tuple[str, float]]) -> Finding:
    """Processes that are not ours and their share of a core."""
    busy = [f"{name} ({share:.1f} cores)" for name, share in others if share > BUSY_SHARE]
    if not busy:
        return Finding(subject="neighbours", fitness=Fitness.GOOD, found="nothing else computes")
    advice = "end them or wait: what they take is missing in the figures, now more, now less"
    return Finding(subject="neighbours", fitness=Fitness.DOUBTFUL, found=", ".join(busy), advice=advice)


def judge_governor(governor: str | None) -> Finding:
    """How the processor chooses its speed; a virtual machine does not say."""
    if governor is None:
        return Finding(subject="governor", fitness=Fitness.UNKNOWN, found="this machine does not say")
    if governor == "performance":
        return Finding(subject="governor", fitness=Fitness.GOOD, found=governor)
    advice = "speed follows the load, which bends a ladder: cpupower frequency-set -g performance"
    return Finding(subject="governor", fitness=Fitness.DOUBTFUL, found=governor, advice=advice)


def judge_clock(source: str | None) -> Finding:
    """What times are read from."""
    if source is None:
        return Finding(subject="clock", fitness=Fitness.UNKNOWN, found="this machine does not say")
    if source in _STEADY_CLOCKS:
        return Finding(subject="clock", fitness=Fitness.GOOD, found=source)
    advice = "reading it is slow, and a load reads it for every chunk: prefer tsc"
    return Finding(subject="clock", fitness=Fitness.DOUBTFUL, found=source, advice=advice)


def judge_memory(available_bytes: int, swap_percent: float) -> Finding:
    """RAM that is free for use, and whether the machine swaps."""
    found = f"{available_bytes / 2**30:.1f} GiB available, swap {swap_percent:.0f} % used"
    if available_bytes < LEAST_MEMORY_BYTES:
        advice = f"Ray, the engine and the load want {LEAST_MEMORY_BYTES / 2**30:.0f} GiB: free some"
        return Finding(subject="memory", fitness=Fitness.BAD, found=found, advice=advice)
    if swap_percent > 50:
        return Finding(subject="memory", fitness=Fitness.DOUBTFUL, found=found, advice="the machine swaps: free memory")
    return Finding(subject="memory", fitness=Fitness.GOOD, found=found)


def judge_files(limit: int) -> Finding:
    """Open files a process may have at the most."""
    found = "no limit" if limit == resource.RLIM_INFINITY else f"{limit} open files"
    if limit == resource.RLIM_INFINITY or limit >= FEWEST_FILES:
        return Finding(subject="files", fitness=Fitness.GOOD, found=found)
    advice = f"a load of {limit // 2} and more will fail: ulimit -n {FEWEST_FILES}"
    return Finding(subject="files", fitness=Fitness.DOUBTFUL, found=found, advice=advice)


def judge_disk(runs: Path) -> Finding:
    """Room for run directories, and what kind of disk they lie on."""
    folder = next(each for each in (runs.absolute(), *runs.absolute().parents) if each.exists())
    free_bytes = shutil.disk_usage(folder).free
    kind = _kind_of_disk(folder)
    found = f"{free_bytes / 2**30:.1f} GiB free on {folder} ({kind or 'unknown kind'})"
    if not os.access(folder, os.W_OK):
        advice = "not writable: choose another place with --runs"
        return Finding(subject="disk", fitness=Fitness.BAD, found=found, advice=advice)
    if free_bytes < LEAST_DISK_BYTES:
        return Finding(
            subject="disk", fitness=Fitness.DOUBTFUL, found=found, advice="a full disk ends a run: free some"
        )
    if kind in _NETWORK_DISKS:
        advice = "a run's locks are not safe on a network disk: choose a local one with --runs"
        return Finding(subject="disk", fitness=Fitness.DOUBTFUL, found=found, advice=advice)
    return Finding(subject="disk", fitness=Fitness.GOOD, found=found)


def judge_device(
    holder: str | None, leftovers: Sequence[int], gpu_users: Sequence[str] | None, *, in_the_way: str | None = None
) -> Finding:
    """Who else is on the device.

    Args:
        holder: the job that measures now, if one does.
        leftovers: pids of engines that no running job owns.
        gpu_users: processes on the GPUs; None where there is no GPU.
        in_the_way: who holds the CPU's device outside any job, in the words of `device_holders`.
    """
    if in_the_way is not None:
        found, _, advice = in_the_way.partition("; ")
        return Finding(subject="device", fitness=Fitness.BAD, found=found, advice=advice)
    if holder is not None:
        advice = "a new job waits for its turn, trial by trial"
        return Finding(subject="device", fitness=Fitness.DOUBTFUL, found=f"{holder} is measuring", advice=advice)
    if leftovers:
        found = f"engines of earlier runs live: {', '.join(map(str, leftovers))}"
        return Finding(subject="device", fitness=Fitness.DOUBTFUL, found=found, advice="kneetune clean RUNS")
    if gpu_users:
        advice = "their memory is missing and their work disturbs: end them, or choose another GPU"
        return Finding(subject="device", fitness=Fitness.DOUBTFUL, found="; ".join(gpu_users), advice=advice)
    found = "no GPU: engines compute on the CPU" if gpu_users is None else "nobody is on the GPUs"
    return Finding(subject="device", fitness=Fitness.GOOD, found=found)


def _busy_others() -> list[tuple[str, float]]:
    """Every other process and the cores it used for a second, the busiest first."""
    before: dict[psutil.Process, float] = {}
    for process in psutil.process_iter():
        try:
            before[process] = _cpu_s(process)
        except psutil.Error:
            continue
    begun = time.perf_counter()
    time.sleep(SAMPLE_S)
    busy = []
    for process, cpu_s in before.items():
        try:
            share = (_cpu_s(process) - cpu_s) / (time.perf_counter() - begun)
            if process.pid != os.getpid():
                busy.append((f"{process.name()} {process.pid}", share))
        except psutil.Error:
            continue
    return sorted(busy, key=lambda each: -each[1])


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _read(file: Path) -> str | None:
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _kind_of_disk(folder: Path) -> str | None:
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else None


def _lock_holder() -> str | None:
    for device in sorted({*device_names(()), *device_names(same_for_all(visible_gpus()))}):
        with open_lock(device) as lock:
            holder = next(wait_for_turn(lock, holder="kneetune doctor"), None)
        if holder is not None:
            return holder
    return None


def _engines_of_ours() -> list[int]:
    """Processes that carry a launch's mark; with no job measuring, nobody owns them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid() and MARK in process.environ():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def _gpu_users() -> list[str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-compute-apps=gpu_bus_id,pid,process_name,used_memory", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def _versions() -> Finding:
    found = ", ".join(f"{name} {metadata.version(name)}" for name in ("kneetune", *PACKAGES))
    return Finding(subject="versions", fitness=Fitness.GOOD, found=found)
