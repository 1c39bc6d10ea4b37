"""What a stream said: server-sent events of a completion or a chat to tokens and their times. Pure; nothing raises.

Servers differ in where text stands (`text`, `delta.content`, and for reasoning `delta.reasoning_content` or
`delta.reasoning`), in how many tokens an event holds, and in when they count: in every event, in the last, or never.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

TokenSource = Literal["running_usage", "final_usage", "chunks"]
Chunk = tuple[float, int]
"""(time, tokens) of an event that brought some."""

_ANSWER_FIELDS = ("text", "content", "refusal", "tool_calls")
_REASONING_FIELDS = ("reasoning_content", "reasoning")
_MAX_MESSAGE_CHARS = 300
_MOST_TOKENS = 1_000_000
"""A larger count is a slip of the server: it is taken for none."""


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


@dataclass(frozen=True, slots=True)
class _Event:
    at_s: float
    has_text: bool
    count: int | None
    """Output tokens so far, where the event says."""


@dataclass(slots=True)
class Stream:
    """What a stream's events said, in order."""

    events: list[_Event] = field(default_factory=list)
    """Those with choices."""

    output_tokens: int | None = None
    """The last count that the server gave."""

    prompt_tokens: int | None = None
    first_answer_s: float | None = None
    """When the first text came that is not reasoning."""

    answer: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    done: bool = False
    finished: bool = False
    error: str | None = None


def read_stream(pieces: Sequence[tuple[float, bytes]]) -> Stream:
    """Read a stream to its end mark, its error, or where it was cut."""
    stream = Stream()
    for _ in reading(stream, pieces):
        pass
    return stream


def reading(stream: Stream, pieces: Sequence[tuple[float, bytes]]) -> Iterator[None]:
    """The same into `stream`, an event at a time: who has others to see to may pause after any."""
    for at_s, data in events(pieces):
        if data == "[DONE]":
            stream.done = True
            break
        try:
            frame = json.loads(data)
        except (ValueError, RecursionError):
            stream.error = f"cut stream: {data[:80]!r} is not JSON"
            break
        if not isinstance(frame, dict):
            stream.error = f"unexpected event: {data[:80]!r}"
            break
        if frame.get("error") or frame.get("object") == "error":
            stream.error = f"error in the stream: {message_of(frame)}"
            break
        _read_frame(stream, at_s, frame)
        yield


def _read_frame(stream: Stream, at_s: float, frame: dict[str, Any]) -> None:
    usage = _object(frame.get("usage"))
    count = _count(usage.get("completion_tokens"))
    prompt_tokens = _count(usage.get("prompt_tokens"))
    stream.output_tokens = stream.output_tokens if count is None else count
    stream.prompt_tokens = stream.prompt_tokens if prompt_tokens is None else prompt_tokens
    choices = frame.get("choices")
    if not isinstance(choices, list) or not choices:
        return
    has_text = has_answer = False
    for choice in map(_object, choices):
        said = {**_object(choice.get("delta")), **{name: choice[name] for name in ("text",) if name in choice}}
        has_answer = has_answer or any(said.get(name) for name in _ANSWER_FIELDS)
        has_text = has_text or has_answer or any(said.get(name) for name in _REASONING_FIELDS)
        stream.answer += [said[name] for name in ("text", "content") if isinstance(said.get(name), str)]
        stream.token_ids += _ids(choice.get("token_ids"))
        stream.finished = stream.finished or bool(choice.get("finish_reason"))
    if has_answer and stream.first_answer_s is None:
        stream.first_answer_s = at_s
    stream.events.append(_Event(at_s, has_text, count))


def token_counts(stream: Stream) -> tuple[TokenSource, list[Chunk]]:
    """Where tokens are counted by, and when how many came.

    By the running counts if every event with text has one; else by the last count, spread evenly over the events with
    text; else one an event. A count that has none where there is text counts nothing.
    """
    texts = [(event.at_s, 1) for event in stream.events if event.has_text]
    if all(event.count is not None for event in stream.events if event.has_text):
        chunks = _by_running_count(stream)
        if chunks:
            return "running_usage", chunks
    if stream.output_tokens and texts:
        return "final_usage", _spread(texts, stream.output_tokens)
    return "chunks", texts


def _by_running_count(stream: Stream) -> list[Chunk]:
    chunks: list[Chunk] = []
    running = 0
    for event in stream.events:
        if event.count is not None and event.count > running:
            chunks.append((event.at_s, event.count - running))
            running = event.count
    missing = (stream.output_tokens or 0) - running
    if chunks and missing > 0:
        at_s, count = chunks[-1]
        chunks[-1] = (at_s, count + missing)
    return chunks


def _spread(chunks: list[Chunk], total: int) -> list[Chunk]:
    ends = [round(total * (i + 1) / len(chunks)) for i in range(len(chunks))]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return [(at_s, count) for (at_s, _), count in zip(chunks, counts, strict=True) if count]


def token_arrivals(chunks: Sequence[Chunk]) -> tuple[tuple[float, ...], float]:
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


def message_of(frame: dict[str, Any]) -> str:
    """The text of an error: `{"error": {"message"}}` (OpenAI), `{"error": text}`, `{"message"}`, or all of it."""
    error = frame.get("error") or frame
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_MAX_MESSAGE_CHARS]


def message_of_body(body: bytes) -> str:
    """The text of an error page, whatever it is."""
    text = body.decode(errors="replace")
    try:
        frame = json.loads(text)
    except (ValueError, RecursionError):
        return text[:_MAX_MESSAGE_CHARS].strip() or "empty answer"
    return message_of(frame) if isinstance(frame, dict) else text[:_MAX_MESSAGE_CHARS]


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_TOKENS:
        return None
    return value


def _ids(value: object) -> list[int]:
    return [each for each in value if isinstance(each, int)] if isinstance(value, list) else []
