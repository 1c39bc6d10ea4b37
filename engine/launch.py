"""The life of a server process: take the port, start the cores, answer, and end with one decisive line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from engine.admin import Admin
from engine.config import ConfigError, EngineConfig, ResolvedConfig, device_of_rank
from engine.core import EXECUTORS, CoreFailed, Ready
from engine.core_process import CoreProcess
from engine.cpus import RankCpus, cpus_of_ranks
from engine.frontend import Frontend, RunningCore
from engine.limits import read_limits
from engine.server import Api
from engine.stats import engine_version
from engine.step_log import StepLog
from engine.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 0.3
_BACKLOG = 4096
"""Connections that may wait to be accepted: all of a burst's, within what the system allows (`somaxconn`)."""

_MIB = 2**20
_Result = TypeVar("_Result")


def report_event(event: str, **fields: object) -> None:
    """Write one JSON line that a program can wait for."""
    sys.stderr.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stderr.flush()


def report_start_failure(failure: CoreFailed) -> int:
    """Say why the server did not start; returns the exit code."""
    report_event("start_failed", kind=failure.kind, message=failure.message)
    return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What a server is started with."""

    config: EngineConfig
    executor: str
    cpus: RankCpus
    step_log: StepLog | None


def serve(
    config: EngineConfig, *, host: str, port: int, executor: str | None = None, step_log: Path | None = None
) -> int:
    """Run the server until it is told to stop; returns the process's exit code.

    The port is taken at once, so that a neighbour's is noticed before anything is loaded, but it answers only when all
    cores are ready. A failure leaves one JSON line on stderr, `start_failed` or `core_died`, with its kind.

    Args:
        port: 0 takes any free port; the `ready` line names it.
        executor: `module:factory` of what computes; None takes what the config names.
        step_log: a file to append a line a step to.
    """
    try:
        cpus = cpus_of_ranks(
            config.cpu_omp_threads_bind,
            os.sched_getaffinity(0),
            quota=read_limits().cpus,
            num_ranks=config.data_parallel_size,
        )
    except ConfigError as error:
        return report_start_failure(CoreFailed("invalid_config", str(error)))
    _allow_many_connections()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            return report_start_failure(CoreFailed("infrastructure", f"cannot bind {host}:{port}: {error.strerror}"))
        log = None
        if step_log is not None:
            try:
                opened = StepLog(step_log, simulated=config.executor == "simulated")
            except OSError as error:
                message = f"the step log {step_log} cannot be written: {error.strerror}"
                return report_start_failure(CoreFailed("invalid_config", message))
            log = stack.enter_context(contextlib.closing(opened))
        factory = executor or EXECUTORS[config.executor]
        return asyncio.run(_run(_Plan(config=config, executor=factory, cpus=cpus, step_log=log), listener))


def _allow_many_connections() -> None:
    """Raise this process's limit of open files, each connection being one, as far as the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _NotStartedError(Exception):
    """A core that did not become ready."""

    def __init__(self, failure: CoreFailed) -> None:
        super().__init__(failure.message)
        self.failure = failure


async def _run(plan: _Plan, listener: socket.socket) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with contextlib.ExitStack() as started:
        try:
            first = _start_core(plan, 0, started)
            tokenizer = _load_tokenizer(plan.config)
            cores = await _unless_stopped(stop, _all_ready(plan, first, started))
        except _NotStartedError as error:
            return report_start_failure(error.failure)
        except ConfigError as error:
            return report_start_failure(CoreFailed("invalid_config", str(error)))
        return 0 if cores is None else await _serve_cores(cores, plan, tokenizer, listener, stop)


def _start_core(plan: _Plan, rank: int, started: contextlib.ExitStack) -> CoreProcess:
    """Start a core; leaving `started` ends it. The one place that says what differs between ranks."""
    config = replace(plan.config, device=device_of_rank(plan.config.device, rank))
    core = CoreProcess(config, executor=plan.executor, cpus=plan.cpus[rank])
    started.callback(core.stop)
    return core


async def _all_ready(plan: _Plan, first: CoreProcess, started: contextlib.ExitStack) -> list[RunningCore]:
    """Wait for the first core, then start the others.

    On a GPU one after the other: each measures its memory by what is free on the device, which a neighbour that is
    loading would disturb. On CPU, where a core counts its own bytes, together.

    Raises:
        _NotStartedError: for the first core that fails.
    """

    async def start(rank: int) -> RunningCore:
        return await _ready(_start_core(plan, rank, started), f"core {rank}: ")

    others = range(1, plan.config.data_parallel_size)
    cores = [await _ready(first, "core 0: " if others else "")]
    if cores[0].resolved.device.startswith("cuda"):
        return cores + [await start(rank) for rank in others]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(start(rank)) for rank in others]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return cores + [task.result() for task in tasks]


