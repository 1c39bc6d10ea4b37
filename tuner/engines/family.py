"""Every process of a launch: who they are, whether they live, how they end. Only what we started is ever touched."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from uuid import uuid4

import psutil

from tuner.engines.supervisor import ORPHAN_GRACE_S
from tuner.frozen import Record

MARK = "KNEETUNE_LAUNCH"
"""The environment variable every process of a launch inherits: it is known by it wherever it hides."""

TERM_GRACE_S = 10.0
"""What the first process gets to end by itself, and its workers with it. Unit: seconds."""

_KILL_S = 10.0
_POLL_S = 0.02
_EARLY_S = 0.05
"""Start times are read in ticks of a hundredth of a second."""


class Launch(Record):
    """What names a launch for ever: its first process by pid and start time (a pid alone is used again), and its mark.

    The first process, which keeps the engine (`supervisor.py`), leads a session of its own.
    """

    pid: int
    create_time: float
    mark: str


def new_mark() -> str:
    """A mark for the environment of one launch."""
    return uuid4().hex


def write_launch(directory: Path, launch: Launch) -> None:
    """Record a launch in its trial's directory, for whoever has to end what it leaves."""
    (directory / "process.json").write_text(launch.model_dump_json(), encoding="utf-8")


def read_launch(directory: Path) -> Launch | None:
    """The launch recorded in a trial's directory; None where there is none, or only half of one."""
    file = directory / "process.json"
    try:
        return Launch.model_validate_json(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def is_alive(process: psutil.Process) -> bool:
    """Whether this very process runs; one that ended and was not yet waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def leader(launch: Launch) -> psutil.Process | None:
    """The launch's first process, if it lives."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(launch.pid)
        if process.create_time() == launch.create_time and is_alive(process):
            return process
    return None


def living(launch: Launch, known: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Every process of the launch that lives: by descent, by session and by the mark in its environment.

    Args:
        known: members seen before; one that has left its session and lost its mark since is found only by them.
    """
    found = {process for process in known if is_alive(process)}
    first = leader(launch)
    if first is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {first, *first.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.create_time() >= launch.create_time - _EARLY_S and _belongs(process, launch):
                found.add(process)
    return [process for process in found if is_alive(process)]


def _belongs(process: psutil.Process, launch: Launch) -> bool:
    """A session's number is not given away while anybody is in it, so that a session of that number is the launch's."""
    if process.uids().real != os.getuid():
        return False
    return os.getsid(process.pid) == launch.pid or process.environ().get(MARK) == launch.mark


def end(launch: Launch, known: Iterable[psutil.Process] = (), *, grace_s: float = TERM_GRACE_S) -> None:
    """End every process of the launch: TERM to the first, which passes it on, then to what that leaves, then KILL.

    Args:
        known: members seen before.
        grace_s: what the first process gets to end by itself.
    """
    members = living(launch, known)
    if leader(launch) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launch.pid, signal.SIGTERM)
        _wait_until(lambda: leader(launch) is None, grace_s)
    for member in living(launch, members):
        _signal(member, signal.SIGTERM)
    if _gone(launch, members, ORPHAN_GRACE_S):
        return
    deadline = time.perf_counter() + _KILL_S
    while (left := living(launch, members)) and time.perf_counter() < deadline:
        for member in left:
            _signal(member, signal.SIGKILL)
        _gone(launch, left, 1.0)


def _gone(launch: Launch, members: list[psutil.Process], timeout_s: float) -> bool:
    """Wait until no member lives; the whole machine is looked through only once the known ones are gone."""
    return _wait_until(lambda: not any(is_alive(each) for each in members) and not living(launch, members), timeout_s)


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.perf_counter() + timeout_s
    while not condition():
        if time.perf_counter() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)  # psutil compares the start time, so that a reused pid is safe
