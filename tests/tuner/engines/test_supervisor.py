"""What keeps an engine ends with it, ends as it, and lets nothing of it live on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.fakes.processes import HIDES, gone, written_pid
from tuner.engines import supervisor

SLEEPS = "import time; time.sleep(600)"
TELLS = """
import os, signal, sys, time
def told(number, _):
    sys.exit(number)
signal.signal(signal.SIGTERM, told)
signal.signal(signal.SIGINT, told)
print(os.getpid(), file=open(sys.argv[1], "w", buffering=1))
time.sleep(600)
"""


def _command(script: str, *arguments: object, parent: int | None = None, grace_s: float = 10.0) -> list[str]:
    keeper = [sys.executable, "-I", "-S", supervisor.__file__, str(parent or os.getpid()), str(grace_s), "--"]
    return [*keeper, sys.executable, "-c", script, *map(str, arguments)]


@contextmanager
def _keeping(script: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """What keeps a script, and the script's own process; neither is left."""
    keeper = subprocess.Popen(_command(script, *arguments), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert keeper.stdout is not None
    try:
        with keeper.stdout as told:
            kept = psutil.Process(int(told.read()))
        yield keeper, kept
    finally:
        keeper.kill()
        keeper.wait()


def test_an_exit_code_and_a_signal_are_the_engines_own() -> None:
    """A wrong argument, a crash and a kill for memory are told apart by them, and count against a setting or not."""
    assert subprocess.run(_command("raise SystemExit(7)"), capture_output=True, check=False).returncode == 7
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGINT, signal.SIGTERM):
        script = (
            f"import os, signal; signal.signal({number}, 0) if {number} != 9 else 0; os.kill(os.getpid(), {number})"
        )
        assert subprocess.run(_command(script), capture_output=True, check=False).returncode == -number


def test_a_command_that_is_not_there_is_named() -> None:
    """A typing mistake in engine.command would read as a crash of the engine."""
    command = [*_command("")[:-3], "/no/such/engine"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == supervisor.NOT_STARTED
    assert ended.stderr == "cannot start /no/such/engine: No such file or directory\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_engine_once(tmp_path: Path, number: signal.Signals) -> None:
    """An engine that is asked to end ends by its own rules, and says how."""
    with _keeping(TELLS, tmp_path / "up") as (keeper, kept):
        assert written_pid(tmp_path / "up") == kept
        keeper.send_signal(number)
        assert keeper.wait() == number


@pytest.mark.parametrize("ignored", [(), (signal.SIGTERM,)])
def test_what_an_engine_leaves_is_gone_before_its_end_is_told(
    tmp_path: Path, ignored: tuple[signal.Signals, ...]
) -> None:
    """An engine that crashes leaves workers that hold the device, one in a session of its own, one deaf."""
    script = HIDES + "sys.exit(5)"
    keeper = subprocess.run(
        _command(script, tmp_path / "hidden", *map(int, ignored)), stdout=subprocess.DEVNULL, check=False
    )
    assert keeper.returncode == 5
    assert not psutil.pid_exists(int((tmp_path / "hidden").read_text()))


def test_an_orphan_that_ends_is_taken_in(tmp_path: Path) -> None:
    """An engine that forks for months would leave a process table full of dead."""
    with _keeping(HIDES + SLEEPS, tmp_path / "hidden") as (keeper, _):
        hidden = written_pid(tmp_path / "hidden")
        assert hidden.ppid() == keeper.pid
        hidden.kill()
        hidden.wait(20.0)  # of a dead one that nobody took in it would tire


def test_nothing_is_started_for_a_worker_that_is_gone(tmp_path: Path) -> None:
    """A worker killed while it launches would leave an engine that nobody knows of."""
    orphan = subprocess.run(_command(TELLS, tmp_path / "up", parent=1), capture_output=True, text=True, check=False)
    assert orphan.returncode == 1
    assert orphan.stderr == "the process that launched this engine is gone\n"
    assert not (tmp_path / "up").exists()


def test_an_engine_ends_with_what_keeps_it(tmp_path: Path) -> None:
    """Who kills everything of one name, or for memory, may hit this one first."""
    with _keeping(TELLS, tmp_path / "up") as (keeper, kept):
        written_pid(tmp_path / "up")
        keeper.kill()
        assert gone(kept)


def test_it_takes_next_to_no_memory() -> None:
    """It stands beside every engine for as long as that runs; what it imports would stand there as well."""
    with _keeping(SLEEPS) as (keeper, _):
        assert psutil.Process(keeper.pid).memory_full_info().uss < 12 * 2**20
