"""The engine's core: plan, execute, commit, in a process of its own, and the handle its parent holds on it.

The parent sends `Submit` and `Abort`; the core answers `Ready` once, then one `StepReport` a step. A core that cannot
start or go on says why with `CoreFailed` and ends. It never outlives its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn, Protocol, cast

from engine.config import ConfigError, EngineConfig, OutOfDeviceMemoryError, ResolvedConfig
from engine.device_ledger import DeviceLedgerError
from engine.limits import oom_kills
from engine.memory import NoKvMemoryError, NotEnoughMemoryError
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduler import Scheduler
from engine.step import StepPlan, StepResult, TokenLogprobs

logger = logging.getLogger(__name__)

EXECUTORS = {
    "torch": "engine.executor.torch:TorchExecutor",
    "simulated": "engine.executor.simulated:SimulatedExecutor",
}
"""Where the core finds an executor, by its name in `EngineConfig`, as `module:factory`."""

_PR_SET_PDEATHSIG = 1
_JOIN_S = 2.0


class Executor(Protocol):
    """What computes a step. Built from an `EngineConfig` by a factory that may raise `ConfigError`."""

    resolved: ResolvedConfig

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan and draw a token for every request in it that samples."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Parent → core: a new request, already checked against the scheduler's refusals."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Abort:
    """Parent → core: forget a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Core → parent: the model is loaded and these values are in force."""

    resolved: ResolvedConfig


@dataclass(frozen=True, slots=True)
class CoreFailed:
    """Core → parent, or seen by the parent: the core is gone. `kind` is one of the project's failure classes."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Core → parent: what one step brought, and how the engine stands after it."""

    request_ids: tuple[str, ...]
    """Requests with a new token, in the plan's order."""

    token_ids: tuple[int, ...]
    """Their tokens, in the same order."""

    finished: dict[str, FinishReason]
    """Those of them that ended with it."""

    logprobs: dict[str, TokenLogprobs]
    """How likely the tokens were, for requests that asked."""

    admitted: tuple[str, ...]
    """Requests admitted for the first time in this step."""

    scheduled_at_s: float
    """When the step was planned, on the machine-wide `perf_counter` clock of Linux."""

    num_step_tokens: int
    """Tokens computed in the step; 0 when only an abort was handled."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    """Preemptions since the start."""


def cpus_to_use(bind: str, allowed: set[int], *, quota: float | None) -> tuple[int, ...] | None:
    """The CPUs the core may compute on; None leaves them alone.

    Args:
        bind: `auto` (all allowed, and within the quota, but the last, which the parent needs), `nobind`, `count:4` (the
            first 4 allowed), or a list such as `0-3,5`.
        allowed: the CPUs this process may use.
        quota: CPU time this process may use; None is no limit. Unit: CPUs.

    Raises:
        ConfigError: for a count or list that cannot be read, or that asks for CPUs this process may not use.
    """
    ordered = sorted(allowed)
    if bind == "nobind":
        return None
    if bind == "auto":
        within = ordered if quota is None else ordered[: max(1, math.ceil(quota))]
        return tuple(within[:-1] or within)
    try:
        if bind.startswith("count:"):
            return _first_cpus(bind, ordered)
        chosen = {cpu for part in bind.split(",") for cpu in _cpu_range(part)}
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"cpu_omp_threads_bind={bind!r} is not auto, nobind, a count such as count:4 or a list such as 0-3,5"
        ) from error
    if not chosen <= allowed:
        raise ConfigError(f"cpu_omp_threads_bind={bind!r} names CPUs outside those this process may use: {ordered}")
    return tuple(sorted(chosen))


def _first_cpus(bind: str, ordered: list[int]) -> tuple[int, ...]:
    count = int(bind.removeprefix("count:"))
    if count < 1:
        raise ValueError(f"{count} CPUs compute nothing")
    if count > len(ordered):
        raise ConfigError(
            f"cpu_omp_threads_bind={bind!r} asks for {count} CPUs, but this process may use {len(ordered)}: {ordered}"
        )
    return tuple(ordered[:count])


def _cpu_range(text: str) -> range:
    first, dash, last = text.partition("-")
    cpus = range(int(first), int(last if dash else first) + 1)
    if not cpus:
        raise ValueError(f"{text} is an empty range")
    return cpus


class CoreProcess:
    """The parent's handle on a core: start, send, receive, stop.

    Sending never blocks the caller: a thread of its own writes to the pipe, so that an event loop stays free while the
    core is busy with a step.
    """

    def __init__(self, config: EngineConfig, *, executor: str, cpus: tuple[int, ...] | None) -> None:
        """Start the core. Call it from the main thread: on Linux the core dies with the thread that started it."""
        context = multiprocessing.get_context("spawn")
        self._is_ready = False
        self._oom_kills_before = oom_kills()
        self._connection, core_end = context.Pipe(duplex=True)
        self._process = context.Process(
            target=core_main, args=(core_end, config, executor, cpus, os.getpid()), name="engine-core", daemon=True
        )
        self._process.start()
        core_end.close()
        self._outbox: queue.SimpleQueue[Submit | Abort | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="core-writer", daemon=True)
        self._writer.start()

    @property
    def pid(self) -> int:
        """The core's process id."""
        return cast("int", self._process.pid)

    def fileno(self) -> int:
        """The descriptor that becomes readable when `receive` would not wait."""
        return self._connection.fileno()

    def send(self, message: Submit | Abort) -> None:
        """Hand a message to the core, in order, without waiting."""
        self._outbox.put(message)

    def receive(self) -> Ready | CoreFailed | StepReport:
        """The core's next message; waits for it. A core that is gone reads as `CoreFailed`."""
        try:
            message = cast("Ready | CoreFailed | StepReport", self._connection.recv())
        except (EOFError, OSError):
            self._process.join(_JOIN_S)
            return silent_end(
                self._process.exitcode,
                is_ready=self._is_ready,
                oom_kills_before=self._oom_kills_before,
                oom_kills_after=oom_kills(),
            )
        self._is_ready = self._is_ready or isinstance(message, Ready)
        return message

    def stop(self) -> None:
        """End the core now and wait until it is gone. It holds nothing that outlives it."""
        self._outbox.put(None)
        self._process.kill()
        self._process.join()
        self._writer.join()
        self._connection.close()

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            with contextlib.suppress(OSError):  # a dead core is noticed by `receive`
                self._connection.send(message)


