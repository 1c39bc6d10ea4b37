"""Before the next launch a trial's device is as it was: processes gone, memory back, on processes that really hide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tuner.engine_config import EngineConfig
from tuner.engines.device_return import DeviceFull, write_reading
from tuner.engines.device_use import DeviceUse, Reading
from tuner.engines.family import MARK, Launch, is_alive, new_mark, write_launch
from tuner.engines.leftovers import end_lost_launch
from tuner.job import EngineSpec, load_job
from tuner.ladder import FixedSteps, LadderStep
from tuner.records import Failed, FailureKind, StageKind, TrialRecord, TrialRole
from tuner.trial import TrialNote, TrialSpec, run_trial

GIB = 2**30


_CHILD = """
import ctypes, os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(15, b"somebody", 0, 0, 0)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""
"""Forks a child that ignores SIGTERM, leaves its session and renames itself."""

_HIDING = (
    _CHILD
    + """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": sys.argv[2]}]}).encode() if "models" in self.path else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
)
_OUT_OF_MEMORY = """
import sys
sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB.")
"""
_SHORT_OF_MEMORY = """
import json, sys
message = (
    "gpu_memory_utilization=0.6 asks for 1.00 MiB of 2.00 MiB, but 512.00 KiB is free now "
    "(pid %s holds 1.50 MiB): free some"
)
print(json.dumps({"event": "start_failed", "kind": "infrastructure", "message": message}))
sys.exit(1)
"""


class _Device:
    """A GPU whose memory is held by a process, and for some looks longer than it lives."""

    def __init__(self, log: Path, *, lag: float) -> None:
        self.looks_after_death = 0
        self._log = log
        self._lag = lag

    def pid(self) -> int | None:
        """The process, once it has said who it is."""
        words = self._log.read_text().split() if self._log.exists() else []
        return int(words[0]) if words else None

    def __call__(self) -> Reading:
        held, pid = 0, self.pid()
        if pid is not None:
            lives = psutil.pid_exists(pid) and is_alive(psutil.Process(pid))
            self.looks_after_death += not lives
            held = 8 * GIB if lives or self.looks_after_death <= self._lag else 0
        return (DeviceUse(device="GPU-a", total_bytes=80 * GIB, used_bytes=GIB + held, by_pid={}),)


def _spec(directory: Path) -> TrialSpec:
    return TrialSpec(
        number=3,
        role=TrialRole.STUDY,
        config=EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, gpu_memory_utilization=0.6),
        origin="sampler",
        job=load_job("embedded"),
        plan=FixedSteps(steps=(LadderStep(kind=StageKind.LADDER, load=1),), request_rate_rps=50.0),
        directory=directory,
    )


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.engines.family.ORPHAN_GRACE_S", 0.2)


def _launch_instead(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    def command(*_: object, port: int, served_model_name: str) -> list[str]:
        return [sys.executable, "-c", script, str(port), served_model_name]

    monkeypatch.setattr("tuner.engines.builtin.BuiltinEngine.command", command)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(("lag", "return_s", "is_full"), [(3, 60.0, False), (float("inf"), 0.5, True)])
def test_a_device_is_given_back_empty_or_said_to_be_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lag: float, return_s: float, is_full: bool
) -> None:
    """However its processes hide and however late the driver is, nobody launches where memory is still taken."""
    monkeypatch.setattr("tuner.engines.device_return.RETURN_S", return_s)
    _launch_instead(monkeypatch, _HIDING)
    device = _Device(tmp_path / "engine.log", lag=lag)
    *events, trial = list(run_trial(_spec(tmp_path), read=device))

    assert isinstance(trial, TrialRecord)
    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.kind is FailureKind.CONFIG_MISMATCH  # the trial's own result
    assert device.looks_after_death > min(lag, 1)
    assert not any(is_alive(psutil.Process(pid)) for pid in (device.pid(),) if pid and psutil.pid_exists(pid))
    full = [event for event in events if isinstance(event, DeviceFull)]
    assert [event.device for event in full] == ["GPU-a"] * is_full
    for told in (f"{8 * GIB} bytes", "kneetune clean", "nvidia-smi"):
        assert all(told in event.text for event in full)


def test_a_start_that_failed_while_a_neighbour_came_condemns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that another process took meanwhile says nothing about the setting, and is no leftover of ours."""
    _launch_instead(monkeypatch, _OUT_OF_MEMORY)

    def device() -> Reading:
        by_pid = {os.getpid(): 4 * GIB} if (tmp_path / "engine.log").exists() else {}
        return (DeviceUse(device="GPU-a", total_bytes=80 * GIB, used_bytes=GIB + sum(by_pid.values()), by_pid=by_pid),)

    *events, trial = list(run_trial(_spec(tmp_path), read=device))
    assert not any(isinstance(event, DeviceFull) for event in events)
    assert isinstance(trial, TrialRecord)
    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.kind is FailureKind.INFRASTRUCTURE
    for told in ("4.00 GiB", "oom_startup", "594.00 MiB"):
        assert told in trial.outcome.detail


def test_after_lack_of_free_memory_the_trial_ends_when_it_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next try comes when it can succeed, not at once."""
    looks = 0
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def end_holder() -> None:
        holder.kill()
        holder.wait()

    def device() -> Reading:
        nonlocal looks
        looks += 1
        if looks == 5:
            end_holder()
        return ()

    _launch_instead(monkeypatch, _SHORT_OF_MEMORY % holder.pid)
    try:
        *events, trial = list(run_trial(_spec(tmp_path), read=device))
    finally:
        end_holder()

    assert any(isinstance(event, TrialNote) and "1.00 MiB" in event.text for event in events)
    assert isinstance(trial, TrialRecord)
    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.kind is FailureKind.INFRASTRUCTURE
    assert looks == 5


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(("lag", "return_s", "is_full"), [(3, 60.0, False), (float("inf"), 0.5, True)])
def test_what_a_lost_workers_trial_left_is_ended_and_its_memory_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lag: float, return_s: float, is_full: bool
) -> None:
    """The retry begins when the memory is as it was before the trial, not as the dead worker left it."""
    monkeypatch.setattr("tuner.engines.device_return.RETURN_S", return_s)
    log, mark = tmp_path / "engine.log", new_mark()
    device = _Device(log, lag=lag)
    write_reading(tmp_path, device())
    with log.open("wb") as file:
        environment = dict(os.environ) | {MARK: mark}
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD + "time.sleep(600)"], stdout=file, env=environment, start_new_session=True
        )
    write_launch(tmp_path, Launch(pid=process.pid, create_time=psutil.Process(process.pid).create_time(), mark=mark))
    while device.pid() is None and process.poll() is None:
        os.sched_yield()

    try:
        full = end_lost_launch(tmp_path, EngineSpec(), device)
        assert device.looks_after_death > min(lag, 1)
    finally:
        process.kill()
        process.wait()

    assert (full is not None) == is_full
