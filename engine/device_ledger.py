"""Who has claimed how much of a virtual device: on a CPU no driver knows, so that instances tell each other.

A claim is a line in a small file: pid, start, bytes. It holds as long as its process lives, so that nothing has to be
cleaned up: at every look, claims of processes that have ended are dropped, unreaped ones (zombies) too, and a pid that
another process bears now is known by its start. The files lie in a folder of this user alone, in `XDG_RUNTIME_DIR`,
else `TMPDIR`, else `/tmp`; instances that see different folders, or different process ids (containers), do not see
each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOCK_WAIT_S = 10.0
"""The lock is held for a few file operations; one that is not had by then will not be. Unit: seconds."""

_LOCK_POLL_S = 0.01
_MOST_BYTES = 2**20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DeviceLedgerError(RuntimeError):
    """The ledger cannot be read, written or trusted; this says nothing about the config."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one process holds of a device."""

    pid: int
    started: str
    """When, in the machine's own words: with the pid it names a process for ever."""

    num_bytes: int


class DeviceLedger:
    """The claims on one device while its lock is held. Made by `locked_ledger`."""

    def __init__(self, device: str, path: Path, folder: int) -> None:
        self._device = device
        self._path = path
        self._folder = folder
        self._name = f"{_file_stem(device)}.claims"
        own = os.getpid()
        self.others = tuple(claim for claim in self._read() if claim.pid != own and _start(claim.pid) == claim.started)
        """Claims of other processes that are alive."""

    def claim(self, num_bytes: int) -> None:
        """Claim this much for this process as long as it lives, in place of what it had claimed before.

        Raises:
            DeviceLedgerError: where it cannot be written down.
        """
        own = os.getpid()
        claims = (*self.others, Claim(own, f"{_start(own)}", num_bytes))
        text = "".join(f"{claim.pid} {claim.started} {claim.num_bytes}\n" for claim in claims)
        draft = f"{self._name}.new"
        with _explained(self._device, self._path):
            with _opened(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._folder) as file:
                os.write(file, text.encode("ascii"))
            # Replaced as a whole: a process killed here, or a full disk, leaves the old claims.
            os.replace(draft, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def _read(self) -> list[Claim]:
        try:
            with _opened(self._name, os.O_RDONLY, self._folder) as file:
                lines = os.read(file, _MOST_BYTES).decode("ascii").splitlines()
            fields = (line.split() for line in lines)
            return [Claim(int(pid), started, int(num_bytes)) for pid, started, num_bytes in fields]
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise DeviceLedgerError(
                f"{self._path / self._name}, which says who holds {self._device}, is damaged: "
                "delete it while no engine of this user runs"
            ) from error


@contextlib.contextmanager
def locked_ledger(device: str) -> Iterator[DeviceLedger]:
    """The claims on `device`, which nobody else reads or changes meanwhile: look, decide and claim in one.

    Args:
        device: a name such as `cpu:0`.

    Raises:
        DeviceLedgerError: for a folder that is not this user's alone, one that cannot be written, a full disk, a
            damaged file, or a lock that is not released.
    """
    path = ledger_folder()
    with contextlib.ExitStack() as held:
        with _explained(device, path):
            folder = held.enter_context(_private(path))
            held.enter_context(_locked(path, f"{_file_stem(device)}.lock", folder))
            ledger = DeviceLedger(device, path, folder)
        yield ledger


def ledger_folder() -> Path:
    """Where this user's ledgers lie.

    Not where `tempfile` would go: it looks for another place once the first is full, and then two instances would keep
    two ledgers.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = runtime if runtime and Path(runtime).is_dir() else os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - see `_private`
    return Path(base) / f"kneetune-{os.geteuid()}"


def _file_stem(device: str) -> str:
    return device.replace(":", "-")


@contextlib.contextmanager
def _explained(device: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DeviceLedgerError(
            f"it cannot be kept in {path} who holds {device}: {error.strerror}; make room there, or set "
            "XDG_RUNTIME_DIR to a folder that this user can write to"
        ) from error


@contextlib.contextmanager
def _private(path: Path) -> Iterator[int]:
    """The folder's descriptor; made where it is missing.

    Raises:
        DeviceLedgerError: where it is a link or another user's, or others may use it: they could keep memory from an
            engine, or have it write elsewhere.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise DeviceLedgerError(f"{path} is not a folder but a link or a file: remove it") from error
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            raise DeviceLedgerError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}: remove it")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise DeviceLedgerError(f"{path} is open to other users: chmod 700 {path}")
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _locked(path: Path, name: str, folder: int) -> Iterator[None]:
    with _opened(name, os.O_RDWR | os.O_CREAT, folder) as lock:
        deadline_s = time.perf_counter() + LOCK_WAIT_S
        while not _try_lock(lock):
            if time.perf_counter() > deadline_s:
                raise DeviceLedgerError(f"another process has locked {path / name} and does not let go")
            time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _opened(name: str, flags: int, folder: int) -> Iterator[int]:
    file = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


def _start(pid: int) -> str | None:
    """When a process started: the boot, and clock ticks since then, which no clock setting moves; None where it ended.

    (Linux: `proc_pid_stat(5)`, fields 3 and 22, counted behind the name, which may hold anything.)
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, ticks = fields[0], fields[19]
    return None if state in "ZX" else f"{_BOOT_ID.read_text(encoding='ascii').strip()}/{ticks}"
