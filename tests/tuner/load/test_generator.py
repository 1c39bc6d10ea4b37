"""A closed loop holds its load, whatever the server does with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.server import Behaviour, StubEngine, running_stub
from tuner.load.connection import Endpoint
from tuner.load.generator import ClosedLoop
from tuner.load.log import LoadLog
from tuner.load.prompts import Conversation, conversations
from tuner.load.workload import load_workload

TINY = load_workload({"input_len": {"kind": "fixed", "tokens": 5}, "output_len": {"kind": "fixed", "tokens": 3}})


def prompts() -> Iterator[Conversation]:
    """Requests of five tokens in, three out."""
    return conversations(TINY, token_ids=range(256), max_model_len=99, entropy=(0, 0, 0, 0))


def loop_on(endpoint: Endpoint, load: int) -> ClosedLoop:
    """A closed loop on a server."""
    return ClosedLoop(endpoint=endpoint, model="m", load=load, prompts=prompts())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come; fail after twenty seconds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event to set
            await asyncio.sleep(0.005)


async def test_every_user_is_really_in_flight() -> None:
    """A connection cap in the client (100 is common) measures the client."""
    async with running_stub(Behaviour(hang_after=0)) as stub, loop_on(stub.endpoint, 256) as generator:
        await until(lambda: stub.num_in_flight == 256)
        assert generator.log.num_in_flight == 256


async def test_a_user_sends_again_when_its_answer_has_ended_and_never_twice_the_same() -> None:
    """The load is N at any time, on one kept-alive connection a user, with a prompt of its own for every request."""
    async with running_stub(Behaviour()) as stub, loop_on(stub.endpoint, 3) as generator:
        await until(lambda: len(generator.log.records) >= 30)
        assert generator.num_users_through == 3
        assert stub.peak_in_flight <= 3
        assert len({tuple(body["prompt"]) for body in stub.bodies}) == stub.num_requests
    records = generator.log.records
    assert sorted(record.index for record in records) == list(range(len(records)))
    assert all(record.sent_s >= record.intended_s for record in records)
    assert sum(record.error is None and not record.unfinished for record in records) >= 30


async def test_no_user_waits_for_the_paperwork_of_another() -> None:
    """Prompts written out or answers read between one user's end and another's next send count as the engine's TTFT."""
    seen: list[int] = []

    def watched() -> Iterator[Conversation]:
        for request in prompts():
            seen.append(generator.log.num_in_flight)
            yield request

    async with running_stub(Behaviour(ttft_s=0.05)) as stub:
        generator = ClosedLoop(endpoint=stub.endpoint, model="m", load=8, prompts=watched())
        async with generator:
            await until(lambda: len(generator.log.records) >= 40)
    before_the_first_send, later = seen[:8], seen[8:]
    assert before_the_first_send == [0] * 8
    assert set(later) == {8}


async def test_the_end_of_a_stage_drops_what_is_in_flight() -> None:
    """Requests that nobody reads any more must leave the engine, or they burden the next stage."""
    slow = Behaviour(itl_s=0.02, num_tokens=10_000)
    async with running_stub(slow) as stub:
        async with loop_on(stub.endpoint, 4) as generator:
            await until(lambda: len(generator.log.event_times_s) >= 8)
        await until(lambda: stub.num_in_flight == 0)
        assert stub.num_dropped == 4
    assert [record.unfinished for record in generator.log.records] == [True] * 4
    assert all(record.num_output_tokens > 0 and record.error is None for record in generator.log.records)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(status=503), "HTTP 503: stub says 503"),
        (Behaviour(status=400), "HTTP 400: stub says 400"),
        (Behaviour(error_after=2), "error in the stream: engine died"),
        (Behaviour(cut_after=0), "the connection was lost before the response ended"),
        (Behaviour(cut_after=2), "the connection was lost before the response ended"),
    ],
)
async def test_failures_over_a_real_socket_are_failures(behaviour: Behaviour, reason: str) -> None:
    """Each way in which a server fails is a record with its reason, and the user goes on."""
    async with running_stub(behaviour) as stub, loop_on(stub.endpoint, 2) as generator:
        await until(lambda: len(generator.log.records) >= 4)
    ended = [record for record in generator.log.records if not record.unfinished]
    assert {record.error for record in ended} == {reason}
    assert all(record.rejected == (behaviour.status == 503) for record in ended)


