"""Two jobs on one machine take turns, and one that died holds nobody up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.engines.device_lock import device_names, open_lock, wait_for_turn

HOLD = """
import time
from tuner.engines.device_lock import open_lock, wait_for_turn
with open_lock("test") as lock:
    assert list(wait_for_turn(lock, holder="the first")) == []
    print("taken", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_the_second_waits_by_name_and_goes_when_the_first_is_killed() -> None:
    """No trial is measured beside another's engine, and kill -9 leaves no lock behind."""
    first = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    with first.stdout, open_lock("test") as lock:
        assert first.stdout.readline() == "taken\n"
        turn = wait_for_turn(lock, holder="the second")
        assert next(turn) == "the first"
        first.kill()
        first.wait()
        assert list(turn) == []


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """Nobody else on the machine decides when this user's jobs run."""
    (tmp_path / f"kneetune-locks-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"kneetune-locks-{os.getuid()}").chmod(0o777)
    with pytest.raises(PermissionError, match="only this user"), open_lock("test"):
        pass


def test_trials_on_different_gpus_do_not_wait_for_each_other_and_those_that_share_one_do() -> None:
    """Two cards are two devices, and an engine on several of them takes each."""
    assert not set(device_names(["0"])) & set(device_names(["1"]))
    assert set(device_names(["0", "1"])) & set(device_names(["1", "2"]))
    assert device_names(["3", "1"]) == device_names(["1", "3"])
    assert device_names([]) == ("machine",)
