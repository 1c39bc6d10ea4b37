"""The frontend without HTTP and without processes: who gets what, who is refused, what is counted."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import EngineConfig
from engine.core import (
    Abort,
    Core,
    CoreFailed,
    FromCore,
    PrefixCacheReset,
    Ready,
    Refused,
    ResetPrefixCache,
    Submit,
    ToCore,
)
from engine.core_process import CoreProcess
from engine.frontend import EngineGoneError, Frontend, NewRequest, OverloadedError, RunningCore, in_force
from engine.request import SamplingParams
from engine.scheduler import RequestRefusedError
from tests.fakes.executor import FakeExecutor, fake_resolved


class FakeProcess:
    """A core in this process, which steps when the test says so."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = Core(FakeExecutor(config))
        self.heard: list[ToCore] = []
        self._news: deque[FromCore] = deque()
        self._bell, self._ear = socket.socketpair()

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._ear.fileno()

    has_backlog = False

    def send(self, message: ToCore) -> None:
        """Take in a message; a reset is answered when the test says so."""
        self.heard.append(message)
        if not isinstance(message, ResetPrefixCache):
            self.core.take(message)

    def say(self, message: FromCore) -> None:
        """Say something to the frontend."""
        self._news.append(message)
        self._bell.send(b"!")

    def step(self) -> None:
        """One step, and its report."""
        self.say(self.core.step())

    def receive(self) -> list[FromCore]:
        """All the news."""
        self._ear.recv(len(self._news))
        said = list(self._news)
        self._news.clear()
        return said

    def close(self) -> None:
        """Close the sockets."""
        self._bell.close()
        self._ear.close()


