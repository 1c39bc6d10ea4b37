"""One engine at a time on a device: trials of one user take turns, and never measure each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

POLL_S = 0.2


def device_names(gpus: Sequence[str]) -> tuple[str, ...]:
    """What a launch takes for itself: each of its GPUs, or else the machine.

    In one order for everybody, so that two that take several never wait for each other.
    """
    return tuple(sorted(f"cuda-{name.replace('/', '-')}" for name in gpus)) or ("machine",)


@contextlib.contextmanager
def open_lock(device: str) -> Iterator[IO[str]]:
    """The file whose lock is the right to launch on `device`; it is free again when this ends, or its process.

    Raises:
        PermissionError: where the folder of locks is not this user's alone.
    """
    folder = Path(tempfile.gettempdir()) / f"kneetune-locks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that only this user may enter: remove it and try again")
    with (folder / f"{device}.lock").open("a+", encoding="utf-8") as file:
        yield file


def wait_for_turn(file: IO[str], *, holder: str) -> Iterator[str]:
    """Wait until the lock is ours; yields who has it, each time that is somebody else.

    Args:
        holder: what others are told of us.
    """
    told = None
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            file.seek(0)
            other = file.read() or "another process"
            if other != told:
                yield other
            told = other
            time.sleep(POLL_S)
    file.truncate(0)
    file.write(holder)
    file.flush()