async def test_a_server_that_hangs_up_after_each_answer_loses_no_request() -> None:
    """llama.cpp's server does, and says keep-alive: every second request of every user would be a failure."""
    async with running_stub(Behaviour(hangs_up=True)) as stub, loop_on(stub.endpoint, 3) as generator:
        await until(lambda: len(generator.log.records) >= 30)
    ended = [record for record in generator.log.records if not record.unfinished]
    assert {record.error for record in ended} == {None}
    assert all(record.sent_s >= record.intended_s for record in ended)


async def test_nothing_is_sent_after_the_end() -> None:
    """An answer that ends while a stage stops would send the next request: the load goes on beneath the next stage."""
    async with running_stub(Behaviour(hangs_up=True)) as stub:
        before = asyncio.all_tasks()
        for _ in range(10):
            async with loop_on(stub.endpoint, 3) as generator:
                await until(lambda: len(generator.log.records) >= 12)
            await until(lambda: asyncio.all_tasks() <= before)


async def test_a_server_that_is_not_there_is_a_failure_and_not_hammered() -> None:
    """Two hundred requests "done" at 800 a second because nothing listened is the classic wrong answer."""
    async with running_stub(Behaviour()) as stub:
        gone = stub.endpoint
    async with loop_on(gone, 2) as generator:
        await until(lambda: len(generator.log.records) >= 4)
    assert all("no connection to 127.0.0.1" in (record.error or "") for record in generator.log.records)
    first_user = sorted(record.sent_s for record in generator.log.records)
    assert all(later - earlier >= 0.199 for earlier, later in zip(first_user, first_user[2:], strict=False))


async def test_a_user_comes_back_after_a_failure() -> None:
    """One dropped connection must not lower the load for the rest of a stage."""

    def first_is_cut(ordinal: int) -> Behaviour:
        return Behaviour(cut_after=1 if ordinal == 0 else None)

    async with running_stub(first_is_cut) as stub, loop_on(stub.endpoint, 1) as generator:
        await until(lambda: len(generator.log.records) >= 3)
    assert [record.error is None for record in generator.log.records[:3]] == [False, True, True]


async def test_a_blocked_event_loop_shows_in_the_lag() -> None:
    """A generator that cannot tell when it was late would blame the engine."""
    stub: StubEngine
    async with running_stub(Behaviour()) as stub, loop_on(stub.endpoint, 1) as generator:
        await until(lambda: len(generator.log.loop_lags) >= 1)
        seen = len(generator.log.loop_lags)
        until_s = generator.log.now_s() + 0.3
        while generator.log.now_s() < until_s:
            pass
        await until(lambda: len(generator.log.loop_lags) > seen)
    assert max(lag_s for _, lag_s in generator.log.loop_lags[seen:]) > 0.1


def test_the_cpu_that_the_generator_takes_is_told_for_a_window() -> None:
    """What it used while it connected and warmed up says nothing about what it could still do when it measured."""
    log = LoadLog(cpu_times_s=[(0.0, 5.0), (1.0, 5.9), (2.0, 6.0), (3.0, 6.1), (4.0, 6.9)])
    assert log.cpu_share(0.5, 3.5) == pytest.approx(0.1)
    assert log.cpu_share(0.5, 1.5) is None


def test_stream_events_are_counted_in_the_window_only() -> None:
    """A rate that holds the warm-up's events would make the client look faster than it was asked to be."""
    log = LoadLog()
    log.event_times_s.extend([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
    assert log.event_rate(1.0, 3.0) == pytest.approx(2.0)
