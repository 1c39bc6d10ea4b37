"""Every kind of stream there is comes out as tokens and times, and none as an exception."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.server import DONE, event
from tuner.load.client import EVENTS_A_SLICE, read_answer, read_completion, reading_completion, retry_after_s
from tuner.load.connection import Exchange
from tuner.load.prompts import PromptRequest
from tuner.load.stream import read_stream, token_counts
from tuner.records import RequestRecord

REQUEST = PromptRequest(
    index=0, prompt_token_ids=(1,), max_tokens=9, temperature=0.0, ignore_eos=True, num_prompt_tokens=1
)


def exchange_of(*pieces: tuple[float, bytes], status: int = 200, **headers: str) -> Exchange:
    """What arrived, and when."""
    exchange = Exchange(intended_s=0.0, sent_s=0.0, status=status, pieces=list(pieces), headers=headers)
    exchange.ended_s = pieces[-1][0] if pieces else 0.0
    return exchange


def record_of(*pieces: tuple[float, bytes]) -> RequestRecord:
    """Its record."""
    return read_completion(exchange_of(*pieces), REQUEST, origin_s=0.0, now_s=9.0)


def delta(tokens: int | None = None, *, finish: str | None = None, **said: Any) -> bytes:
    """An event of a chat, its running count where one is given."""
    frame: dict[str, Any] = {"choices": [{"index": 0, "delta": said, "finish_reason": finish}]}
    if tokens is not None:
        frame["usage"] = {"prompt_tokens": 1, "completion_tokens": tokens}
    return event(frame)


def usage(tokens: object, **frame: Any) -> bytes:
    """A frame of counts."""
    return event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}, **frame})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_the_first_token_and_the_answer_has_its_own_time(name: str) -> None:
    """Three minutes of thought are no time to first token; both names of the field are in use."""
    record = record_of(
        (1.175, delta(**{name: "hm"})),
        (60.0, delta(**{name: "so"})),
        (183.581, delta(content="yes")),
        (183.7, delta(content="!", finish="stop")),
        (183.8, usage(4)),
        (183.8, DONE),
    )
    assert (record.first_token_s, record.first_answer_s) == (1.175, 183.581)
    assert (record.num_output_tokens, record.error) == (4, None)


def test_reasoning_without_an_answer_is_a_success() -> None:
    """The limit of tokens was reached while it thought: all of them were generated."""
    record = record_of((0.5, delta(1, reasoning="a")), (1.0, delta(2, reasoning="b", finish="length")), (1.0, DONE))
    assert (record.error, record.num_output_tokens, record.first_answer_s) == (None, 2, None)


@pytest.mark.parametrize(
    "frame",
    [
        delta(role="assistant"),
        delta(role="assistant", content=""),
        delta(0, role="assistant", content=""),
        delta(content=None, reasoning_content=None),
        event({"choices": [{"index": 0}]}),
        event({"choices": []}),
        event({"prompt_filter_results": []}),
        usage(0),
    ],
)
def test_a_frame_without_a_token_is_no_token(frame: bytes) -> None:
    """Servers greet, filter and count before they generate."""
    record = record_of((0.005, frame), (0.18, delta(1, content="a")), (0.2, delta(2, content="b")), (0.2, DONE))
    assert record.first_token_s == 0.18
    assert record.num_output_tokens == 2
    assert [after - before for before, after in pairwise(record.token_times_s)] == pytest.approx([0.02])


def test_an_empty_delta_whose_count_grew_is_the_first_token() -> None:
    """Half a character has no text and took as long as any."""
    record = record_of((0.1, delta(0, role="assistant")), (0.2, delta(1, content="")), (0.3, delta(2, content="é")))
    assert record.first_token_s == 0.2
    assert record.first_answer_s == 0.3


def test_counts_in_frames_of_their_own_are_last_counts() -> None:
    """A count that comes without a choice says how many tokens there were, not when."""
    record = record_of(
        *((0.1 * n, delta(content="x") + usage(3 * n)) for n in range(1, 5)), (0.9, delta(finish="stop")), (0.9, DONE)
    )
    assert (record.token_source, record.num_output_tokens) == ("final_usage", 12)
    assert record.finished_s == pytest.approx(0.4)


def test_a_count_in_the_last_frame_only_is_not_a_chunk_of_all_tokens() -> None:
    """Ten chunks and a count of ten with the finish are ten tokens, not twenty, and not all at the end."""
    chunks = [(0.1 * n, delta(content="x")) for n in range(1, 10)]
    record = record_of(*chunks, (1.0, delta(10, content="x", finish="stop")), (1.0, DONE))
    assert (record.token_source, record.num_output_tokens) == ("final_usage", 10)
    assert record.first_token_s == pytest.approx(0.1)


@pytest.mark.parametrize("zero", [0, None, -3, True, "12", 10**12, [], 1.5])
def test_a_count_that_is_none_counts_nothing(zero: object) -> None:
    """A gateway that reports nonsense must not make a success without tokens, nor one with a billion."""
    frames = [
        (0.1 * n, event({"choices": [{"text": "x"}], "usage": {"completion_tokens": zero, "prompt_tokens": zero}}))
        for n in range(1, 4)
    ]
    record = record_of(*frames, (0.4, usage(zero)), (0.4, DONE))
    assert (record.token_source, record.num_output_tokens, record.error) == ("chunks", 3, None)


@pytest.mark.parametrize(
    "frame", [event({"error": "overloaded"}), event({"object": "error", "message": "overloaded", "code": 500})]
)
def test_an_error_in_mid_stream_is_a_failure_however_it_is_written(frame: bytes) -> None:
    """HTTP said 200 long ago, and an end mark follows as if nothing were."""
    tokens = [(0.1 * n, delta(n, content="x")) for n in range(1, 6)]
    record = record_of(*tokens, (0.6, frame), (0.6, DONE))
    assert record.error == "error in the stream: overloaded"


def test_an_answer_is_repeated_by_its_ids_where_they_are_all_told() -> None:
    """Some of the ids are none of them: the rest would be another history."""

    def told(*ids: list[int]) -> tuple[int, ...]:
        pieces = [
            (0.1, event({"choices": [{"text": "ab", "token_ids": each}], "usage": {"completion_tokens": 2 * n + 2}}))
            for n, each in enumerate(ids)
        ]
        return read_answer(exchange_of(*pieces)).token_ids

    assert told([5, 6], [7, 8]) == (5, 6, 7, 8)
    assert told([5, 6], [7]) == ()
    answer = read_answer(exchange_of((0.1, delta(1, reasoning="hm")), (0.2, delta(3, content="yes"))))
    assert (answer.text, answer.num_tokens) == ("yes", 3)


@pytest.mark.parametrize(
    ("status", "header", "seconds"),
    [
        (503, "2", 2.0),
        (503, "", None),
        (503, "soon", None),
        (503, "Wed, 21 Oct 2015 07:28:00 GMT", None),
        (200, "2", None),
    ],
)
def test_a_refusal_says_how_long_to_wait(status: int, header: str, seconds: float | None) -> None:
    """In seconds, as engines write it; anything else is no promise."""
    assert retry_after_s(exchange_of((0.1, b""), status=status, **{"retry-after": header})) == seconds


KEYS = st.sampled_from(
    ["choices", "usage", "delta", "text", "content", "reasoning", "completion_tokens", "error", "token_ids", "object"]
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(KEYS, JSON_VALUES, max_size=5), max_size=6), st.binary(max_size=30))
def test_no_stream_is_an_exception(frames: list[dict[str, Any]], rubbish: bytes) -> None:
    """One odd server must not end a study: its streams are failures or tokens."""
    body = b"".join(event(frame) for frame in frames) + b"data: " + rubbish + b"\n\n"
    exchange = exchange_of((0.1, body))
    record = read_completion(exchange, REQUEST, origin_s=0.0, now_s=1.0)
    assert record.num_output_tokens == len(record.token_times_s)
    assert record.error is not None or record.num_output_tokens > 0
    read_answer(exchange)


ODD = st.sampled_from(
    [delta(role="assistant"), b": keep-alive\n\n", event({"choices": []}), b"event: ping\nid: 3\n\n", delta(content="")]
)
SPOKEN = st.sampled_from(["content", "reasoning", "reasoning_content"])


@given(
    st.lists(st.tuples(SPOKEN, st.integers(1, 4), ODD), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 10**6), max_size=20),
)
def test_any_cutting_of_any_chat_gives_the_same_tokens(
    said: list[tuple[str, int, bytes]],
    counted: bool,  # noqa: FBT001 - drawn by hypothesis
    crlf: bool,  # noqa: FBT001
    cuts: list[int],
) -> None:
    """The network's reads, and what a server says between tokens, change no count."""
    total = 0
    body = b""
    for name, tokens, odd in said:
        total += tokens
        body += odd + delta(total if counted else None, **{name: "é" * tokens})
    body += usage(total) + DONE
    if crlf:
        body = body.replace(b"\n", b"\r\n")
    ends = sorted({cut % len(body) for cut in cuts} | {len(body)})
    pieces = [(0.1 * n, body[start:end]) for n, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    stream = read_stream(pieces)
    source, chunks = token_counts(stream)
    assert source == ("running_usage" if counted else "final_usage")
    assert sum(count for _, count in chunks) == total
    assert stream.error is None
    assert stream.done


def test_json_that_is_nested_without_end_is_a_failure() -> None:
    """A parser that gives up is not the study's end."""
    record = record_of((0.1, b"data: " + b'{"choices":' + b"[" * 100_000 + b"\n\n"), (0.2, DONE))
    assert record.error is not None
    assert json.loads(record.model_dump_json())["error"].startswith("cut stream")


def test_a_long_answer_is_read_in_slices() -> None:
    """Read in one go, a thousand tokens keep all other streams unstamped for milliseconds."""
    num_events = 10 * EVENTS_A_SLICE
    pieces = [(float(at), delta(at, content="x")) for at in range(1, num_events)] + [(float(num_events), DONE)]
    exchange = exchange_of(*pieces)
    slices = list(reading_completion(exchange, REQUEST, origin_s=0.0, now_s=0.0))
    assert len(slices) >= 10
    assert all(record is None for record in slices[:-1])
    assert slices[-1] == read_completion(exchange, REQUEST, origin_s=0.0, now_s=0.0)
    assert slices[-1] is not None
    assert slices[-1].num_output_tokens == num_events - 1
