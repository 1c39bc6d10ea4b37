"""A request: what was asked, how far it has come, why it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum


class RequestState(StrEnum):
    """Where a request is. Preempted requests wait again, with their outputs kept."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API (`abort`: the client went away)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


MAX_LOGPROBS = 20
"""Most likely tokens a request may ask to be told of (vLLM: `max_logprobs`). Unit: tokens a token."""


_RANGES = {
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "temperature": (0, 1000),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
"""The least and the most of what makes sense; the server's are these too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Raises:
        ValueError: for a number out of its range, naming both.
    """

    max_tokens: int
    """Most tokens to generate. Unit: tokens."""

    min_tokens: int = 0
    """Tokens to generate before an end-of-sequence or stop token may be drawn. Unit: tokens."""

    temperature: float = 1.0
    """0 is greedy."""

    top_p: float = 1.0
    """Draw from the smallest set of tokens with at least this probability. In (0, 1]; 1 is all."""

    top_k: int = 0
    """Draw from this many most likely tokens; 0 is all."""

    min_p: float = 0.0
    """Draw from tokens at least this share as likely as the most likely one. In [0, 1]."""

    presence_penalty: float = 0.0
    """Taken off the score of every token that was generated before."""

    frequency_penalty: float = 0.0
    """Taken off the score of a token once for each time it was generated before."""

    repetition_penalty: float = 1.0
    """Divides positive scores, multiplies negative ones, of tokens in the prompt or generated before; 1 is none."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, as the end of sequence does; `ignore_eos` does not touch them."""

    num_logprobs: int | None = None
    """How many of the most likely tokens to report with each token drawn; None reports nothing, 0 the drawn one."""

    seed: int | None = None
    """None draws from the engine's own generator; any integer, 0 included, makes the request repeatable."""

    ignore_eos: bool = False
    """Go on to `max_tokens` whatever the model says; load tests need exact lengths."""

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:  # NaN neither
                raise ValueError(f"{name}={value} is not from {least} to {most}")
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MAX_LOGPROBS:
            raise ValueError(f"num_logprobs={self.num_logprobs} is not from 0 to {MAX_LOGPROBS}")

    @property
    def has_penalties(self) -> bool:
        """Whether scores depend on the tokens so far."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


@dataclass(slots=True, kw_only=True)
class Request:
    """One request as the scheduler sees it: token ids and counters, no text, no tensors.

    Token ownership, by position:  [0, num_computed_tokens) has its KV in blocks
                                   [num_computed_tokens, num_known_tokens) still to be computed
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None

    num_cached_tokens: int = 0
    """Tokens found in the prefix cache at the last admission. Unit: tokens."""

    block_digests: list[bytes] = field(default_factory=list)
    """Names of its full blocks in the prefix cache, as far as `KvBlocks` has needed them."""

    needs_history: bool = field(init=False)
    """Whether drawing a token looks at all tokens so far."""

    def __post_init__(self) -> None:
        self.needs_history = self.sampling.has_penalties

    @property
    def num_known_tokens(self) -> int:
        """Prompt and outputs so far: what computation has to catch up with. Unit: tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def known_tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Token ids at positions [start, stop) of prompt followed by outputs."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        outputs = self.output_token_ids[max(0, start - num_prompt) : stop - num_prompt]
        return (*self.prompt_token_ids[start:num_prompt], *outputs)
