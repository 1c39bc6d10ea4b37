"""A real engine server in a process of its own, on a free port; with a made-up executor or the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

import psutil

ROOT = Path(__file__).parents[2]
_FAKE = """
import json, pathlib, sys
from engine.config import EngineConfig
from engine.launch import serve
asked, executor, *step_log = sys.argv[1:]
log = pathlib.Path(step_log[0]) if step_log else None
sys.exit(serve(EngineConfig(**json.loads(asked)), host="127.0.0.1", port=0, executor=executor, step_log=log))
"""
_STOP_S = 10


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    def core(self) -> psutil.Process:
        """The core's process, a child of the server."""
        (core,) = core_children(self.process.pid)
        return core

    def events(self) -> list[dict[str, object]]:
        """The JSON lines still to be read from a server that ends; waits for its end."""
        _, stderr = self.process.communicate(timeout=_STOP_S)
        return json_lines(stderr)


def core_children(pid: int) -> list[psutil.Process]:
    """The cores that a server process has started and not yet lost."""
    return [child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    """Wait until all have ended; one that has not after a while is killed, and the test fails.

    A zombie that its new parent has not collected yet has ended.
    """
    deadline_s = perf_counter() + _STOP_S
    while (alive := [process for process in processes if _is_alive(process)]) and perf_counter() < deadline_s:
        sleep(0.01)
    for process in alive:
        process.kill()
    assert not alive, f"still alive: {alive}"


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def json_lines(text: str) -> list[dict[str, object]]:
    """The lines that a program would read."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def fake_command(executor: str, *, step_log: Path | None = None, **config: object) -> list[str]:
    """The command that serves `config` with an executor of `tests.fakes.executor`."""
    asked = json.dumps({"model": "embedded", **config})
    log = [] if step_log is None else [str(step_log)]
    return [sys.executable, "-c", _FAKE, asked, f"tests.fakes.executor:{executor}", *log]


def start(command: list[str]) -> subprocess.Popen[str]:
    """Start a server whose stderr can be read."""
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@contextmanager
def serving(command: list[str]) -> Iterator[Serving]:
    """Start a server, wait until it is ready, and leave none behind."""
    process = start(command)
    assert process.stderr is not None
    try:
        seen: list[str] = []
        for line in process.stderr:
            seen.append(line)
            if line.startswith('{"event": "ready"'):
                ready = json.loads(line)
                yield Serving(f"http://{ready['host']}:{ready['port']}", process)
                return
        raise AssertionError("the server did not become ready:\n" + "".join(seen))
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
