"""Streams that have misled others, over a real socket: what is recorded is what happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import islice, pairwise, repeat
from typing import Any

import pytest

from tests.fakes.server import DONE, Behaviour, event, running_stub
from tuner.load.arrivals import think_times_s
from tuner.load.generator import ClosedLoop
from tuner.load.prompts import Conversation, conversations
from tuner.load.text import GUESSED_SCALE
from tuner.load.workload import load_workload
from tuner.records import RequestRecord


def prompts(**more: Any) -> Iterator[Conversation]:
    """Requests of five tokens in, three out."""
    lengths = {"input_len": {"kind": "fixed", "tokens": 5}, "output_len": {"kind": "fixed", "tokens": 3}}
    text = GUESSED_SCALE if more.get("api") == "chat" else None
    return conversations(
        load_workload({**lengths, **more}), token_ids=range(256), max_model_len=99, entropy=(0, 0), text=text
    )


async def at_least(count: int, loop: ClosedLoop) -> None:
    """Wait for so many requests to have ended."""
    async with asyncio.timeout(20):
        while len(loop.log.records) < count:  # noqa: ASYNC110 - what is waited for has no event to set
            await asyncio.sleep(0.005)


async def first_record(behaviour: Behaviour, **more: Any) -> RequestRecord:
    """What one user's first request became."""
    async with running_stub(behaviour) as stub:
        loop = ClosedLoop(endpoint=stub.endpoint, model="m", load=1, prompts=prompts(**more))
        async with asyncio.timeout(20), loop as generator:
            while not generator.log.records:  # noqa: ASYNC110 - what is waited for has no event to set
                await asyncio.sleep(0.005)
    return generator.log.records[0]


def said(tokens: int | None = None, *, finish: str | None = None, **delta: Any) -> bytes:
    """An event of a chat."""
    frame: dict[str, Any] = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if tokens is not None:
        frame["usage"] = {"prompt_tokens": 5, "completion_tokens": tokens}
    return event(frame)


async def test_chunks_of_four_are_four_gaps_and_one_stall() -> None:
    """One interval a chunk reads ITL four times too high."""
    script = ((0.2, said(1, content="a")), (0.24, said(5, content="bcde")), (0.28, said(9, content="fghi") + DONE))
    record = await first_record(Behaviour(script=script), api="chat")
    gaps = [after - before for before, after in pairwise(record.token_times_s)]
    assert len(gaps) == 8
    assert record.longest_stall_s == pytest.approx(max(4 * gap for gap in gaps))
    assert sum(gaps) == pytest.approx(record.finished_s - record.token_times_s[0])
    assert record.token_source == "running_usage"


async def test_greetings_are_not_the_first_token() -> None:
    """Role at 5 ms, nothing at 6 ms, text at 180 ms: the user waited 180 ms."""
    script = (
        (0.005, said(role="assistant")),
        (0.006, said(content="")),
        (0.18, said(content="a")),
        (0.2, said(content="b", finish="stop") + event({"choices": [], "usage": {"completion_tokens": 2}}) + DONE),
    )
    record = await first_record(Behaviour(script=script), api="chat")
    assert record.first_token_s is not None
    assert record.first_token_s - record.sent_s >= 0.17
    assert record.num_output_tokens == 2


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_thinking_is_generating(name: str) -> None:
    """The first token is the first thought; the answer's first is apart."""
    script = ((0.05, said(1, **{name: "hm"})), (0.4, said(2, content="so") + DONE))
    record = await first_record(Behaviour(script=script), api="chat")
    assert record.first_token_s is not None
    assert record.first_answer_s is not None
    assert record.first_answer_s - record.first_token_s >= 0.3
    assert (record.num_output_tokens, record.error) == (2, None)


async def test_five_tokens_an_error_and_an_end_mark_are_a_failure() -> None:
    """The status was sent before the engine failed."""
    failed = event({"error": {"message": "engine died", "code": 500}}) + DONE
    script = (*((0.01 * n, said(n, content="x")) for n in range(1, 6)), (0.06, failed))
    record = await first_record(Behaviour(script=script), api="chat")
    assert record.error == "error in the stream: engine died"