Make = Callable[..., tuple[Frontend, list[FakeProcess]]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a frontend with so many cores and such a config."""
    made: list[FakeProcess] = []

    def build(num_cores: int = 1, **config: int) -> tuple[Frontend, list[FakeProcess]]:
        config = {"enable_prefix_caching": False, **config}
        asked = EngineConfig(model="m", data_parallel_size=num_cores, **config)  # type: ignore[arg-type]
        processes = [FakeProcess(asked) for _ in range(num_cores)]
        made.extend(processes)
        running = [RunningCore(cast("CoreProcess", each), fake_resolved(asked)) for each in processes]
        return Frontend(running), processes

    yield build
    for process in made:
        process.close()


def asked(num_prompt: int = 4, max_tokens: int = 2) -> NewRequest:
    """A request."""
    return NewRequest((7,) * num_prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def metric(frontend: Frontend, name: str, **labels: str) -> list[float]:
    """All samples of a name with such labels."""
    return [
        sample.value
        for family in text_string_to_metric_families(frontend.stats.render().decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def test_the_smallest_core_decides_what_is_refused() -> None:
    """Any core may get any request: one that fits the largest only would be stuck in another."""
    large = fake_resolved(EngineConfig(model="m", num_gpu_blocks_override=1000))
    small = replace(large, num_gpu_blocks=620, warnings=("low",))
    assert in_force([large, small]).num_gpu_blocks == 620
    assert in_force([small, large]).num_gpu_blocks == 620
    assert in_force([large, small]).warnings == ("low",)


async def test_requests_go_where_fewest_are(make: Make) -> None:
    """A core that idles while its neighbour queues is paid for and not used."""
    frontend, (first, second) = make(2)
    with frontend.admit([asked() for _ in range(4)]):
        assert [len(each.heard) for each in (first, second)] == [2, 2]
    assert all(isinstance(message, Abort) for each in (first, second) for message in each.heard[2:])
    with frontend.admit([asked()]):
        assert isinstance(first.heard[-1], Submit)
        with frontend.admit([asked()]):
            assert isinstance(second.heard[-1], Submit)


async def test_a_queue_for_kv_blocks_counts_more(make: Make) -> None:
    """Requests that wait for blocks wait longer than their number says."""
    frontend, (first, second) = make(2, num_gpu_blocks_override=8)
    with frontend.admit([asked(100, 9), asked(4, 9), asked(100, 9), asked(4, 9)]):
        first.step()
        second.step()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert first.core.step().num_waiting == 1  # its second request of 7 blocks; the other core runs both of its
        with frontend.admit([asked()]):
            assert len([message for message in second.heard if isinstance(message, Submit)]) == 3


async def test_tokens_arrive_from_every_core(make: Make) -> None:
    """Each answer comes from the core that computes it, to the one who asked."""
    frontend, processes = make(2)
    with frontend.admit([asked(max_tokens=3), asked(max_tokens=3)]) as generations:
        for _ in range(3):
            for process in processes:
                process.step()
        tokens = [[token.token_id async for token in generation] for generation in generations]
    assert tokens == [[97, 98, 99]] * 2
    for rank in ("0", "1"):
        assert metric(frontend, "vllm:generation_tokens_total", engine=rank) == [3]
        assert metric(frontend, "vllm:time_to_first_token_seconds_count", engine=rank) == [1]


async def test_a_full_valve_refuses_and_leaves_no_trace(make: Make) -> None:
    """A refusal is counted as one, and not as a fast or slow answer."""
    frontend, (process,) = make(max_num_queued_reqs=2)
    with frontend.admit([asked()]):
        with pytest.raises(OverloadedError, match="max_num_queued_reqs=2"), frontend.admit([asked(), asked()]):
            pass
        assert len(process.heard) == 1
        with frontend.admit([asked()]):
            assert len(process.heard) == 2
    with frontend.admit([asked(), asked()]):
        pass
    assert metric(frontend, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == [1]
    assert metric(frontend, "vllm:admission_rejections_total", reason="max_num_queued_tokens") == [0]
    assert metric(frontend, "vllm:time_to_first_token_seconds_count") == [0]


async def test_more_than_the_valve_ever_lets_in_is_no_overload(make: Make) -> None:
    """Coming back later would not help."""
    frontend, (process,) = make(max_num_queued_reqs=2)
    with pytest.raises(RequestRefusedError, match="max_num_queued_reqs=2"), frontend.admit([asked()] * 3):
        pass
    assert process.heard == []


async def test_prompts_count_over_all_cores_until_their_first_token(make: Make) -> None:
    """The limit is the server's: what waits at the other core waits too."""
    frontend, processes = make(2, max_num_queued_tokens=10)
    with frontend.admit([asked(6, 9)]), frontend.admit([asked(4, 9)]):
        with pytest.raises(OverloadedError, match="10 prompt tokens in prefill"), frontend.admit([asked(1)]):
            pass
        processes[0].step()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with frontend.admit([asked(6)]):
            pass


async def test_a_request_that_a_core_refuses_ends_with_its_reason(make: Make) -> None:
    """The client is told, and the valves forget the request."""
    frontend, (process,) = make(max_num_queued_reqs=1)
    with frontend.admit([asked()]) as (generation,):
        process.say(Refused(generation.request_id, "made-up reason"))
        with pytest.raises(RequestRefusedError, match="made-up reason"):
            await anext(generation)
    with frontend.admit([asked()]):
        pass


async def test_a_cache_is_reset_when_every_core_has_said_so(make: Make) -> None:
    """A benchmark that starts on half a reset measures the other half's cache."""
    frontend, (first, second) = make(2)
    for said, answer in (((True, True), True), ((True, False), False)):
        asking = asyncio.create_task(frontend.reset_prefix_cache())
        await asyncio.sleep(0)
        assert isinstance(first.heard[-1], ResetPrefixCache)
        for process, done in zip((first, second), said, strict=True):
            assert not asking.done()
            process.say(PrefixCacheReset(done))
        assert await asking is answer


async def test_a_client_that_leaves_during_a_reset_harms_nobody(make: Make) -> None:
    """Its answer comes, and goes nowhere."""
    frontend, (process,) = make()
    asking = asyncio.create_task(frontend.reset_prefix_cache())
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    process.say(PrefixCacheReset(done=True))
    await asyncio.sleep(0.01)
    assert frontend.is_alive


async def test_one_core_that_dies_ends_everything_and_is_named(make: Make) -> None:
    """Half an engine would serve at half its measured rate, and nobody would know."""
    frontend, processes = make(2)
    with frontend.admit([asked(), asked()]) as generations:
        asking = asyncio.create_task(frontend.reset_prefix_cache())
        await asyncio.sleep(0)
        processes[1].say(CoreFailed("oom_runtime", "no memory"))
        assert await frontend.failed == CoreFailed("oom_runtime", "core 1: no memory")
        for generation in generations:
            with pytest.raises(EngineGoneError, match="no memory"):
                await anext(generation)
        with pytest.raises(EngineGoneError):
            await asking
    with pytest.raises(EngineGoneError), frontend.admit([asked()]):
        pass
    with pytest.raises(EngineGoneError):
        await frontend.reset_prefix_cache()


async def test_a_second_ready_is_only_logged(make: Make) -> None:
    """It changes nothing."""
    frontend, (process,) = make()
    process.say(Ready(fake_resolved(EngineConfig(model="m"))))
    await asyncio.sleep(0.01)
    assert frontend.is_alive
