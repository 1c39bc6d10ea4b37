"""One engine at a time on a device: jobs of one user take turns, trial by trial, and never measure each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

POLL_S = 0.2


def device_name(environment: Mapping[str, str]) -> str:
    """What a launch here takes for itself: the GPUs it is shown, or else the machine."""
    shown = environment.get("CUDA_VISIBLE_DEVICES", "")
    return f"cuda-{shown.replace(',', '-')}" if shown else "machine"


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
