"""Several cores behind one server, over real HTTP; with what whoever runs the server asks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.serving import Serving, core_children, fake_command, json_lines, serving, start, wait_until_gone


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """Two cores, the second with fewer blocks."""
    with serving(fake_command("UnevenExecutor", data_parallel_size=2, cpu_omp_threads_bind="nobind")) as running:
        yield running


@pytest.fixture
async def client(server: Serving) -> AsyncIterator[aiohttp.ClientSession]:
    """A session on that server."""
    async with aiohttp.ClientSession(server.url) as session:
        yield session


async def series(session: aiohttp.ClientSession, name: str, **labels: str) -> dict[str, float]:
    """The samples of a metric with such labels, by core."""
    async with session.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return {
        sample.labels.get("engine", ""): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    }


async def complete(session: aiohttp.ClientSession, **body: object) -> tuple[int, dict[str, str], dict[str, object]]:
    """Ask for a completion: status, headers, body."""
    async with session.post("/v1/completions", json={"prompt": [5] * 4, "max_tokens": 3, **body}) as response:
        return response.status, dict(response.headers), await response.json()


async def test_both_cores_serve_and_are_counted_apart(client: aiohttp.ClientSession) -> None:
    """Every series is there for every core: a sum over one of two would be half the truth."""
    names = [
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
        *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:request_success_total"),
        *("vllm:time_to_first_token_seconds_count", "vllm:iteration_tokens_total_count", "vllm:cache_config_info"),
        *("engine:step_seconds_count", "engine:memory_bytes", "engine:context_tokens_total"),
    ]
    for name in names:
        assert set(await series(client, name)) == {"0", "1"}, name
    before = await series(client, "vllm:generation_tokens_total")
    answers = await asyncio.gather(*(complete(client) for _ in range(20)))
    assert [status for status, _, _ in answers] == [200] * 20
    after = await series(client, "vllm:generation_tokens_total")
    gained = {rank: after[rank] - before[rank] for rank in after}
    assert sum(gained.values()) == 60
    assert min(gained.values()) > 0


async def test_steps_are_timed_by_what_they_computed(client: aiohttp.ClientSession) -> None:
    """A prefill and its decodes are two different speeds."""
    before = {kind: await series(client, "engine:step_seconds_count", kind=kind) for kind in ("prefill", "decode")}
    await complete(client)
    after = {kind: await series(client, "engine:step_seconds_count", kind=kind) for kind in ("prefill", "decode")}
    assert [sum(after[kind].values()) - sum(before[kind].values()) for kind in after] == [1, 2]


async def test_what_is_in_force_can_be_read_as_json(client: aiohttp.ClientSession) -> None:
    """What was asked for, what came of it, where each core's memory goes, and with which versions."""
    async with client.get("/server_info", params={"config_format": "json"}) as response:
        info = await response.json()
    assert info["asked"]["data_parallel_size"] == 2
    assert info["in_force"]["num_gpu_blocks"] == 40
    assert [core["num_gpu_blocks"] for core in info["cores"]] == [64, 40]
    assert info["cores"][1]["memory"]["weights_bytes"] == 10_000
    assert info["cores"][1]["scheduler"]["max_num_scheduled_tokens"] == 2048
    assert info["versions"]["python"]
    async with client.get("/server_info", params={"config_format": "text"}) as response:
        assert (response.status, "config_format" in await response.text()) == (400, True)


async def test_the_smaller_cache_decides_what_is_refused() -> None:
    """640 of the 1,024 positions are cached by both cores: a longer prompt could be stuck in the second."""
    command = fake_command("UnevenExecutor", data_parallel_size=2, max_model_len=1024, cpu_omp_threads_bind="nobind")
    with serving(command) as running:
        async with aiohttp.ClientSession(running.url) as session:
            status, _, answer = await complete(session, prompt=[1] * 641)
    assert status == 400
    assert "the cache has 40" in json.dumps(answer)


async def test_a_reset_forgets_in_every_core() -> None:
    """With no request in any core, nothing that was cached before is found after; with one, the answer is no."""
    command = fake_command(
        "SlowExecutor", data_parallel_size=2, enable_prefix_caching=True, cpu_omp_threads_bind="nobind"
    )
    with serving(command) as running:
        async with aiohttp.ClientSession(running.url) as session:

            async def hits_of_two() -> list[float]:
                """Tokens found by one request in each core."""
                before = await series(session, "vllm:prefix_cache_hits_total")
                body = {"prompt": [5] * 40, "max_tokens": 30, "ignore_eos": True}
                async with session.post("/v1/completions", json={**body, "stream": True}) as first:
                    await first.content.readline()
                    await complete(session, **body)
                    await first.read()
                after = await series(session, "vllm:prefix_cache_hits_total")
                return [after[rank] - before[rank] for rank in after]

            async def reset() -> object:
                async with session.post("/reset_prefix_cache") as response:
                    assert response.status == 200
                    return await response.json()

            assert await hits_of_two() == [0, 0]
            assert await hits_of_two() == [32, 32]
            assert await reset() == {"success": True}
            assert await hits_of_two() == [0, 0]
            assert set((await series(session, "vllm:prefix_cache_queries_total")).values()) == {120}
            body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
            async with session.post("/v1/completions", json=body) as holding:
                await holding.content.readline()
                assert await reset() == {"success": False}


