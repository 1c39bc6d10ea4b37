"""The formats in which traces are published, and our own: from a file to rows of one kind."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from tuner.frozen import Record
from tuner.inputs import InputError

MOONCAKE_BLOCK_TOKENS = 512
"""What one of Mooncake's hashes stands for."""

CHARACTERS_PER_TOKEN = 4
"""Rule of thumb for English text and large vocabularies, where no tokenizer is given."""

TraceFormat = Literal["azure", "burstgpt", "mooncake", "sharegpt", "jsonl"]


class TraceError(InputError):
    """A trace that cannot be read; the message names the file, the line and the value."""


class Segment(NamedTuple):
    """A stretch of a prompt that is the same wherever its key stands."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    at_s: float | None
    """Since the trace began; None where the trace has no times."""

    input_tokens: int
    output_tokens: int
    segments: tuple[Segment, ...] = ()
    """How the prompt begins, where others begin alike; the rest of it is its own."""

    session: str | None = None
    """The chat it is a turn of."""


def _read_azure(path: Path, tokenizer: str | None) -> Iterator[TraceRow]:  # noqa: ARG001 - same signature as its siblings
    """Azure LLM inference traces, 2023 and 2024 (Azure Public Dataset, `AzureLLMInferenceDataset*.md`).

    CSV with TIMESTAMP, ContextTokens, GeneratedTokens; times are dates with up to seven decimals.
    """
    for line, row in _csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
        except ValueError:
            raise _bad(path, line, "TIMESTAMP", row["TIMESTAMP"], "a date and time") from None
        # Dates without a zone are counted as if in UTC: only differences are used, and no clock change falls between.
        at_s = (at.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()  # noqa: DTZ001
        asked, given = (_count(path, line, row, name) for name in ("ContextTokens", "GeneratedTokens"))
        yield TraceRow(at_s, asked, given)


def _read_burstgpt(path: Path, tokenizer: str | None) -> Iterator[TraceRow | None]:  # noqa: ARG001
    """BurstGPT (github.com/HPMLL/BurstGPT, README): CSV; requests without an answer had failed and are left out.

    Timestamp (seconds), optionally Session ID, Model, Request tokens, Response tokens, Total tokens, Log Type.
    """
    for line, row in _csv_rows(path, ("Timestamp", "Request tokens", "Response tokens")):
        at_s = _number(path, line, row, "Timestamp")
        asked, given = (_count(path, line, row, name, least=0) for name in ("Request tokens", "Response tokens"))
        if not asked or not given:
            yield None
            continue
        session = row.get("Session ID") or None
        yield TraceRow(at_s, asked, given, _chat_segment(session, asked), session)


def _read_mooncake(path: Path, tokenizer: str | None) -> Iterator[TraceRow]:  # noqa: ARG001
    """Mooncake (github.com/kvcache-ai/Mooncake, FAST25 traces): JSON lines, times in milliseconds.

    timestamp, input_length, output_length, hash_ids: each hash stands for 512 tokens and all before them.
    """
    for line, row in _json_rows(path):
        at_s = _number(path, line, row, "timestamp") / 1000
        asked, given = (_count(path, line, row, name) for name in ("input_length", "output_length"))
        hashes = row.get("hash_ids", [])
        if not isinstance(hashes, list) or not all(isinstance(each, int) for each in hashes):
            raise _bad(path, line, "hash_ids", hashes, "a list of whole numbers")
        left = asked
        segments = []
        for each in hashes:
            size = min(MOONCAKE_BLOCK_TOKENS, left)
            left -= size
            segments.append(Segment(f"block {each}", size))
        yield TraceRow(at_s, asked, given, tuple(each for each in segments if each.num_tokens))


def _read_sharegpt(path: Path, tokenizer: str | None) -> Iterator[TraceRow]:
    """ShareGPT (`ShareGPT_V3_unfiltered_cleaned_split.json` and its kin): a JSON list of chats, without times.

    Each chat has an `id` and `conversations`, a list of `from` (human or gpt) and `value`. A row is an answer; its
    input is all that was said before it.
    """
    count = _counter(tokenizer)
    try:
        chats = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TraceError(f"{path}: not JSON: {error}") from None
    if not isinstance(chats, list):
        raise TraceError(f"{path}: a list of chats is needed, this is {type(chats).__name__}")
    for number, chat in enumerate(chats):
        turns = chat.get("conversations") if isinstance(chat, dict) else None
        if not isinstance(turns, list):
            raise _bad(path, number, "chat", chat, "an object with a list `conversations`", unit="chat")
        said = 0
        for turn in turns:
            who, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
            if not isinstance(who, str) or not isinstance(text, str):
                raise _bad(path, number, "turn", turn, "an object with texts `from` and `value`", unit="chat")
            tokens = count(text)
            if who in {"gpt", "chatgpt", "assistant", "bing", "bard"} and said and tokens:
                session = str(number)
                yield TraceRow(None, said, tokens, _chat_segment(session, said), session)
            said += tokens


class _Line(Record):
    at_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    input_tokens: int = Field(ge=1, strict=True)
    output_tokens: int = Field(ge=1, strict=True)
    session: str | None = None
    prefix: str | None = None
    prefix_tokens: int | None = Field(default=None, ge=1, strict=True)

    @model_validator(mode="after")
    def _prefix_with_its_length(self) -> _Line:
        if (self.prefix is None) != (self.prefix_tokens is None):
            raise ValueError("prefix (a name) and prefix_tokens (its length) go together")
        if (self.prefix_tokens or 0) > self.input_tokens:
            raise ValueError(f"prefix_tokens={self.prefix_tokens} is above input_tokens={self.input_tokens}")
        return self


def _read_jsonl(path: Path, tokenizer: str | None) -> Iterator[TraceRow]:  # noqa: ARG001
    """Our own: JSON lines with input_tokens, output_tokens; optionally at_s, session, prefix with prefix_tokens."""
    for line, row in _json_rows(path):
        try:
            said = _Line.model_validate(row)
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"])) or "line"
            raise _bad(path, line, place, fault["input"], fault["msg"].removeprefix("Value error, ")) from None
        segments: tuple[Segment, ...] = ()
        if said.prefix is not None and said.prefix_tokens is not None:
            segments = (Segment(f"prefix {said.prefix}", said.prefix_tokens),)
        rest = said.input_tokens - sum(segment.num_tokens for segment in segments)
        segments += _chat_segment(said.session, rest)
        yield TraceRow(said.at_s, said.input_tokens, said.output_tokens, segments, said.session)


READERS: dict[TraceFormat, Callable[[Path, str | None], Iterable[TraceRow | None]]] = {
    "azure": _read_azure,
    "burstgpt": _read_burstgpt,
    "mooncake": _read_mooncake,
    "sharegpt": _read_sharegpt,
    "jsonl": _read_jsonl,
}
"""From a file, and a tokenizer where there is one, to its rows; None for a row that is no request to send."""


def _chat_segment(session: str | None, num_tokens: int) -> tuple[Segment, ...]:
    """A turn is the beginning of its chat, as far as it goes: what was said before stands before it again."""
    return (Segment(f"session {session}", num_tokens),) if session is not None and num_tokens else ()


def _counter(folder: str | None) -> Callable[[str], int]:
    if folder is None:
        return lambda text: -(-len(text) // CHARACTERS_PER_TOKEN)
    from tokenizers import Tokenizer

    path = Path(folder)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TraceError(f"there is no tokenizer at {file}")
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _csv_rows(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            header = next(reader, [])
            missing = [name for name in needed if name not in header]
            if missing:
                raise TraceError(f"{path}, line 1: the header {','.join(header)!r} lacks {', '.join(missing)}")
            for row in reader:
                if row:
                    if len(row) != len(header):
                        raise _bad(path, reader.line_num, "row", ",".join(row), f"{len(header)} values")
                    yield reader.line_num, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise TraceError(f"{path}, line {reader.line_num}: not CSV: {error}") from None


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise _bad(path, line, "line", text.strip(), "a JSON object")
            yield line, row


def _number(path: Path, line: int, row: dict[str, Any], name: str, needed: str = "a number of at least 0") -> float:
    try:
        number = float(row[name])
    except (KeyError, TypeError, ValueError):
        number = float("nan")
    if not 0 <= number < float("inf"):
        raise _bad(path, line, name, row.get(name), needed)
    return number


def _count(path: Path, line: int, row: dict[str, Any], name: str, *, least: int = 1) -> int:
    needed = f"a whole number of at least {least}"
    number = _number(path, line, row, name, needed)
    if number < least or number != int(number):
        raise _bad(path, line, name, row.get(name), needed)
    return int(number)


def _bad(path: Path, place: int, name: str, value: object, needed: str, *, unit: str = "line") -> TraceError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return TraceError(f"{path}, {unit} {place}: {name} is {shown}, needed is {needed}")
