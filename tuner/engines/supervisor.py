"""Keeps an engine: `python -I -S supervisor.py PARENT GRACE_S -- COMMAND…`, run as a file by its path.

An engine has a session of its own, so the death of the worker that launched it would pass it by; and what it starts may
hide in sessions of its own, and would outlive its first process. This small process stays between worker and engine:

* orphans among the engine's descendants become its children (a subreaper), so that none can hide from it;
* SIGTERM and SIGINT are passed on to the engine and its group;
* when the worker dies, the kernel sends SIGTERM here; an engine that has not ended `GRACE_S` later is killed;
* when the engine has ended, whatever lives of its descendants is ended too: SIGTERM, and later SIGKILL;
* its own end is the engine's: the same exit code, the same signal.

It says the engine's pid on its standard output, closes that, and waits in the kernel; all that the engine writes goes
to the standard error. Every launch waits for its start, so it imports nothing that takes time (`pathlib` does); its
memory is a bare interpreter's, some 5 MB, which no figure of the engine counts. Should it be killed itself, the kernel
sends SIGTERM to the engine.

(A `preexec_fn` would run Python in a forked copy of a process with many threads, which can hang.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

ORPHAN_GRACE_S = 2.0
"""What an engine leaves gets from SIGTERM to SIGKILL. Unit: seconds."""

NOT_STARTED = 127
"""Exit code, as a shell's, where there is no such command."""

_KILL_S = 10.0
_POLL_S = 0.05

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36

_AWAITED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGALRM)


def main(arguments: list[str]) -> None:
    """Start the command, keep it, and end as it ended."""
    parent, grace_s, _, *command = arguments
    inherited = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, children leave no status
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("the process that launched this engine is gone")
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    told = os.dup(1)  # which no program started from here inherits
    os.dup2(2, 1)
    engine = _started(command, inherited)
    os.write(told, str(engine).encode())
    os.close(told)
    code = _kept(engine, parent=int(parent), grace_s=float(grace_s))
    _end_the_rest()
    _end_as(code)


def _started(command: list[str], mask: set[int | signal.Signals]) -> int:
    """The pid of `command`, which leads a group of its own and ends with this process."""
    supervisor, engine = os.getpid(), os.fork()
    if engine:
        # Here as well, so that it has its group before anything is passed on; refused where it is the command already.
        with contextlib.suppress(PermissionError):
            os.setpgid(engine, engine)
        return engine
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:
        os._exit(NOT_STARTED)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)  # noqa: S606  (an argument list, and becoming it is the point)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(NOT_STARTED)


def _kept(engine: int, *, parent: int, grace_s: float) -> int:
    """Wait for the engine's end, passing on what is sent here; its exit code, minus the signal that ended it."""
    while True:
        number = signal.sigwait(_AWAITED)
        if number == signal.SIGCHLD:
            code = _reap(engine)
            if code is not None:
                return code
            continue
        with contextlib.suppress(ProcessLookupError):  # its end is the next thing to hear of
            os.killpg(engine, signal.SIGKILL if number == signal.SIGALRM else number)
        if os.getppid() != parent:
            signal.setitimer(signal.ITIMER_REAL, max(grace_s, _POLL_S))  # which 0 would turn off


def _reap(engine: int | None = None) -> int | None:
    """Take in every child that has ended, adopted ones too; the engine's exit code where it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == engine:
            code = os.waitstatus_to_exitcode(status)


def _end_the_rest() -> None:
    """End all descendants. Each end orphans children, which are descendants still, and seen in the next round."""
    begun_s, asked = time.perf_counter(), set[tuple[int, int]]()
    while (left := _descendants()) and (so_far_s := time.perf_counter() - begun_s) < ORPHAN_GRACE_S + _KILL_S:
        is_late = so_far_s > ORPHAN_GRACE_S
        for pid, start in left if is_late else left - asked:
            if _started_at(pid) == start:
                _signal(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        asked |= left
        signal.sigtimedwait((signal.SIGCHLD,), _POLL_S)


def _descendants() -> set[tuple[int, int]]:
    """Every descendant, by pid and start time; one that is dead and not yet waited for counts until its parent is."""
    _reap()
    if sys.platform != "linux":
        return set()
    stats = {int(name): _stat(int(name)) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208
    found: set[tuple[int, int]] = set()
    parents = {os.getpid()}
    while parents:
        children = {(pid, stat[1]) for pid, stat in stats.items() if stat is not None and stat[0] in parents}
        found |= children
        parents = {pid for pid, _ in children}
    return found


def _stat(pid: int) -> tuple[int, int] | None:
    """A process's parent and its start time, in clock ticks since boot; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            # The name, in brackets, may hold anything; after it stand the third field and the others (proc(5)).
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19])


def _started_at(pid: int) -> int | None:
    stat = _stat(pid)
    return None if stat is None else stat[1]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or not ours to end (setuid)
        os.kill(pid, number)


def _end_as(code: int) -> None:
    """End with an exit code, or by the signal that it stands for."""
    if code < 0:
        _prctl(_PR_SET_DUMPABLE, 0)  # the engine's core may be worth a dump; this process's is not
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _prctl(option: int, value: int) -> None:
    """Ask the kernel for something about this process; elsewhere than on Linux there is nothing of the kind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main(sys.argv[1:])
