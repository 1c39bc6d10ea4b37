"""Becomes the engine: `python -I child.py PARENT_PID -- COMMAND…`, run as a file, whatever environment the engine has.

An engine runs in a session of its own, so the death of the worker that launched it would pass it by. This small step in
between asks the kernel to end it with its parent, then turns into the command. (A `preexec_fn` would run Python in a
forked copy of a process with many threads, which can hang.)
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Set the parent-death signal, check that the parent still lives, and become the command."""
    parent_pid, _, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent_pid):
        sys.exit("the process that launched this engine is gone")
    os.execvp(command[0], command)  # noqa: S606  (an argument list, and becoming it is the point)


if __name__ == "__main__":
    main(sys.argv[1:])