def silent_end(
    exit_code: int | None, *, is_ready: bool, oom_kills_before: int | None, oom_kills_after: int | None
) -> CoreFailed:
    """What is known of a core that ended without a word.

    Lack of memory is a fact only where the kernel has counted a kill for it in this process's control group since the
    core was started; a SIGKILL alone may have come from anyone.

    Args:
        exit_code: as `multiprocessing` has it, -N for signal N; None if the core closed its pipe and still runs.
    """
    if exit_code is None or exit_code >= 0:
        return CoreFailed("crashed", f"the core process ended without a word, exit code {exit_code}")
    ended = f"the core process was killed by signal {-exit_code}"
    if exit_code != -signal.SIGKILL:
        return CoreFailed("crashed", ended)
    if oom_kills_before is not None and oom_kills_after is not None and oom_kills_after > oom_kills_before:
        return CoreFailed("oom_runtime" if is_ready else "oom_startup", f"{ended} for lack of memory")
    return CoreFailed("crashed", f"{ended}, probably for memory")


def core_main(
    connection: Connection, config: EngineConfig, executor: str, cpus: tuple[int, ...] | None, parent_pid: int
) -> None:
    """The core process: load, then serve until the parent is gone."""
    _die_with_parent(parent_pid)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    _bind_cpus(cpus)
    try:
        engine = _load(executor, config)
    except (ConfigError, DeviceLedgerError) as error:
        _fail(connection, CoreFailed(_start_error_kind(error), str(error)))
    except Exception as error:
        logger.exception("the core cannot start")
        kind = _failure_kind(error, out_of_memory="oom_startup")
        _fail(connection, CoreFailed(kind, f"{type(error).__name__}: {error}"))
    connection.send(Ready(engine.resolved))
    try:
        Core(engine, connection).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        logger.info("the parent is gone, so the core ends")
    except Exception as error:
        logger.exception("the core cannot go on")
        kind = _failure_kind(error, out_of_memory="oom_runtime")
        _fail(connection, CoreFailed(kind, f"{type(error).__name__}: {error}"))


