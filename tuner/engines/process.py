"""An engine's process: started, waited for, stopped, all in one context manager."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import psutil

from tuner.engines import supervisor
from tuner.engines.family import MARK, TERM_GRACE_S, Launch, end, is_alive, leader, living, new_mark, write_launch
from tuner.redaction import redacted

EXIT_S = 2 * supervisor.ORPHAN_GRACE_S
"""Between an engine's death and its exit code, at the most: what it has left is ended first. Unit: seconds."""

POLL_S = 0.05
"""Between two looks at a starting engine. Unit: seconds."""

_LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""What is on this machine is never asked for through a proxy, whatever the environment says."""

_RECORDED = re.compile(
    r"(CUDA|NVIDIA|NCCL|VLLM|HF|HUGGINGFACE|TRANSFORMERS|TORCH|PYTORCH|TRITON|OMP|MKL|OPENBLAS|KMP|GOMP|LD)_|PYTHON"
)


class EngineStartError(RuntimeError):
    """The engine did not come up; `timed_out` says whether it was still alive when the wait ended."""

    def __init__(self, message: str, *, exit_code: int | None, timed_out: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """A process we started, on its way up or up."""

    launch: Launch
    pid: int
    """Its own first process, a child of the launch's, which keeps it and is no part of its figures."""

    base_url: str
    log_path: Path
    process: subprocess.Popen[bytes]
    begun_s: float
    members: list[psutil.Process] = field(default_factory=list)
    """Every process of it, as seen when it was ready: a first process that died since cannot name its children."""

    def is_alive(self) -> bool:
        """Whether its first process still runs. What keeps it lives longer: it ends what the engine has left."""
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.pid)
            return leader(self.launch) is not None and first.ppid() == self.launch.pid and is_alive(first)
        return False

    def exit_code(self) -> int | None:
        """Its exit code once it has ended (minus the signal that killed it); None where it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(EXIT_S)
        return None


def how_it_ended(exit_code: int | None) -> str:
    """An exit code in words."""
    if exit_code is None:
        return "the engine ended"
    if exit_code == -signal.SIGKILL:
        return "the engine was killed by signal 9, probably for memory,"
    if exit_code < 0:
        return f"the engine was killed by signal {-exit_code}"
    return f"the engine ended with exit code {exit_code}"


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago; the identity check catches the race."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def read_url(url: str, *, timeout_s: float) -> bytes:
    """The body of a 200 answer.

    Raises:
        OSError: for anything else: refused, cut, not in time, another status, not HTTP.
    """
    try:
        with _LOOPBACK.open(url, timeout=timeout_s) as answer:
            body: bytes = answer.read()
            return body
    except http.client.HTTPException as error:
        raise OSError(f"{url}: not an HTTP answer: {error!r}") from error


def recorded_environment(environment: dict[str, str]) -> dict[str, str]:
    """The variables worth keeping beside a trial, with anything that looks like a secret blanked."""
    return {name: redacted(name, value) for name, value in sorted(environment.items()) if _RECORDED.match(name)}


@contextlib.contextmanager
def launched(
    command: list[str], *, port: int, environment: dict[str, str], directory: Path, exit_grace_s: float = TERM_GRACE_S
) -> Iterator[RunningEngine]:
    """Start `command`, and see to it that nothing is left of it afterwards.

    Its output goes to `directory/engine.log`; its command, environment and identity are recorded beside it.

    Args:
        exit_grace_s: what it gets to end by itself.
    """
    log_path = directory / "engine.log"
    if log_path.exists():
        # A trial that goes on after its run was cut off: why this launch ends stands in this launch's own log.
        log_path.replace(directory / "engine.earlier.log")
    (directory / "command.json").write_text(json.dumps(command, indent=1), encoding="utf-8")
    (directory / "env.json").write_text(json.dumps(recorded_environment(environment), indent=1), encoding="utf-8")
    begun_s, mark = time.perf_counter(), new_mark()
    keeper = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), str(exit_grace_s), "--"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*keeper, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment | {MARK: mark},
            start_new_session=True,
        )
    launch = Launch(pid=process.pid, create_time=psutil.Process(process.pid).create_time(), mark=mark)
    members: list[psutil.Process] = []
    try:
        write_launch(directory, launch)
        yield RunningEngine(
            launch=launch,
            pid=_told_pid(process),
            base_url=f"http://127.0.0.1:{port}",
            log_path=log_path,
            process=process,
            begun_s=begun_s,
            members=members,
        )
    finally:
        end(launch, members, grace_s=exit_grace_s)
        process.wait()


def _told_pid(process: subprocess.Popen[bytes]) -> int:
    """The engine's pid, as what keeps it says once it has started it."""
    with cast("IO[bytes]", process.stdout) as told:
        pid = told.read()
    if not pid:
        exit_code = process.wait()
        raise EngineStartError(f"the engine was not started, exit code {exit_code}", exit_code=exit_code)
    return int(pid)


def wait_until_ready(
    engine: RunningEngine, health: str = "/health", *, timeout_s: float
) -> Generator[str, None, float]:
    """Wait until the engine's page `health` answers 200; yields what it writes meanwhile, line by line.

    Returns:
        How long it took from the launch. Unit: seconds.

    Raises:
        EngineStartError: if it dies first, or is not healthy `timeout_s` after its launch.
    """
    with engine.log_path.open(encoding="utf-8", errors="replace") as log:
        while time.perf_counter() < engine.begun_s + timeout_s:
            exit_code = engine.process.poll()
            yield from log
            if exit_code is not None:
                raise EngineStartError(
                    f"the engine ended with exit code {exit_code} before it was ready", exit_code=exit_code
                )
            with contextlib.suppress(OSError):
                read_url(f"{engine.base_url}{health}", timeout_s=1.0)
                start_s = time.perf_counter() - engine.begun_s
                engine.members.extend(living(engine.launch))
                return start_s
            time.sleep(POLL_S)
    raise EngineStartError(f"the engine was not ready after {timeout_s:g} s", exit_code=None, timed_out=True)
