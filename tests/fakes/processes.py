"""Real processes, known for ever by pid and start time, and waited for until they are gone."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from tuner.engines.family import is_alive, read_launch

_DEADLINE_S = 20.0
_POLL_S = 0.01

HIDES = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in map(int, sys.argv[2:]):
            signal.signal(number, signal.SIG_IGN)
        with open(sys.argv[1], "w") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(600)
    os._exit(0)
os.wait()
"""
"""Starts of a script that leaves a grandchild in a session of its own, whose parent is gone: `-c … FILE [IGNORED…]`.

Its pid is written to FILE; it ignores the signals named.
"""


def written_pid(file: Path) -> psutil.Process:
    """The process whose pid is written to a file, as soon as its line is whole."""
    deadline_s = time.perf_counter() + _DEADLINE_S
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.perf_counter() < deadline_s, f"no pid was written to {file}"
        time.sleep(_POLL_S)
    return psutil.Process(int(file.read_text()))


def engine_of(directory: Path) -> psutil.Process:
    """The first process of the engine that a trial in `directory` has launched."""
    launch = read_launch(directory)
    assert launch is not None
    (engine,) = psutil.Process(launch.pid).children()
    return engine


def gone(*processes: psutil.Process) -> bool:
    """Whether all are gone before long; one that is not is killed, so that a test that fails leaves nothing."""
    deadline_s = time.perf_counter() + _DEADLINE_S
    while (left := [process for process in processes if is_alive(process)]) and time.perf_counter() < deadline_s:
        time.sleep(_POLL_S)
    for process in left:
        process.kill()
    return not left


SPARE_BYTES = 4 * 2**20
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Environment of a process that gives large blocks back when it frees them, and has to ask for each again."""


def take_little_more_memory(process: psutil.Process) -> None:
    """Refuse a process address space beyond SPARE_BYTES, as a full device does: a heavy step fails, no light one.

    What a process keeps for itself it may still use; one started with RETURNS_MEMORY keeps little.
    """
    size = process.memory_info().vms + SPARE_BYTES
    process.rlimit(psutil.RLIMIT_AS, (size, size))
