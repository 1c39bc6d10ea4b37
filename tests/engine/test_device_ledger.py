"""Who holds a virtual device: claims live as long as their process, and nobody else can meddle."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine import device_ledger
from engine.device_ledger import Claim, DeviceLedgerError, ledger_folder, locked_ledger
from tests.fakes.serving import ROOT

_CLAIM = """
import sys
from engine.device_ledger import locked_ledger
with locked_ledger("cpu:0") as ledger:
    ledger.claim(int(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""
_CONTEND = """
import sys
import torch
from engine.config import EngineConfig
from engine.device_memory import take_share
from engine.memory import NotEnoughMemoryError
config = EngineConfig(model="m", device_memory_bytes=2**20, gpu_memory_utilization=0.6)
print("ready", flush=True)
sys.stdin.readline()
try:
    print(take_share(config, torch.device("cpu"), limit_bytes=None, least_bytes=0).requested_bytes, flush=True)
except NotEnoughMemoryError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def _others(device: str = "cpu:0") -> tuple[Claim, ...]:
    with locked_ledger(device) as ledger:
        return ledger.others


def _start(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that has claimed 1000 bytes of `cpu:0`."""
    process = _start(_CLAIM, "1000")
    try:
        assert _line(process) == "claimed"
        yield process
    finally:
        _end(process)


def test_a_claim_is_seen_by_others_on_its_own_device_only(holder: subprocess.Popen[str]) -> None:
    """Instances on one device know of each other; those on another do not lose memory to them."""
    (claim,) = _others()
    assert (claim.pid, claim.num_bytes) == (holder.pid, 1000)
    assert _others("cpu:1") == ()


def test_a_claim_ends_with_its_process_though_nobody_has_reaped_it(holder: subprocess.Popen[str]) -> None:
    """An engine that was just killed never keeps the next one from starting, nor does one whose parent is gone too."""
    holder.send_signal(9)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)

    assert psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE
    assert _others() == ()


def test_a_pid_that_another_process_bears_now_holds_nothing(holder: subprocess.Popen[str]) -> None:
    """After many starts pids come again; a stranger's long life does not keep memory from engines."""
    (claim,) = _others()
    path = ledger_folder() / "cpu-0.claims"
    boot, ticks = claim.started.split("/")
    for started in (f"{boot}/{int(ticks) - 1}", f"an-earlier-boot/{ticks}"):
        path.write_text(f"{claim.pid} {started} 1000\n")
        assert _others() == ()


def test_a_process_has_one_claim_a_device_and_does_not_stand_in_its_own_way() -> None:
    """What a process claims again takes the place of what it had; claims of the dead leave the file."""
    for num_bytes in (5, 7):
        with locked_ledger("cpu:0") as ledger:
            assert ledger.others == ()
            ledger.claim(num_bytes)
    (line,) = (ledger_folder() / "cpu-0.claims").read_text().splitlines()
    pid, _, num_bytes_written = line.split()
    assert (int(pid), num_bytes_written) == (os.getpid(), "7")


def test_of_those_that_start_at_once_only_as_many_get_memory_as_there_is() -> None:
    """Two engines of 0.6 never share one device, however close their starts; the other learns who holds it."""
    processes = [_start(_CONTEND) for _ in range(2)]
    try:
        assert [_line(process) for process in processes] == ["ready"] * 2
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = {process.pid: _line(process) for process in processes}
    finally:
        for process in processes:
            _end(process)
    (winner,) = [pid for pid, answer in answers.items() if answer.isdecimal()]
    for pid, answer in answers.items():
        if pid != winner:
            assert f"pid {winner} holds 614.40 KiB" in answer
            assert "asks for 614.40 KiB of 1.00 MiB, but 409.60 KiB is free now" in answer
            assert "at most 0.40" in answer


def test_the_folder_is_this_users_alone() -> None:
    """On a shared machine other users neither read nor write who holds what."""
    _others()
    assert ledger_folder().stat().st_mode & 0o777 == 0o700


def test_without_a_runtime_folder_the_temporary_one_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a container or under sudo, where `XDG_RUNTIME_DIR` is unset or names nothing, engines still share."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for runtime in ("", str(tmp_path / "gone")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        assert ledger_folder().parent == tmp_path
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert ledger_folder().parent == tmp_path


def _as_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def _as_file(path: Path) -> None:
    path.touch()


def _as_open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def _as_foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("prepare", "told"),
    [(_as_link, "not a folder"), (_as_file, "not a folder"), (_as_open, "chmod 700"), (_as_foreign, "user 12345")],
)
def test_a_folder_that_another_user_could_have_laid_out_is_refused(prepare, told: str) -> None:  # type: ignore[no-untyped-def]
    """Nobody has an engine write elsewhere, or keeps memory from it with made-up claims."""
    prepare(ledger_folder())
    with pytest.raises(DeviceLedgerError, match=told) as error:
        _others()
    assert str(ledger_folder()) in str(error.value)


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    """A file of the user's that a link names is not overwritten."""
    _others()
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (ledger_folder() / "cpu-0.claims.new").symlink_to(precious)
    with locked_ledger("cpu:0") as ledger, pytest.raises(DeviceLedgerError):
        ledger.claim(1)
    assert precious.read_text() == "kept"


def test_a_damaged_file_is_named() -> None:
    """The user learns which file to delete, and no claim is guessed."""
    _others()
    (ledger_folder() / "cpu-0.claims").write_bytes(b"\xff half a li")
    with pytest.raises(DeviceLedgerError, match=r"cpu-0\.claims.* is damaged"):
        _others()


def test_a_full_disk_is_said_and_old_claims_stay(
    monkeypatch: pytest.MonkeyPatch, holder: subprocess.Popen[str]
) -> None:
    """An engine that cannot say what it takes does not start, and those that run keep what they hold."""

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with locked_ledger("cpu:0") as ledger:
        monkeypatch.setattr(device_ledger.os, "write", full)
        with pytest.raises(DeviceLedgerError, match="No space left on device; make room there"):
            ledger.claim(1)
    assert [claim.pid for claim in _others()] == [holder.pid]


def test_a_place_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only place is named with what to set."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc")
    with pytest.raises(DeviceLedgerError, match=r"/proc/kneetune-\d+ who holds cpu:0: .*set XDG_RUNTIME_DIR"):
        _others()


def test_a_lock_that_is_not_released_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process does not hang every later start without a word."""
    monkeypatch.setattr(device_ledger, "LOCK_WAIT_S", 0.0)
    _others()
    with (ledger_folder() / "cpu-0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeviceLedgerError, match="does not let go"):
            _others()
