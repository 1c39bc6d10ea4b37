"""A record says what the stream said: exact times from a synthetic log, and no failure that looks like a success."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.server import DONE, completion_frames, event
from tuner.load.client import read_completion, request_bytes
from tuner.load.connection import Endpoint, Exchange
from tuner.load.prompts import PromptRequest
from tuner.load.stream import token_arrivals
from tuner.records import RequestRecord

REQUEST = PromptRequest(
    index=7, prompt_token_ids=(1, 2, 3), max_tokens=9, temperature=0.0, ignore_eos=True, num_prompt_tokens=3
)
ORIGIN_S = 1000.0


def text(content: str, *, tokens: int | None = None, finish: str | None = None) -> bytes:
    """An event with text, its running count where one is given."""
    frame: dict[str, Any] = {"choices": [{"text": content, "finish_reason": finish}]}
    if tokens is not None:
        frame["usage"] = {"prompt_tokens": 3, "completion_tokens": tokens}
    return event(frame)


def usage(tokens: int) -> bytes:
    """The last event: counts and no text."""
    return event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})


def record_of(*pieces: tuple[float, bytes], status: int = 200, fault: str | None = None) -> RequestRecord:
    """The record of a stream whose reads arrived at these times."""
    exchange = Exchange(intended_s=ORIGIN_S, sent_s=ORIGIN_S + 0.001, status=status, fault=fault)
    exchange.pieces = [(ORIGIN_S + at_s, piece) for at_s, piece in pieces]
    exchange.ended_s = ORIGIN_S + (pieces[-1][0] if pieces else 0.5)
    return read_completion(exchange, REQUEST, origin_s=ORIGIN_S, now_s=ORIGIN_S + 9)


def gaps_ms(record: RequestRecord) -> list[float]:
    """Time between tokens."""
    times = record.token_times_s
    return [1e3 * (after - before) for before, after in pairwise(times)]


def test_a_chunk_of_several_tokens_is_as_many_equal_gaps() -> None:
    """One gap a chunk reads 2.7 times too high on an engine that packs tokens."""
    record = record_of(
        (0.20, text("a", tokens=1)), (0.24, text("bcde", tokens=5)), (0.28, text("fghi", tokens=9)), (0.28, DONE)
    )
    assert gaps_ms(record) == pytest.approx([10.0] * 8)
    assert record.longest_stall_s == pytest.approx(0.04)
    assert record.first_token_s == pytest.approx(0.20)
    assert record.num_output_tokens == 9
    assert record.error is None


def test_events_of_one_read_share_its_gap() -> None:
    """Two tokens that one read brought arrived together; the second is not infinitely fast."""
    both = text("b", tokens=2) + text("c", tokens=3)
    record = record_of((0.2, text("a", tokens=1)), (0.4, both), (0.4, DONE))
    assert gaps_ms(record) == pytest.approx([100.0, 100.0])


def test_role_and_empty_frames_are_not_the_first_token() -> None:
    """Servers greet before they compute: TTFT would be the network's round trip."""
    role = event({"choices": [{"delta": {"role": "assistant"}}]})
    record = record_of(
        (0.005, role), (0.006, text("")), (0.180, text("a")), (0.2, text("b", finish="stop")), (0.2, DONE)
    )
    assert record.first_token_s == pytest.approx(0.180)
    assert gaps_ms(record) == pytest.approx([20.0])


def test_an_empty_text_whose_count_grew_is_a_token() -> None:
    """Half a UTF-8 character is a token without text; its time is the first token's time."""
    record = record_of((0.1, text("", tokens=1)), (0.2, text("é", tokens=2, finish="length")), (0.2, DONE))
    assert record.first_token_s == pytest.approx(0.1)
    assert record.num_output_tokens == 2


def test_the_usage_frame_does_not_lengthen_a_request() -> None:
    """E2E ends with the last token, however late the bookkeeping comes."""
    record = record_of((0.1, text("a", tokens=1)), (0.2, text("b", tokens=2)), (0.9, usage(2)), (0.9, DONE))
    assert record.finished_s == pytest.approx(0.2)
    assert record.num_prompt_tokens == 3


def test_without_running_counts_the_last_count_is_spread() -> None:
    """The server's own count wins over the number of chunks."""
    record = record_of((0.1, text("ab")), (0.2, text("cd")), (0.3, usage(4)), (0.3, DONE))
    assert record.token_source == "final_usage"
    assert record.num_output_tokens == 4
    assert gaps_ms(record) == pytest.approx([0.0, 50.0, 50.0])


def test_without_any_count_a_chunk_is_a_token_and_says_so() -> None:
    """An estimate must not be ranked beside a count."""
    record = record_of(*((0.1 * n, text("x")) for n in range(1, 11)), (1.0, DONE))
    assert record.token_source == "chunks"
    assert record.num_output_tokens == 10


def test_a_last_count_above_the_running_one_wins() -> None:
    """Tokens that only the last count knows of are not lost."""
    record = record_of((0.1, text("a", tokens=1)), (0.2, text("b", tokens=2)), (0.2, usage(3)), (0.2, DONE))
    assert record.num_output_tokens == 3


