"""One streaming completion: the request's bytes, and the record of what came back.

Nothing is parsed while a stream runs: `Connection` keeps stamped bytes, `read_completion` makes sense of them later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from tuner.load.connection import Endpoint, Exchange
from tuner.load.workload import PromptRequest
from tuner.records import RequestRecord

_MAX_MESSAGE_CHARS = 300

TokenSource = Literal["running_usage", "final_usage", "chunks"]


def completion_bytes(request: PromptRequest, *, endpoint: Endpoint, model: str) -> bytes:
    """The bytes of a streamed `POST /v1/completions` that asks for token counts in every chunk."""
    body = {
        "model": model,
        "prompt": request.prompt_token_ids,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "ignore_eos": request.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return endpoint.post_json("/v1/completions", json.dumps(body, separators=(",", ":")).encode())


def events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Server-sent events with the time of the read that completed each; lines may end in LF or CRLF.

    A last event without its blank line is given too: the stream may have been cut, and the caller judges.
    """
    lines: list[str] = []
    rest = b""
    at_s = 0.0
    for at_s, piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for raw in whole:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                lines.append(line[5:].decode(errors="replace").removeprefix(" "))
            elif not line and lines:
                yield at_s, "\n".join(lines)
                lines.clear()
    if rest.startswith(b"data:"):
        lines.append(rest[5:].decode(errors="replace").removeprefix(" "))
    if lines:
        yield at_s, "\n".join(lines)


@dataclass(slots=True)
class _Stream:
    """What a stream's events said, in order."""

    chunks: list[tuple[float, int]]
    """(time, tokens) of each event that brought tokens: by running usage, else one for each event with text."""

    running: int = 0
    """Output tokens so far by running usage."""

    output_tokens: int | None = None
    """The last count that the server gave."""

    prompt_tokens: int | None = None
    has_running_usage: bool = False
    done: bool = False
    finished: bool = False
    error: str | None = None


def _read_events(pieces: Sequence[tuple[float, bytes]]) -> _Stream:
    stream = _Stream(chunks=[])
    for at_s, data in events(pieces):
        if data == "[DONE]":
            stream.done = True
            break
        try:
            frame = json.loads(data)
        except ValueError:
            stream.error = f"cut stream: {data[:80]!r} is not JSON"
            break
        if not isinstance(frame, dict):
            stream.error = f"unexpected event: {data[:80]!r}"
            break
        if frame.get("error"):
            stream.error = f"error in the stream: {_message(frame)}"
            break
        _read_frame(stream, at_s, frame)
    return stream


def _read_frame(stream: _Stream, at_s: float, frame: dict[str, Any]) -> None:
    choices = frame.get("choices") or []
    usage = frame.get("usage") or {}
    if usage:
        stream.prompt_tokens = usage.get("prompt_tokens", stream.prompt_tokens)
        stream.output_tokens = usage.get("completion_tokens", stream.output_tokens)
    if not choices:
        return
    stream.finished = stream.finished or any(choice.get("finish_reason") for choice in choices)
    if usage.get("completion_tokens") is not None:
        stream.has_running_usage = True
        grown = usage["completion_tokens"] - stream.running
        stream.running += grown
    else:
        grown = int(any(choice.get("text") for choice in choices))
    if grown > 0:
        stream.chunks.append((at_s, grown))


def _count_by_final_usage(chunks: list[tuple[float, int]], total: int) -> list[tuple[float, int]]:
    """Spread the server's last count evenly over the chunks with text; one each where they agree."""
    ends = [round(total * (i + 1) / len(chunks)) for i in range(len(chunks))]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return [(at_s, count) for (at_s, _), count in zip(chunks, counts, strict=True) if count]