class Core:
    """The loop: take in messages, plan, execute, commit, report."""

    def __init__(self, executor: Executor, connection: Connection) -> None:
        self._executor = executor
        self._connection = connection
        self._scheduler = Scheduler(executor.resolved)

    def run(self) -> None:
        """Go on until the parent closes the pipe.

        Raises:
            EOFError: when it does.
        """
        while True:
            self._take_messages()
            self._connection.send(self._step())

    def _take_messages(self) -> None:
        """Take in what has come; with nothing to do, wait for a first message without spinning."""
        idle = not (self._scheduler.num_running or self._scheduler.num_waiting)
        while idle or self._connection.poll():
            idle = False
            match self._connection.recv():
                case Submit() as new:
                    self._scheduler.add(
                        Request(request_id=new.request_id, prompt_token_ids=new.prompt_token_ids, sampling=new.sampling)
                    )
                case Abort(request_id):
                    self._scheduler.abort(request_id)

    def _step(self) -> StepReport:
        scheduler = self._scheduler
        scheduled_at_s = time.perf_counter()
        plan = scheduler.schedule()
        if plan.scheduled:
            outputs = scheduler.commit(self._executor.execute(plan))
        elif scheduler.num_waiting:
            raise RuntimeError(f"{scheduler.num_waiting} requests wait and none can be scheduled: a scheduler fault")
        else:
            outputs = []
        return StepReport(
            request_ids=tuple(output.request_id for output in outputs),
            token_ids=tuple(output.token_id for output in outputs),
            finished={output.request_id: output.finish_reason for output in outputs if output.finish_reason},
            logprobs={output.request_id: output.logprobs for output in outputs if output.logprobs},
            admitted=plan.admitted,
            scheduled_at_s=scheduled_at_s,
            num_step_tokens=plan.num_scheduled_tokens,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.kv_cache_usage,
            num_preemptions=scheduler.num_preemptions,
        )


def _die_with_parent(parent_pid: int) -> None:
    """Leave stopping to the parent, and do not survive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            sys.exit(1)  # it died before the call


def _bind_cpus(cpus: tuple[int, ...] | None) -> None:
    """Pin this process and size OpenMP's pool to match; before torch is imported, which reads both."""
    if cpus is None:
        return
    os.sched_setaffinity(0, cpus)
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))


def _load(path: str, config: EngineConfig) -> Executor:
    module, _, name = path.partition(":")
    factory = cast("Callable[[EngineConfig], Executor]", getattr(importlib.import_module(module), name))
    return factory(config)


def _fail(connection: Connection, failure: CoreFailed) -> NoReturn:
    connection.send(failure)
    sys.exit(1)


def _start_error_kind(error: ConfigError | DeviceLedgerError) -> str:
    if isinstance(error, DeviceLedgerError):
        return "infrastructure"
    if isinstance(error, NoKvMemoryError):
        return "no_kv_memory"
    return "oom_startup" if isinstance(error, NotEnoughMemoryError) else "invalid_config"


def _failure_kind(error: Exception, *, out_of_memory: str) -> str:
    """The failure class of an error: its own, or `out_of_memory` for lack of it in a phase that is not known closer."""
    if isinstance(error, OutOfDeviceMemoryError):
        return error.kind
    return out_of_memory if _is_out_of_memory(error) else "crashed"


def _is_out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator has no class of its own for it.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
