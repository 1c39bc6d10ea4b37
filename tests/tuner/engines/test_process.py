"""An engine that was started is watched, and nothing of it is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.fakes.processes import HIDES, gone, written_pid
from tuner.engines.family import living, read_launch
from tuner.engines.process import (
    EngineStartError,
    RunningEngine,
    free_port,
    launched,
    recorded_environment,
    wait_until_ready,
)

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

STUBBORN = (
    """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
    start_new_session=True,
)
print(child.pid, flush=True)
"""
    + HEALTHY
)


@contextmanager
def _launch(
    script: str, directory: Path, *, timeout_s: float = 20.0, exit_grace_s: float = 10.0
) -> Iterator[RunningEngine]:
    port = free_port()
    command = [sys.executable, "-c", script, str(port)]
    with launched(
        command, port=port, environment=dict(os.environ), directory=directory, exit_grace_s=exit_grace_s
    ) as engine:
        list(wait_until_ready(engine, timeout_s=timeout_s))
        yield engine


def _gone(pid: int, *, within_s: float = 15.0) -> bool:
    deadline = time.perf_counter() + within_s
    while time.perf_counter() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_a_healthy_engine_runs_inside_the_block_and_is_gone_after_it(tmp_path: Path) -> None:
    """A trial owns its engine exactly as long as it measures."""
    with _launch(HEALTHY, tmp_path) as engine:
        assert engine.is_alive()
    assert not engine.is_alive()
    assert {"engine.log", "command.json", "env.json", "process.json"} <= {file.name for file in tmp_path.iterdir()}


def test_a_child_that_ignores_sigterm_in_a_session_of_its_own_is_gone_too(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """No worker of an engine keeps a device after its trial, however it hides."""
    monkeypatch.setattr("tuner.engines.family.ORPHAN_GRACE_S", 0.5)
    with _launch(STUBBORN, tmp_path, exit_grace_s=0.5) as engine:
        child = int((tmp_path / "engine.log").read_text().split()[0])
        assert psutil.pid_exists(child)
    assert not engine.is_alive()
    assert _gone(child)


def test_a_foreign_process_of_the_same_kind_is_left_alone(tmp_path: Path) -> None:
    """Only what we started is stopped; a neighbour's server of the same name runs on."""
    port = free_port()
    foreign = subprocess.Popen([sys.executable, "-c", HEALTHY, str(port)])
    try:
        with _launch(HEALTHY, tmp_path):
            pass
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_an_engine_that_dies_is_noticed_at_once_with_its_exit_code(tmp_path: Path) -> None:
    """A crash at start costs the time of the crash, not the whole timeout."""
    with pytest.raises(EngineStartError) as caught, _launch("import sys; sys.exit(7)", tmp_path, timeout_s=600.0):
        pass
    assert caught.value.exit_code == 7
    assert not caught.value.timed_out


def test_what_a_starting_engine_writes_is_heard_while_it_starts(tmp_path: Path) -> None:
    """A start of minutes shows how far it has come."""
    port = free_port()
    script = "print('loads the model', flush=True)" + HEALTHY
    command = [sys.executable, "-c", script, str(port)]
    with launched(command, port=port, environment=dict(os.environ), directory=tmp_path) as engine:
        starting = wait_until_ready(engine, timeout_s=20.0)
        assert next(starting) == "loads the model\n"
        assert list(starting) == []


def test_an_engine_that_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    """A hanging start ends at the timeout and leaves nothing."""
    with pytest.raises(EngineStartError) as caught, _launch("import time; time.sleep(600)", tmp_path, timeout_s=1.0):
        pass
    assert caught.value.timed_out
    assert _gone(json.loads((tmp_path / "process.json").read_text())["pid"])


ORPHANING = (
    """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
"""
    + HEALTHY
)


def test_a_child_outlives_neither_its_dead_parent_nor_the_trial(tmp_path: Path) -> None:
    """An engine whose first process died before the trial ended still keeps no device."""
    with _launch(ORPHANING, tmp_path) as engine:
        child = int((tmp_path / "engine.log").read_text().split()[0])
        os.kill(engine.launch.pid, signal.SIGKILL)
        assert _gone(engine.launch.pid)
        assert psutil.pid_exists(child)
    assert _gone(child)


LAUNCHER = """
import os, sys, time
from pathlib import Path
from tuner.engines.process import free_port, launched
command = [sys.executable, "-c", *sys.argv[2:]]
with launched(command, port=free_port(), environment=dict(os.environ), directory=Path(sys.argv[1]), exit_grace_s=0.5):
    time.sleep(600)
"""


@pytest.mark.parametrize("ignored", [(), (signal.SIGTERM,)])
def test_nothing_of_a_starting_engine_outlives_the_worker_that_launched_it(
    tmp_path: Path, ignored: tuple[signal.Signals, ...]
) -> None:
    """Kill -9 of the worker leaves no process on the device, however it hides and whatever it ignores."""
    deaf = "".join(f"signal.signal({number:d}, signal.SIG_IGN); " for number in ignored)
    engine = f"{HIDES}\n{deaf}time.sleep(600)"
    arguments = [str(tmp_path), engine, str(tmp_path / "hidden"), *map(str, map(int, ignored))]
    worker = subprocess.Popen([sys.executable, "-c", LAUNCHER, *arguments])
    hidden = written_pid(tmp_path / "hidden")
    launch = read_launch(tmp_path)
    assert launch is not None
    family = living(launch)
    assert hidden in family
    worker.kill()
    worker.wait()
    assert gone(*family)


def test_secrets_are_not_recorded() -> None:
    """A run directory can be shown to anyone."""
    kept = recorded_environment(
        {
            "HF_TOKEN": "hf_x",
            "VLLM_API_KEY": "k",
            "HF_ENDPOINT": "https://user:pass@hub.example/x",
            "OMP_NUM_THREADS": "2",
            "HOME": "/root",
            "AWS_SECRET_ACCESS_KEY": "z",
        }
    )
    assert kept == {
        "HF_ENDPOINT": "https://<redacted>@hub.example/x",
        "HF_TOKEN": "<redacted>",
        "OMP_NUM_THREADS": "2",
        "VLLM_API_KEY": "<redacted>",
    }
