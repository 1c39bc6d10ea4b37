"""From a workload to the requests that are sent: prompts no prefix cache has seen, but for what they share by design.

A conversation is a generator: it gives a request, is sent its answer, and gives the next turn, if there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import NamedTuple

import numpy as np

from tuner.load.arrivals import think_times_s
from tuner.load.lengths import pairs
from tuner.load.text import WORDS, TextScale, as_text
from tuner.load.trace_formats import TraceRow
from tuner.load.workload import Workload


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One request, ready to be sent."""

    index: int
    prompt_token_ids: tuple[int, ...]
    """Empty where the prompt is text."""

    max_tokens: int
    temperature: float
    ignore_eos: bool
    num_prompt_tokens: int
    messages: tuple[Message, ...] = ()
    num_shared_tokens: int = 0
    """How much of the prompt a prefix cache may know by design: a shared beginning, the history of a chat."""

    think_s: float = 0.0
    """To wait after the previous turn's answer."""

    has_next_turn: bool = False
    asks_token_ids: bool = False
    """Whether the next turn repeats this answer by the ids the server tells."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the next turn's history."""

    num_tokens: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    """Where the server tells them; else ids are made up."""


Conversation = Generator[PromptRequest, Answer, None]


def conversations(
    workload: Workload,
    *,
    token_ids: range,
    max_model_len: int,
    entropy: Sequence[int],
    text: TextScale | None = None,
    asks_token_ids: bool = False,
) -> Iterator[Conversation]:
    """Draw conversations without end; the same entropy gives the same sequence, any other shares no prompt with it.

    Lengths follow from the study's seed alone: every stage of every trial gets the same sequence of them, so that two
    settings do not differ by the luck of the draw (common random numbers).

    Args:
        token_ids: ids that are ordinary tokens in the model's vocabulary.
        entropy: (study seed, trial, stage, repeat): whatever tells this sequence from all others of a study.
        text: how long words are, for a workload that is sent as text.
        asks_token_ids: whether a server tells the ids of an answer that the next turn repeats.

    Raises:
        WorkloadError: where the longest request does not fit `max_model_len`.
    """
    workload.check_fits(max_model_len)
    writer = _Writer(workload, token_ids, tuple(entropy), text, asks_token_ids)
    trace = workload.fitting_trace(max_model_len)
    if trace is None:
        return _drawn(workload, writer)
    return _by_chat(trace.rows, writer) if workload.loop == "closed" else _by_row(trace.rows, writer)


@dataclass(slots=True)
class _Writer:
    """Puts prompts together from ids; the only place that knows whether they are sent as ids or as words."""

    workload: Workload
    vocabulary: range
    entropy: tuple[int, ...]
    scale: TextScale | None
    asks_token_ids: bool
    indices: Iterator[int] = field(default_factory=count)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(np.random.SeedSequence(list(self.entropy)))
        if self.scale is not None:
            self.vocabulary = range(len(WORDS))

    def own(self, num_tokens: int, rng: np.random.Generator | None = None, *, opens: bool = False) -> list[int]:
        """A stretch nobody else has.

        Args:
            opens: whether it is a message of its own, with what the chat template adds to one.
        """
        size = num_tokens
        if self.scale is not None:
            size = self.scale.num_words(num_tokens - (self.scale.overhead_tokens if opens else 0))
        ids: list[int] = (rng or self.rng).integers(self.vocabulary.start, self.vocabulary.stop, size=size).tolist()
        return ids

    def shared(self, key: str, num_tokens: int) -> list[int]:
        """The beginning of the one endless stretch of this key."""
        digest = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
        return self.own(num_tokens, np.random.default_rng(np.random.SeedSequence([*self.entropy, digest])))

    def branch(self) -> np.random.Generator:
        """A source of its own for what is drawn later, so that the order of answers changes nothing."""
        return np.random.default_rng(int(self.rng.integers(2**63)))

    def request(
        self,
        turns: Sequence[list[int]],
        answers: Sequence[Answer] = (),
        *,
        num_prompt_tokens: int,
        num_shared_tokens: int,
        max_tokens: int,
        think_s: float = 0.0,
        has_next_turn: bool = False,
    ) -> PromptRequest:
        """The request that says these turns, with the answers between them."""
        ids: tuple[int, ...] = ()
        messages: tuple[Message, ...] = ()
        if self.scale is None:
            said = [turn + list(answer.token_ids) for turn, answer in zip(turns, answers, strict=False)]
            ids = tuple(token for stretch in (*said, turns[-1]) for token in stretch)
        else:
            users = [Message("user", as_text(turn)) for turn in turns]
            replies = [Message("assistant", answer.text) for answer in answers]
            messages = (*(each for pair in zip(users, replies, strict=False) for each in pair), users[-1])
        return PromptRequest(
            index=next(self.indices),
            prompt_token_ids=ids,
            max_tokens=max_tokens,
            temperature=self.workload.temperature,
            ignore_eos=self.workload.ignore_eos,
            num_prompt_tokens=num_prompt_tokens,
            messages=messages,
            num_shared_tokens=num_shared_tokens,
            think_s=think_s,
            has_next_turn=has_next_turn,
            asks_token_ids=self.asks_token_ids and has_next_turn,
        )


