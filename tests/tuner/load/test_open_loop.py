"""An open loop sends when it is time, whatever the server does, and hides nothing of its own lateness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from typing import Any

import pytest

from tests.fakes.server import Behaviour, StubEngine, running_stub
from tuner.load.arrivals import constant_s
from tuner.load.open_loop import OpenLoop
from tuner.load.prompts import conversations
from tuner.load.workload import load_workload
from tuner.measure.latency import e2e_s

TINY: dict[str, Any] = {
    "input_len": {"kind": "fixed", "tokens": 5},
    "output_len": {"kind": "fixed", "tokens": 3},
    "arrivals": {"kind": "constant"},
}


def loop_on(stub: StubEngine, times_s: Iterator[float], **more: Any) -> OpenLoop:
    """An open loop on a server."""
    found = conversations(
        load_workload({**TINY, **more}), token_ids=range(256), max_model_len=99, entropy=(0, 0), asks_token_ids=True
    )
    return OpenLoop(endpoint=stub.endpoint, model="m", prompts=found, times_s=times_s)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come; fail after twenty seconds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event to set
            await asyncio.sleep(0.005)


async def test_requests_leave_though_nobody_answers() -> None:
    """A cap on connections, or waiting for answers, turns a rate into a number of users."""
    times_s = islice(constant_s(400.0), 300)
    async with running_stub(Behaviour(hang_after=0)) as stub, loop_on(stub, times_s) as generator:
        await until(lambda: stub.num_in_flight == 300)
        assert generator.log.num_in_flight == 300
    assert all(record.unfinished for record in generator.log.records)
    assert len(generator.log.records) == 300


async def test_no_request_leaves_before_its_time() -> None:
    """Intended times are the schedule's own; a send is late or on time, and by how much is on record."""
    times = [0.0, 0.02, 0.02, 0.05, 0.3, 0.31]
    async with running_stub(Behaviour()) as stub, loop_on(stub, iter(times)) as generator:
        await until(lambda: generator.is_done)
    records = sorted(generator.log.records, key=lambda record: record.index)
    assert [record.intended_s for record in records] == pytest.approx(times)
    assert all(record.sent_s >= record.intended_s for record in records)
    assert all(record.error is None for record in records)


async def test_waiting_in_the_server_counts_from_the_intended_time() -> None:
    """Eight arrivals 100 ms apart at a server that takes 500 ms each wait up to 2.8 s; users would see just that."""
    behaviour = Behaviour(script=((0.5, _FINISHED),))
    arrivals = (0.1 * number for number in range(8))
    async with running_stub(behaviour, num_slots=1) as stub, loop_on(stub, arrivals) as generator:
        await until(lambda: generator.is_done)
    waits_s = sorted(e2e_s(record) for record in generator.log.records)
    assert all(wait_s >= 0.5 + 0.4 * number - 0.01 for number, wait_s in enumerate(waits_s))
    assert sum(waits_s) / 8 >= 1.89


async def test_lateness_of_the_sender_is_in_the_latency_and_apart() -> None:
    """A sender that was held up is not the engine's speed, and not hidden either."""
    async with running_stub(Behaviour()) as stub, loop_on(stub, iter([0.0, 0.05])) as generator:
        await until(lambda: stub.num_requests == 1)
        held_until_s = generator.log.now_s() + 0.3
        while generator.log.now_s() < held_until_s:
            pass
        await until(lambda: generator.is_done)
    late = max(generator.log.records, key=lambda record: record.index)
    assert late.intended_s == pytest.approx(0.05)
    assert late.sent_s - late.intended_s >= 0.2
    assert e2e_s(late) >= late.sent_s - late.intended_s


async def test_a_batch_is_sent_all_at_once_and_ends() -> None:
    """Offline work is judged by when all of it is done."""
    async with running_stub(Behaviour(ttft_s=0.05), num_slots=4) as stub:
        found = islice(repeat(0.0), 40)
        async with loop_on(stub, found) as generator:
            await until(lambda: generator.is_done)
        assert stub.peak_in_flight > 30
    assert len(generator.log.records) == 40
    assert {record.intended_s for record in generator.log.records} == {0.0}


async def test_a_chat_in_an_open_loop_goes_on_when_it_is_answered() -> None:
    """A second turn cannot leave before the first is answered; it repeats what was really said."""
    async with running_stub(Behaviour(itl_s=0.01)) as stub:
        async with loop_on(stub, iter([0.0, 0.01, 0.02]), chat={"turns": 2}) as generator:
            await until(lambda: generator.is_done)
        bodies = stub.bodies
    assert len(bodies) == 6
    first = {tuple(body["prompt"]) for body in bodies if len(body["prompt"]) == 5}
    second = [tuple(body["prompt"]) for body in bodies if len(body["prompt"]) == 13]
    assert {prompt[:5] for prompt in second} == first
    assert all(prompt[5:8] == (77, 77, 77) for prompt in second)


async def test_a_server_that_is_not_there_fails_each_request_at_its_time() -> None:
    """Refused connections are failures, one a request, and the schedule goes on."""
    async with running_stub(Behaviour()) as stub:
        pass
    async with loop_on(stub, islice(constant_s(50.0), 5)) as generator:
        await until(lambda: generator.is_done)
    assert len(generator.log.records) == 5
    assert all("no connection to 127.0.0.1" in (record.error or "") for record in generator.log.records)


async def test_a_prompt_source_that_breaks_is_heard_of() -> None:
    """A generator that stops sending in silence would look like an idle engine."""

    def broken() -> Iterator[float]:
        yield from islice(constant_s(1000.0), 300)
        raise ZeroDivisionError

    async def sent_until_it_breaks() -> None:
        async with running_stub(Behaviour()) as stub, loop_on(stub, broken()) as generator:
            await until(lambda: generator.check() is not None)

    with pytest.raises(ZeroDivisionError):
        await sent_until_it_breaks()


_FINISHED = (
    b'data: {"choices": [{"text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": 3}}\n\n'
    b"data: [DONE]\n\n"
)