async def test_beyond_a_valve_clients_are_told_when_to_come_back() -> None:
    """Load balancers and client libraries retry a 503 elsewhere or later; the running request is not touched."""
    command = fake_command("SlowExecutor", max_num_queued_reqs=1, data_parallel_size=2, cpu_omp_threads_bind="nobind")
    with serving(command) as running:
        async with aiohttp.ClientSession(running.url) as session:
            body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "stream": True}
            async with session.post("/v1/completions", json=body) as admitted:
                await admitted.content.readline()
                for stream in (False, True):
                    status, headers, answer = await complete(session, stream=stream)
                    assert (status, int(headers["Retry-After"]) >= 1) == (503, True)
                    error = answer["error"]
                    assert isinstance(error, dict)
                    assert (error["type"], error["code"]) == ("server_error", "overloaded")
                    assert "max_num_queued_reqs=1" in error["message"]
                assert "[DONE]" in await admitted.text()
            assert await series(session, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == {"": 2}
            assert sum((await series(session, "vllm:time_to_first_token_seconds_count")).values()) == 1
            assert (await complete(session))[0] == 200


async def test_a_core_that_dies_ends_the_server_and_leaves_no_other() -> None:
    """The last line names the core, and its neighbour does not stay behind with the memory."""
    with serving(fake_command("FakeExecutor", data_parallel_size=2, cpu_omp_threads_bind="nobind")) as running:
        first, second = sorted(core_children(running.process.pid), key=psutil.Process.create_time)
        second.kill()
        (event,) = running.events()
        assert (event["event"], event["kind"]) == ("core_died", "crashed")
        assert str(event["message"]).startswith("core 1: ")
        assert running.process.returncode == 1
        wait_until_gone([first, second])


def test_a_stop_while_the_second_core_loads_leaves_neither() -> None:
    """The first is ready by then, and holds its memory."""
    process = start(fake_command("SecondLoadsForEver", data_parallel_size=2, cpu_omp_threads_bind="nobind"))
    while len(cores := core_children(process.pid)) < 2:
        assert process.poll() is None
    process.terminate()
    _, stderr = process.communicate(timeout=10)
    assert (json_lines(stderr), process.returncode) == ([], 0)
    wait_until_gone(cores)


def test_one_core_that_cannot_start_is_named_and_ends_the_others() -> None:
    """The reason is the core's own, and nobody waits for a neighbour that is still loading."""
    process = start(fake_command("SecondRefuses", data_parallel_size=3, cpu_omp_threads_bind="nobind"))
    _, stderr = process.communicate(timeout=30)
    (event,) = json_lines(stderr)
    assert (event["event"], event["kind"], process.returncode) == ("start_failed", "invalid_config", 1)
    assert str(event["message"]) == "core 1: made up to be refused on auto:1"
    assert "Traceback" not in stderr


async def test_each_core_computes_on_cpus_of_its_own(server: Serving) -> None:
    """A list a core, as written."""
    allowed = sorted(psutil.Process().cpu_affinity())
    bind = f"{allowed[0]}|{allowed[-1]}"
    with serving(fake_command("FakeExecutor", data_parallel_size=2, cpu_omp_threads_bind=bind)) as running:
        cores = sorted(core_children(running.process.pid), key=psutil.Process.create_time)
        assert [core.cpu_affinity() for core in cores] == [[allowed[0]], [allowed[-1]]]


async def test_a_step_is_a_line(tmp_path: Path) -> None:
    """What a model of this engine is fitted to: what was computed, and how long it took."""
    log = tmp_path / "steps.jsonl"
    with serving(fake_command("SlowExecutor", step_log=log)) as running:
        async with aiohttp.ClientSession(running.url) as session:
            assert (await complete(session))[0] == 200
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [(line["prefill_tokens"], line["decodes"], line["context_tokens"]) for line in lines] == [
        (4, 0, 4),
        (0, 1, 5),
        (0, 1, 6),
    ]
    assert all(line["execute_s"] >= 0.02 for line in lines)
    assert lines[0]["at_s"] < lines[1]["at_s"]
    assert {line["engine"] for line in lines} == {0}


async def test_a_disk_that_fills_up_ends_the_log_and_nothing_else() -> None:
    """The measurement is lost, and said to be; the service is not."""
    with serving(fake_command("FakeExecutor", step_log=Path("/dev/full"))) as running:
        async with aiohttp.ClientSession(running.url) as session:
            for _ in range(3):
                assert (await complete(session))[0] == 200
        running.process.terminate()
        _, stderr = running.process.communicate(timeout=10)
    assert stderr.count("the step log /dev/full ends here: No space left on device") == 1
    assert running.process.returncode == 0


def test_a_step_log_that_cannot_be_written_is_noticed_before_loading(tmp_path: Path) -> None:
    """An hour of load for a log that was never there is an hour lost."""
    process = start(fake_command("FakeExecutor", step_log=tmp_path / "no such folder" / "steps.jsonl"))
    _, stderr = process.communicate(timeout=30)
    (event,) = json_lines(stderr)
    assert (event["event"], event["kind"], process.returncode) == ("start_failed", "invalid_config", 1)
    assert "no such folder" in str(event["message"])