def _drawn(workload: Workload, writer: _Writer) -> Iterator[Conversation]:
    # The study's seed, so that stages and trials are drawn the same lengths.
    rng = np.random.default_rng(np.random.SeedSequence(writer.entropy[0]))
    lengths = pairs(*workload.lengths, correlation=workload.length_correlation, rng=rng)
    num_turns = workload.chat.turns if workload.chat else 1
    think_times = think_times_s(workload.chat.think_time if workload.chat else 0.0, rng)
    while True:
        beginning, num_shared = _beginning(workload, writer, rng)
        turns = [_Turn(*next(lengths), next(think_times) if number else 0.0) for number in range(num_turns)]
        yield _conversation(writer, turns, beginning=beginning, num_shared=num_shared)


def _beginning(workload: Workload, writer: _Writer, rng: np.random.Generator) -> tuple[list[int], int]:
    prefix = workload.shared_prefix
    if prefix is None or rng.random() >= prefix.share:
        return [], 0
    return writer.shared(f"prefix {rng.integers(prefix.groups)}", prefix.tokens), prefix.tokens


class _Turn(NamedTuple):
    input_tokens: int
    """New in this turn."""

    output_tokens: int
    think_s: float = 0.0


def _conversation(writer: _Writer, turns: Sequence[_Turn], *, beginning: list[int], num_shared: int) -> Conversation:
    """A chat, or a single request: each turn is what was said before and something new."""
    rng = writer.branch() if len(turns) > 1 else writer.rng
    said: list[list[int]] = []
    answers: list[Answer] = []
    num_history = num_shared
    for number, turn in enumerate(turns):
        said.append((beginning if number == 0 else []) + writer.own(turn.input_tokens, rng, opens=True))
        num_prompt_tokens = num_history + turn.input_tokens
        answer = yield writer.request(
            said,
            answers,
            num_prompt_tokens=num_prompt_tokens,
            num_shared_tokens=num_history,
            max_tokens=turn.output_tokens,
            think_s=turn.think_s,
            has_next_turn=number + 1 < len(turns),
        )
        if not answer.token_ids and writer.scale is None:
            answer = Answer(answer.num_tokens, answer.text, tuple(writer.own(answer.num_tokens, rng)))
        answers.append(answer)
        num_history = num_prompt_tokens + answer.num_tokens


def _by_chat(rows: Sequence[TraceRow], writer: _Writer) -> Iterator[Conversation]:
    """A trace for users who wait: rows of one session are turns of one chat; again from the start when all are sent."""
    known: dict[str, int] = {}
    for chat in cycle(_chats(rows)):
        if len(chat) == 1:
            yield _single(writer, chat[0], known=known)
            continue
        before = 0
        turns = []
        for row in chat:
            turns.append(_Turn(max(1, row.input_tokens - before), row.output_tokens))
            before = max(before, row.input_tokens) + row.output_tokens
        yield _conversation(writer, turns, beginning=[], num_shared=0)


def _chats(rows: Sequence[TraceRow]) -> list[list[TraceRow]]:
    chats: dict[str, list[TraceRow]] = {}
    for number, row in enumerate(rows):
        chats.setdefault(f"row {number}" if row.session is None else f"session {row.session}", []).append(row)
    return list(chats.values())


def _by_row(rows: Sequence[TraceRow], writer: _Writer) -> Iterator[Conversation]:
    """A trace for the clock: every row by itself, when its time has come, whatever became of the others."""
    known: dict[str, int] = {}
    return (_single(writer, row, known=known) for row in rows)


def _single(writer: _Writer, row: TraceRow, *, known: dict[str, int]) -> Conversation:
    ids: list[int] = []
    num_shared, still_shared = 0, True
    for segment in row.segments:
        ids += writer.shared(segment.key, segment.num_tokens)
        seen = min(known.get(segment.key, 0), segment.num_tokens)
        num_shared += seen if still_shared else 0
        still_shared = still_shared and seen == segment.num_tokens
        known[segment.key] = max(known.get(segment.key, 0), segment.num_tokens)
    rest = row.input_tokens - sum(segment.num_tokens for segment in row.segments)
    ids += writer.own(rest, opens=True) if rest > 0 else []
    yield writer.request(
        [ids], num_prompt_tokens=row.input_tokens, num_shared_tokens=num_shared, max_tokens=row.output_tokens
    )
