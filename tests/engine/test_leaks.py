"""Clients that leave at any moment: nothing of theirs stays, in the cores or in the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter

import aiohttp
import numpy as np
import psutil
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families

from engine.config import EngineConfig
from engine.core import Ready
from engine.frontend import Frontend, RunningCore
from engine.models.folder import model_folder
from engine.server import Api
from engine.tokenizer import TextTokenizer
from tests.fakes.cores import Talk
from tests.fakes.serving import core_children, fake_command, serving

_CONCURRENCY = 48
_PATIENCE_S = 20
_TIMEOUT = aiohttp.ClientTimeout(total=_PATIENCE_S)


async def storm(url: str, num_requests: int, *, seed: int) -> list[int]:
    """Short requests, a third of which their client drops: unanswered, before a first token, or in mid-stream.

    Returns how many ended in each way: served, dropped.
    """
    rng = np.random.default_rng(seed)
    room = asyncio.Semaphore(_CONCURRENCY)
    connector = aiohttp.TCPConnector(limit=0)

    async def ask(session: aiohttp.ClientSession, leaves_after: int | None, length: int, *, is_stream: bool) -> int:
        body = {"prompt": [5] * length, "max_tokens": 8, "ignore_eos": True, "stream": is_stream}
        async with room, session.post("/v1/completions", json=body) as response:
            assert response.status == 200
            if leaves_after is None:
                assert ("[DONE]" in await response.text()) == is_stream
                return 0
            for _ in range(leaves_after):
                await response.content.readuntil(b"\n\n")
            response.close()
            return 1

    async def ask_and_leave(session: aiohttp.ClientSession, wait_s: float) -> int:
        asking = asyncio.create_task(ask(session, None, 40, is_stream=False))
        await asyncio.sleep(wait_s)
        asking.cancel()
        (result,) = await asyncio.gather(asking, return_exceptions=True)
        return 1 if isinstance(result, asyncio.CancelledError) else 0

    async with aiohttp.ClientSession(url, connector=connector, timeout=_TIMEOUT) as session:
        work = []
        for _ in range(num_requests):
            length = int(rng.integers(1, 40))
            match rng.integers(6):
                case 0:
                    work.append(ask_and_leave(session, float(rng.uniform(0, 2))))
                case 1:
                    work.append(ask(session, int(rng.integers(0, 6)), length, is_stream=True))
                case _:
                    work.append(ask(session, None, length, is_stream=bool(rng.integers(2))))
        ends = await asyncio.gather(*work)
    return [ends.count(0), ends.count(1)]


async def gauges(url: str) -> dict[str, float]:
    """What the cores hold, by metric."""
    async with aiohttp.ClientSession(url) as session, session.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    found = dict.fromkeys(names, 0.0)
    for family in families:
        for sample in family.samples:
            if sample.name in names:
                found[sample.name] += sample.value
    return found


async def until_equal(look: Callable[[], object], wanted: object) -> None:
    """Wait until something is as it should be; fail with what it is."""
    deadline_s = perf_counter() + _PATIENCE_S
    while (seen := look()) != wanted and perf_counter() < deadline_s:  # noqa: ASYNC110 - it happens in another process
        await asyncio.sleep(0.01)
    assert seen == wanted


async def test_a_thousand_requests_of_which_a_third_are_dropped_leave_nothing() -> None:
    """A server that runs for weeks meets every departure there is; a block, a socket or a file each would end it."""
    command = fake_command("QuickExecutor", data_parallel_size=2, max_num_seqs=8, cpu_omp_threads_bind="nobind")
    with serving(command) as running:
        process = psutil.Process(running.process.pid)
        await storm(running.url, 20, seed=0)  # what is made at first use stays
        await until_equal(lambda: open_connections(process), [])
        before = footprint(running.process.pid)

        served, dropped = await storm(running.url, 1000, seed=1)

        assert served + dropped == 1000
        assert dropped > 200
        for _ in range(100):
            held = await gauges(running.url)
            if not any(held.values()):
                break
            await asyncio.sleep(0.05)
        assert held == dict.fromkeys(held, 0.0)
        await until_equal(lambda: open_connections(process), [])
        await until_equal(lambda: footprint(running.process.pid), before)
        running.process.terminate()
        _, log = running.process.communicate(timeout=_PATIENCE_S)
    assert "Traceback" not in log


def open_connections(process: psutil.Process) -> list[object]:
    """Sockets to clients, in any state but that of the one that listens."""
    return [found for found in process.net_connections("inet") if found.status != psutil.CONN_LISTEN]


def footprint(pid: int) -> list[tuple[int, int]]:
    """Open files and threads of the server and of its cores."""
    family = [psutil.Process(pid), *core_children(pid)]
    return [(process.num_fds(), process.num_threads()) for process in family]


async def test_no_task_outlives_its_client() -> None:
    """A task for each client that left would hold its prompt, its text and its connection."""
    config = EngineConfig(model="embedded", max_num_seqs=8)
    talk = Talk(config, executor="tests.fakes.executor:QuickExecutor")
    try:
        first = talk.hear()
        assert isinstance(first, Ready)
        frontend = Frontend([RunningCore(talk.core, first.resolved)])
        api = Api(frontend, TextTokenizer(model_folder("embedded")), frontend.resolved)
        server = TestServer(api.application())
        await server.start_server()
        before = asyncio.all_tasks()
        try:
            _, dropped = await storm(str(server.make_url("/")), 200, seed=2)
            assert dropped > 20
            await until_equal(lambda: asyncio.all_tasks() - before, set())
            assert frontend._generations == {}
            assert (frontend._valves.num_requests, frontend._valves.num_prefill_tokens) == (0, 0)
        finally:
            await server.close()
            frontend.close("the test is over")
    finally:
        talk.core.stop()
