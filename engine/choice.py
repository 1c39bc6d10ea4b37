"""One choice of an answer: its tokens become text, up to where the text stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.frontend import NewToken
from engine.request import FinishReason, SamplingParams
from engine.step import TokenLogprobs
from engine.stop_strings import StopStrings
from engine.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TextStop:
    """Which strings end a choice's text, and whether what ends it belongs to the text."""

    strings: tuple[str, ...] = ()
    included: bool = False
    """Of stop strings and of tokens in `stop_token_ids` alike."""


class TokenReport(NamedTuple):
    """How likely a token was, in words a client can read."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    """(token, log-probability), the most likely first."""

    text_offset: int
    """Where the token's text begins in the choice's. Unit: characters."""


class Piece(NamedTuple):
    """What one token adds to a choice."""

    token_id: int
    text: str
    """May be empty: half a character, a special token, or the beginning of a stop string."""

    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or stop token that ended the choice, if one did."""

    report: TokenReport | None


class Choice:
    """Reads one request's tokens in order; after a piece with a finish reason come no others."""

    def __init__(
        self, tokenizer: TextTokenizer, sampling: SamplingParams, stop: TextStop, *, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._eos_token_ids = eos_token_ids
        self._shows_stop_token = stop.included
        self._detokenizer = tokenizer.detokenizer()
        self._stop_strings = StopStrings(stop.strings, included=stop.included) if stop.strings else None
        self._num_tokens = 0
        self._text_length = 0

    def take(self, token: NewToken) -> Piece:
        """The piece that a token adds."""
        reason = token.finish_reason
        if reason is FinishReason.STOP and not self._shows_stop_token:
            text = self._detokenizer.flush()
        else:
            text = self._detokenizer.push(token.token_id, is_last=reason is not None)
        report = None if token.logprobs is None else self._report(token.token_id, token.logprobs, text)
        stop_reason = self._stop_token(token) if reason is FinishReason.STOP else None
        if self._stop_strings is None:
            return Piece(token.token_id, text, reason, stop_reason, report)
        # As in vLLM, a stop string that ends within the first `min_tokens` tokens is text like any other.
        self._num_tokens += 1
        text, stopped_by = self._stop_strings.push(text, armed=self._num_tokens > self._sampling.min_tokens)
        if stopped_by is not None:
            return Piece(token.token_id, text, FinishReason.STOP, stopped_by, report)
        if reason is not None:
            text += self._stop_strings.flush()
        return Piece(token.token_id, text, reason, stop_reason, report)

    def _stop_token(self, token: NewToken) -> int | None:
        """The token, if it ended the choice by `stop_token_ids`; the end of sequence goes without saying."""
        is_eos = token.token_id in self._eos_token_ids and not self._sampling.ignore_eos
        return token.token_id if token.token_id in self._sampling.stop_token_ids and not is_eos else None

    def _report(self, token_id: int, logprobs: TokenLogprobs, text: str) -> TokenReport:
        name = self._tokenizer.token_text
        top = tuple((name(other), logprob) for other, logprob in logprobs.top)
        own = name(token_id)
        # What was held back before it, half a character that stayed half, comes with it and is not its text.
        num_before = len(text) - len(own) if text.endswith(own) else 0
        report = TokenReport(own, logprobs.logprob, top, self._text_length + num_before)
        self._text_length += len(text)
        return report
