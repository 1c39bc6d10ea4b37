"""A device that somebody holds is seen before the first launch, with who it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.serving import ROOT
from tuner import __main__ as cli
from tuner.doctor import Fitness, examine
from tuner.engines.device_holders import in_the_way
from tuner.engines.family import MARK, new_mark
from tuner.job import EngineSpec

CLAIM = """
import sys
from engine.device_ledger import locked_ledger
with locked_ledger("cpu:0") as ledger:
    ledger.claim(128 * 2**20)
print("claimed", flush=True)
sys.stdin.read()
"""


@contextmanager
def _holding(**environment: str) -> Iterator[int]:
    """A process that holds 128 MiB of the CPU's device; its pid."""
    command = [sys.executable, "-c", CLAIM]
    environ = dict(os.environ) | environment
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        try:
            yield process.pid
        finally:
            process.communicate()


@pytest.fixture(autouse=True)
def _ledger_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other engines of this machine hold is not this test's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kneetune", *arguments])
    try:
        cli.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def test_a_job_is_refused_before_its_first_launch_and_a_plan_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for minutes of starts that all fail for the memory somebody else holds."""
    with _holding() as pid:
        told = f"pid {pid} holds 128 MiB; stop it first: kill {pid}"
        assert _run(monkeypatch, "tune", "embedded", "--runs", str(tmp_path / "runs")) == 2
        assert told in capsys.readouterr().err
        assert not (tmp_path / "runs").exists()
        assert _run(monkeypatch, "plan", "embedded") == 0
        assert f"warning: an engine that belongs to no job is on cpu:0: {told}" in capsys.readouterr().out
        assert _run(monkeypatch, "tune", "embedded", "--dry-run") == 0
        assert told in capsys.readouterr().out
        device = next(finding for finding in examine(tmp_path) if finding.subject == "device")
        assert (device.fitness, f"pid {pid} holds 128 MiB" in device.found) == (Fitness.BAD, True)
    assert in_the_way(EngineSpec(device="cpu")) is None


def test_an_engine_of_a_job_and_a_rehearsal_are_in_nobodys_way() -> None:
    """Jobs take turns on a device, and what is simulated holds none."""
    with _holding(**{MARK: new_mark()}):
        assert in_the_way(EngineSpec(device="cpu")) is None
    with _holding():
        assert in_the_way(EngineSpec(law="h100-8b")) is None