@pytest.mark.parametrize(
    ("pieces", "fault", "reason"),
    [
        ([(0.1, text("a", tokens=1)), (0.2, event({"error": {"message": "engine died"}})), (0.2, DONE)], None, "died"),
        ([(0.1, text("a", tokens=1))], None, "cut stream"),
        ([(0.1, text("a", tokens=1, finish="stop"))], "the connection was lost", "lost"),
        ([(0.1, text("a", tokens=1)), (0.2, b'data: {"choi')], "the connection was lost", "cut stream"),
        ([(0.1, usage(0)), (0.1, DONE)], None, "no token"),
        ([(0.1, text("", finish="stop")), (0.1, DONE)], None, "no token"),
        ([(0.1, b'{"choices": [{"text": "whole"}]}')], None, "no token"),
        ([(0.1, event([1]))], None, "unexpected event"),
        ([], "no connection to 127.0.0.1:1: refused", "refused"),
    ],
)
def test_a_stream_that_did_not_end_well_is_a_failure(
    pieces: list[tuple[float, bytes]], fault: str | None, reason: str
) -> None:
    """HTTP 200 is sent before the engine fails: such streams must never count as fast successes."""
    record = record_of(*pieces, fault=fault)
    assert record.error is not None
    assert reason in record.error
    assert not record.rejected


@pytest.mark.parametrize(
    ("status", "body", "error", "rejected"),
    [
        (503, b'{"error": {"message": "queue is full"}}', "HTTP 503: queue is full", True),
        (400, b'{"message": "too long"}', "HTTP 400: too long", False),
        (400, b'{"error": "no such model"}', "HTTP 400: no such model", False),
        (502, b"<html>bad gateway", "HTTP 502: <html>bad gateway", False),
        (500, b"", "HTTP 500: empty answer", False),
    ],
)
def test_a_refusal_is_told_from_a_failure_by_its_status(status: int, body: bytes, error: str, rejected: bool) -> None:  # noqa: FBT001 - a table's column
    """A valve that says 503 does its duty; anything else is a fault, in the server's own words."""
    record = record_of((0.1, body), status=status)
    assert (record.error, record.rejected) == (error, rejected)


def test_what_the_stage_cut_short_is_neither_success_nor_failure() -> None:
    """Its tokens count for throughput, its latency is unknown."""
    exchange = Exchange(intended_s=ORIGIN_S, sent_s=ORIGIN_S, pieces=[(ORIGIN_S + 0.1, text("a", tokens=1))])
    record = read_completion(exchange, REQUEST, origin_s=ORIGIN_S, now_s=ORIGIN_S + 2)
    assert (record.unfinished, record.error, record.num_output_tokens) == (True, None, 1)
    assert record.finished_s == pytest.approx(2.0)


@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(["running", "final", "none"]),
    st.booleans(),
    st.lists(st.integers(0, 10**6), max_size=12),
)
def test_any_cutting_of_a_stream_gives_the_same_record_but_for_times(
    num_tokens: int,
    packed: int,
    counts: str,
    crlf: bool,  # noqa: FBT001 - drawn by hypothesis
    cuts: list[int],
) -> None:
    """What a request did must not depend on how the network cut it."""
    frames = completion_frames(num_prompt_tokens=3, num_tokens=num_tokens, tokens_per_chunk=packed, usage=counts)
    body = b": comment\n\n" + b"".join(event(frame) for frame in frames) + DONE
    if crlf:
        body = body.replace(b"\n", b"\r\n")
    ends = sorted({cut % len(body) for cut in cuts} | {len(body)})
    pieces = [body[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    cut = record_of(*((0.1 * n, piece) for n, piece in enumerate(pieces)))
    whole = record_of((0.1, body))
    timeless = {"first_token_s", "first_answer_s", "finished_s", "token_times_s", "longest_stall_s"}
    assert cut.model_dump(exclude=timeless) == whole.model_dump(exclude=timeless)
    assert len(cut.token_times_s) == cut.num_output_tokens == (num_tokens if counts != "none" else len(frames))


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9)), min_size=1))
def test_gaps_add_up_to_the_stream(chunks: list[tuple[float, int]]) -> None:
    """However tokens are packed, ITL and TPOT describe the same span of time."""
    chunks = sorted(chunks)
    times, longest = token_arrivals(chunks)
    assert len(times) == sum(count for _, count in chunks)
    assert list(times) == sorted(times)
    assert (times[0], times[-1]) == (chunks[0][0], chunks[-1][0])
    assert longest <= times[-1] - times[0]


def test_the_request_carries_ids_counts_and_sampling() -> None:
    """A flag lost on the way (ignore_eos) makes runs that cannot be compared."""
    head, _, body = request_bytes(REQUEST, endpoint=Endpoint("h", 80, "/llm"), model="m").partition(b"\r\n\r\n")
    assert head.startswith(b"POST /llm/v1/completions HTTP/1.1\r\nHost: h:80\r\n")
    assert json.loads(body) == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 9,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