async def test_no_counts_are_an_estimate_and_a_late_count_costs_no_time() -> None:
    """Ten chunks are ten tokens only until the server says a hundred; its bookkeeping is not the last token."""
    chunks = tuple((0.01 * n, said(content="x")) for n in range(1, 11))
    guessed = await first_record(Behaviour(script=(*chunks, (0.11, DONE))), api="chat")
    assert (guessed.token_source, guessed.num_output_tokens) == ("chunks", 10)
    counts = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 100}})
    counted = await first_record(Behaviour(script=(*chunks, (0.6, counts + DONE))), api="chat")
    assert (counted.token_source, counted.num_output_tokens) == ("final_usage", 100)
    assert counted.finished_s - counted.sent_s < 0.6


async def test_a_stream_cut_in_the_middle_of_a_token_is_a_failure() -> None:
    """Half a frame and a closed socket: the server crashed."""
    script = ((0.01, said(1, content="x")), (0.02, b'data: {"choi'))
    record = await first_record(Behaviour(script=script), api="chat")
    assert record.error is not None
    assert "cut stream" in record.error


async def test_a_refusal_is_waited_out_as_long_as_it_asks() -> None:
    """Users who come back at once keep a valve shut; what it asks is bounded, for a stage is short."""

    def refuses_first(ordinal: int) -> Behaviour:
        return Behaviour(status=503, retry_after="1") if ordinal == 0 else Behaviour()

    async with running_stub(refuses_first) as stub:
        loop = ClosedLoop(endpoint=stub.endpoint, model="m", load=1, prompts=prompts())
        async with asyncio.timeout(20), loop as generator:
            while len(generator.log.records) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert stub.arrivals_s[1] - stub.arrivals_s[0] >= 0.99
    assert [record.rejected for record in generator.log.records[:2]] == [True, False]


async def test_a_thought_that_took_too_long_is_no_latency_and_is_told() -> None:
    """Timers are whole milliseconds: on a fast engine their lateness would be a good part of every TTFT."""
    async with (
        running_stub(Behaviour()) as stub,
        ClosedLoop(endpoint=stub.endpoint, model="m", load=2, prompts=prompts(), think_times_s=repeat(0.05)) as loop,
    ):
        await at_least(2, loop)
        until_s = loop.log.now_s() + 0.3
        while loop.log.now_s() < until_s:
            pass  # nothing of this process runs, as on a machine that is busy
        await at_least(8, loop)
    later = [record for record in loop.log.records if record.intended_s > 0]
    assert all(record.sent_s == record.intended_s for record in later)
    assert max(late_s for _, late_s in loop.log.late_returns) > 0.1
    assert loop.log.mean_held_back(0.0, loop.log.now_s()) > 0


async def test_a_user_thinks_before_it_sends_and_the_thought_is_no_latency() -> None:
    """Think time lowers the load; counted as TTFT it would be the engine's fault."""
    async with running_stub(Behaviour()) as stub:
        loop = ClosedLoop(endpoint=stub.endpoint, model="m", load=1, prompts=prompts(), think_times_s=repeat(0.1))
        async with asyncio.timeout(20), loop as generator:
            while len(generator.log.records) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    records = generator.log.records
    for before, after in pairwise(records[:4]):
        assert after.sent_s - before.finished_s >= 0.1 - 1e-6
        assert after.intended_s - before.finished_s >= 0.1 - 1e-6


def test_thoughts_have_their_mean() -> None:
    """A mean of two seconds, long and short ones; no thought at all for a mean of zero."""
    import numpy as np

    drawn = list(islice(think_times_s(2.0, np.random.default_rng(0)), 20_000))
    assert np.mean(drawn) == pytest.approx(2.0, rel=0.05)
    assert np.std(drawn) == pytest.approx(2.0, rel=0.05)
    assert list(islice(think_times_s(0.0, np.random.default_rng(0)), 3)) == [0.0, 0.0, 0.0]


async def test_text_is_sent_as_messages() -> None:
    """An endpoint for chats takes no token ids."""
    async with running_stub(Behaviour()) as stub:
        loop = ClosedLoop(endpoint=stub.endpoint, model="m", load=1, prompts=prompts(api="chat", chat={"turns": 2}))
        async with asyncio.timeout(20), loop as generator:
            while len(generator.log.records) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        first, second = stub.bodies[:2]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "xxx"
    assert second["messages"][0] == first["messages"][0]
    assert not {"prompt", "return_token_ids"} & set(first)
    assert json.dumps(first["stream_options"]) == json.dumps(second["stream_options"])