async def _ready(core: CoreProcess, name: str) -> RunningCore:
    """Wait for a starting core's first word, without blocking the event loop; `name` opens a failure's message."""
    loop = asyncio.get_running_loop()
    while not (messages := core.receive()):
        readable = loop.create_future()
        loop.add_reader(core.fileno(), _set_once, readable)
        try:
            await readable
        finally:
            loop.remove_reader(core.fileno())
    match messages[0]:
        case Ready(resolved):
            return RunningCore(core, resolved)
        case CoreFailed(kind, message):
            raise _NotStartedError(CoreFailed(kind, name + message))
        case other:
            message = f"{name}said {type(other).__name__} before it was ready"
            raise _NotStartedError(CoreFailed("crashed", message))


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _load_tokenizer(config: EngineConfig) -> TextTokenizer:
    """Read the tokenizer here, while the core reads the weights."""
    from engine.models.folder import model_folder

    return TextTokenizer(model_folder(config.model))


async def _serve_cores(
    cores: list[RunningCore], plan: _Plan, tokenizer: TextTokenizer, listener: socket.socket, stop: asyncio.Event
) -> int:
    frontend = Frontend(cores, step_log=plan.step_log)
    application = Api(frontend, tokenizer, frontend.resolved).application()
    Admin(frontend).add_routes(application)
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
    except OSError as error:
        await runner.cleanup()
        return report_start_failure(CoreFailed("infrastructure", f"cannot listen: {error.strerror}"))
    host, port = listener.getsockname()[:2]
    _log_start(frontend, f"{host}:{port}")
    report_event("ready", host=host, port=port, model=frontend.resolved.served_model_name)
    failure = await _unless_stopped(stop, _result_of(frontend.failed))
    frontend.close("the server is shutting down")
    await runner.cleanup()
    if failure is None:
        return 0
    report_event("core_died", kind=failure.kind, message=failure.message)
    return 1


async def _result_of(future: asyncio.Future[_Result]) -> _Result:
    return await future


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[None, None, _Result]) -> _Result | None:
    """What the work brings; None if the stop comes first."""
    task, stopper = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopper}, return_when=asyncio.FIRST_COMPLETED)
    is_stopped = stop.is_set()
    task.cancel()
    stopper.cancel()
    await asyncio.gather(task, stopper, return_exceptions=True)
    return None if is_stopped else task.result()


def _log_start(frontend: Frontend, address: str) -> None:
    resolved = frontend.resolved
    asked = resolved.asked
    for warning in resolved.warnings:
        logger.warning("%s", warning)
    logger.info(
        "engine %s serves %s on http://%s: max_num_seqs=%d max_num_batched_tokens=%d gpu_memory_utilization=%s "
        "max_model_len=%d chunked_prefill=%s block_size=%d num_gpu_blocks=%d dtype=%s device=%s cores=%d",
        *(engine_version(), resolved.served_model_name, address, asked.max_num_seqs, asked.max_num_batched_tokens),
        *(asked.gpu_memory_utilization, resolved.max_model_len, asked.enable_chunked_prefill, asked.block_size),
        *(resolved.num_gpu_blocks, resolved.dtype, resolved.device, asked.data_parallel_size),
    )
    for rank, core in enumerate(frontend.core_configs):
        _log_memory(rank, core)


def _log_memory(rank: int, resolved: ResolvedConfig) -> None:
    memory = resolved.memory
    logger.info(
        "core %d, memory in MiB: total %.1f, free %.1f, requested %.1f = weights %.1f + activation peak %.1f "
        "+ request buffers %.1f + non-torch %.1f + graphs %.1f + KV cache %.1f (%d blocks of %d bytes)",
        *(rank, memory.total_bytes / _MIB, memory.free_bytes / _MIB, memory.requested_bytes / _MIB),
        memory.weights_bytes / _MIB,
        *(memory.activation_peak_bytes / _MIB, memory.request_buffers_bytes / _MIB, memory.non_torch_bytes / _MIB),
        memory.graph_bytes / _MIB,
        *(memory.kv_cache_bytes / _MIB, resolved.num_gpu_blocks, resolved.kv_block_bytes),
    )