def token_arrivals(chunks: Sequence[tuple[float, int]]) -> tuple[tuple[float, ...], float]:
    """Arrival time of each token, and the longest gap between two arrivals.

    k tokens that arrive together, in one event or one read, are k equal parts of the gap that they close.
    Tokens that arrive with the first one close no gap: all have its time.
    """
    reads: list[list[Any]] = []
    for at_s, count in chunks:
        if reads and reads[-1][0] == at_s:
            reads[-1][1] += count
        else:
            reads.append([at_s, count])
    if not reads:
        return (), 0.0
    first_s, first_count = reads[0]
    times: list[float] = [first_s] * first_count
    longest = 0.0
    previous = first_s
    for at_s, count in reads[1:]:
        gap = at_s - previous
        longest = max(longest, gap)
        times.extend(previous + gap * part / count for part in range(1, count))
        times.append(at_s)
        previous = at_s
    return tuple(times), longest


def read_completion(exchange: Exchange, request: PromptRequest, *, origin_s: float, now_s: float) -> RequestRecord:
    """The record of one exchange; a stream that did not end well is a failure, whatever it brought.

    A success ends with its last token: the frames after it (usage, end mark) do not lengthen it.

    Args:
        origin_s: the stage's first send; the record's times count from it.
        now_s: taken as the end of an exchange that is still in flight.
    """
    stream = _read_events(exchange.pieces)
    unfinished = exchange.ended_s is None
    error = None if unfinished else _error(exchange, stream)
    source, chunks = _token_counts(stream)
    times, longest_stall_s = token_arrivals([(at_s - origin_s, count) for at_s, count in chunks])
    ended_s = (exchange.ended_s if exchange.ended_s is not None else now_s) - origin_s
    return RequestRecord(
        index=request.index,
        intended_s=exchange.intended_s - origin_s,
        sent_s=exchange.sent_s - origin_s,
        first_token_s=times[0] if times else None,
        finished_s=times[-1] if times and error is None and not unfinished else ended_s,
        token_times_s=times,
        longest_stall_s=longest_stall_s,
        num_prompt_tokens=len(request.prompt_token_ids) if stream.prompt_tokens is None else stream.prompt_tokens,
        num_output_tokens=len(times),
        asked_output_tokens=request.max_tokens,
        token_source=source,
        error=error,
        rejected=exchange.status == HTTPStatus.SERVICE_UNAVAILABLE,
        unfinished=unfinished,
    )


def _token_counts(stream: _Stream) -> tuple[TokenSource, list[tuple[float, int]]]:
    if stream.has_running_usage:
        missing = (stream.output_tokens or 0) - stream.running
        if missing > 0 and stream.chunks:
            at_s, count = stream.chunks[-1]
            return "running_usage", [*stream.chunks[:-1], (at_s, count + missing)]
        return "running_usage", stream.chunks
    if stream.output_tokens is not None and stream.chunks:
        return "final_usage", _count_by_final_usage(stream.chunks, stream.output_tokens)
    return "chunks", stream.chunks


def _error(exchange: Exchange, stream: _Stream) -> str | None:
    if exchange.status is not None and exchange.status != HTTPStatus.OK:
        return f"HTTP {exchange.status}: {_message_of_body(exchange.body)}"
    if stream.error is not None:
        return stream.error
    if stream.done or (stream.finished and exchange.fault is None):
        return None if stream.chunks else "no token: the stream ended without one"
    if exchange.fault is not None:
        return exchange.fault
    if not exchange.pieces or not stream.chunks:
        return f"no token: the answer ({exchange.headers.get('content-type', 'no content type')}) held none"
    return "cut stream: it ended without a finish reason and without its end mark"


def _message_of_body(body: bytes) -> str:
    text = body.decode(errors="replace")
    try:
        frame = json.loads(text)
    except ValueError:
        return text[:_MAX_MESSAGE_CHARS].strip() or "empty answer"
    return _message(frame) if isinstance(frame, dict) else text[:_MAX_MESSAGE_CHARS]


def _message(frame: dict[str, Any]) -> str:
    """The text of an error: `{"error": {"message"}}` (OpenAI), `{"error": text}`, `{"message"}`, or all of it."""
    error = frame.get("error", frame)
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_MAX_MESSAGE_CHARS]
