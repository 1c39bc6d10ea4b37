"""The life of a server process: take the port, start the core, answer, and end with one decisive line."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import TypeVar

from aiohttp import web

from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.core import EXECUTORS, CoreFailed, CoreProcess, Ready, cpus_to_use
from engine.frontend import Frontend, wait_until_ready
from engine.limits import read_limits
from engine.server import Api
from engine.stats import engine_version
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


def serve(config: EngineConfig, *, host: str, port: int, executor: str | None = None) -> int:
    """Run the server until it is told to stop; returns the process's exit code.

    The port is taken at once, so that a neighbour's is noticed before anything is loaded, but it answers only when the
    core is ready. A failure leaves one JSON line on stderr, `start_failed` or `core_died`, with its kind.

    Args:
        port: 0 takes any free port; the `ready` line names it.
        executor: `module:factory` of what computes; None takes what the config names.
    """
    try:
        cpus = cpus_to_use(config.cpu_omp_threads_bind, os.sched_getaffinity(0), quota=read_limits().cpus)
    except ConfigError as error:
        return report_start_failure(CoreFailed("invalid_config", str(error)))
    _allow_many_connections()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            return report_start_failure(CoreFailed("infrastructure", f"cannot bind {host}:{port}: {error.strerror}"))
        return asyncio.run(_run(config, listener, executor or EXECUTORS[config.executor], cpus))


def _allow_many_connections() -> None:
    """Raise this process's limit of open files, each connection being one, as far as the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _run(config: EngineConfig, listener: socket.socket, executor: str, cpus: tuple[int, ...] | None) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    core = CoreProcess(config, executor=executor, cpus=cpus)
    try:
        tokenizer = _load_tokenizer(config)
        first = await _unless_stopped(stop, wait_until_ready(core))
        match first:
            case None:
                return 0
            case CoreFailed():
                return report_start_failure(first)
            case Ready(resolved):
                return await _serve_core(core, resolved, tokenizer, listener, stop)
    except ConfigError as error:
        return report_start_failure(CoreFailed("invalid_config", str(error)))
    finally:
        core.stop()


def _load_tokenizer(config: EngineConfig) -> TextTokenizer:
    """Read the tokenizer here, while the core reads the weights."""
    from engine.models.folder import model_folder

    return TextTokenizer(model_folder(config.model))


async def _serve_core(
    core: CoreProcess,
    resolved: ResolvedConfig,
    tokenizer: TextTokenizer,
    listener: socket.socket,
    stop: asyncio.Event,
) -> int:
    frontend = Frontend(core, resolved)
    runner = web.AppRunner(
        Api(frontend, tokenizer, resolved).application(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
    except OSError as error:
        await runner.cleanup()
        return report_start_failure(CoreFailed("infrastructure", f"cannot listen: {error.strerror}"))
    host, port = listener.getsockname()[:2]
    _log_start(resolved, f"{host}:{port}")
    report_event("ready", host=host, port=port, model=resolved.served_model_name)
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


def _log_start(resolved: ResolvedConfig, address: str) -> None:
    asked, memory = resolved.asked, resolved.memory
    for warning in resolved.warnings:
        logger.warning("%s", warning)
    logger.info(
        "engine %s serves %s on http://%s: max_num_seqs=%d max_num_batched_tokens=%d gpu_memory_utilization=%s "
        "max_model_len=%d chunked_prefill=%s block_size=%d num_gpu_blocks=%d dtype=%s device=%s",
        *(engine_version(), resolved.served_model_name, address, asked.max_num_seqs, asked.max_num_batched_tokens),
        *(asked.gpu_memory_utilization, resolved.max_model_len, asked.enable_chunked_prefill, asked.block_size),
        *(resolved.num_gpu_blocks, resolved.dtype, resolved.device),
    )
    logger.info(
        "memory in MiB: total %.1f, free %.1f, requested %.1f = weights %.1f + activation peak %.1f "
        "+ request buffers %.1f + non-torch %.1f + KV cache %.1f (%d blocks of %d bytes)",
        *(memory.total_bytes / _MIB, memory.free_bytes / _MIB, memory.requested_bytes / _MIB),
        memory.weights_bytes / _MIB,
        *(memory.activation_peak_bytes / _MIB, memory.request_buffers_bytes / _MIB, memory.non_torch_bytes / _MIB),
        *(memory.kv_cache_bytes / _MIB, resolved.num_gpu_blocks, resolved.kv_block_bytes),
    )
