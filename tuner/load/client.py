"""One streaming request: its bytes, and the record of what came back.

Nothing is parsed while a stream runs: `Connection` keeps stamped bytes, `read_completion` makes sense of them later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from tuner.load.connection import Endpoint, Exchange
from tuner.load.prompts import Answer, PromptRequest
from tuner.load.stream import Chunk, Stream, message_of_body, read_stream, reading, token_arrivals, token_counts
from tuner.records import RequestRecord

EVENTS_A_SLICE = 8
"""Read in one go: some 50 us, as long as the event loop may be kept from stamping what arrives meanwhile. Longer slices
cost no less CPU and blur a burst of answers that end together (docs/lab.md)."""


def request_bytes(request: PromptRequest, *, endpoint: Endpoint, model: str) -> bytes:
    """The bytes of a streamed request that asks for token counts in every chunk."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "ignore_eos": request.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if request.messages:
        path = "/v1/chat/completions"
        body["messages"] = [message._asdict() for message in request.messages]
    else:
        path = "/v1/completions"
        body["prompt"] = request.prompt_token_ids
        if request.asks_token_ids:
            body["return_token_ids"] = True
    return endpoint.post_json(path, json.dumps(body, separators=(",", ":")).encode())


def retry_after_s(exchange: Exchange) -> float | None:
    """How long a refusal asks to wait; None where it does not say so in seconds."""
    text = exchange.headers.get("retry-after", "")
    refused = exchange.status == HTTPStatus.SERVICE_UNAVAILABLE
    return float(text) if refused and text.isascii() and text.isdigit() else None


def read_answer(exchange: Exchange) -> Answer:
    """What the next turn of a chat repeats: the ids of all tokens where the server told them, and the text."""
    stream = read_stream(exchange.pieces)
    num_tokens = sum(count for _, count in token_counts(stream)[1])
    ids = tuple(stream.token_ids) if len(stream.token_ids) == num_tokens else ()
    return Answer(num_tokens=num_tokens, text="".join(stream.answer), token_ids=ids)


def read_completion(exchange: Exchange, request: PromptRequest, *, origin_s: float, now_s: float) -> RequestRecord:
    """The record of one exchange, at once: see `reading_completion`."""
    slices = reading_completion(exchange, request, origin_s=origin_s, now_s=now_s)
    return next(record for record in slices if record is not None)


def reading_completion(
    exchange: Exchange, request: PromptRequest, *, origin_s: float, now_s: float
) -> Iterator[RequestRecord | None]:
    """The record of one exchange; a stream that did not end well is a failure, whatever it brought.

    A success ends with its last token: the frames after it (usage, end mark) do not lengthen it.

    Args:
        origin_s: the stage's first send; the record's times count from it.
        now_s: taken as the end of an exchange that is still in flight.
    """
    stream = Stream()
    for count, _ in enumerate(reading(stream, exchange.pieces), 1):
        if count % EVENTS_A_SLICE == 0:
            yield None
    unfinished = exchange.ended_s is None
    source, chunks = token_counts(stream)
    error = None if unfinished else _error(exchange, stream, chunks)
    times, longest_stall_s = token_arrivals([(at_s - origin_s, count) for at_s, count in chunks])
    ended_s = (exchange.ended_s if exchange.ended_s is not None else now_s) - origin_s
    yield RequestRecord(
        index=request.index,
        intended_s=exchange.intended_s - origin_s,
        sent_s=exchange.sent_s - origin_s,
        first_token_s=times[0] if times else None,
        first_answer_s=None if stream.first_answer_s is None else stream.first_answer_s - origin_s,
        finished_s=times[-1] if times and error is None and not unfinished else ended_s,
        token_times_s=times,
        longest_stall_s=longest_stall_s,
        num_prompt_tokens=request.num_prompt_tokens if stream.prompt_tokens is None else stream.prompt_tokens,
        num_output_tokens=len(times),
        asked_output_tokens=request.max_tokens,
        token_source=source,
        error=error,
        rejected=exchange.status == HTTPStatus.SERVICE_UNAVAILABLE,
        unfinished=unfinished,
    )


def _error(exchange: Exchange, stream: Stream, chunks: list[Chunk]) -> str | None:
    if exchange.status is not None and exchange.status != HTTPStatus.OK:
        return f"HTTP {exchange.status}: {message_of_body(exchange.body)}"
    if stream.error is not None:
        return stream.error
    if stream.done or (stream.finished and exchange.fault is None):
        return None if chunks else "no token: the stream ended without one"
    if exchange.fault is not None:
        return exchange.fault
    if not chunks:
        return f"no token: the answer ({exchange.headers.get('content-type', 'no content type')}) held none"
    return "cut stream: it ended without a finish reason and without its end mark"
