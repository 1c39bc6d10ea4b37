"""OpenAI's answers as bytes: whole ones, the events of a stream, usage, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import uuid4

from engine.choice import Piece, TokenReport
from engine.protocol import ApiError

DONE_EVENT = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0
"""JSON has no infinity, and no NaN (vLLM's value)."""


@dataclass(slots=True)
class Usage:
    """Token counts of one answer, all choices together; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int = 0

    def as_json(self) -> str:
        """The `usage` object."""
        total = self.prompt_tokens + self.completion_tokens
        return (
            f'{{"prompt_tokens":{self.prompt_tokens},"completion_tokens":{self.completion_tokens},'
            f'"total_tokens":{total}}}'
        )


class AnswerFormat:
    """Writes one answer, whole or in chunks; what is the same in every chunk is put together once."""

    def __init__(self, model: str, *, is_chat: bool, prompts: Sequence[tuple[int, ...]] | None = None) -> None:
        """Begin an answer.

        Args:
            model: the name it is served under.
            is_chat: which of the two endpoints answers.
            prompts: each choice's prompt, where token ids are to be told; they stand where vLLM has them: a chat's
                prompt, of which there is one, beside the choices, else in the choice, and in the first of its chunks.
        """
        created = int(datetime.now(UTC).timestamp())
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}"
        whole, chunk = ("chat.completion", "chat.completion.chunk") if is_chat else ("text_completion",) * 2
        rest = f'"created":{created},"model":{json.dumps(model)},"choices":['
        self._is_chat = is_chat
        self._prompts = prompts
        self._begun: set[int] = set()
        self._whole = f'{{"id":"{answer_id}","object":"{whole}",{rest}'
        self._chunk = f'data: {{"id":"{answer_id}","object":"{chunk}",{rest}'
        self._before_index = self._chunk + '{"index":'
        self._before_text, self._after_text = (
            (',"delta":{"content":', '},"logprobs":') if is_chat else (',"text":', ',"logprobs":')
        )

    def chunk(self, index: int, piece: Piece, usage: str) -> bytes:
        """The event of one token of a choice. `usage` is what goes after the choices."""
        logprobs = "null" if piece.report is None else json.dumps(self._logprobs([piece.report]))
        why = "null" if piece.finish_reason is None else _end(piece)
        return (
            f"{self._before_index}{index}{self._before_text}{json.dumps(piece.text)}{self._after_text}{logprobs}"
            f',"finish_reason":{why}{self._chunk_ids(index, piece)}}}]{usage}}}\n\n'
        ).encode()

    def _chunk_ids(self, index: int, piece: Piece) -> str:
        if self._prompts is None:
            return ""
        is_first = not self._is_chat and index not in self._begun
        self._begun.add(index)
        return f'{self._prompt_ids(index) if is_first else ""},"token_ids":[{piece.token_id}]'

    def _prompt_ids(self, index: int) -> str:
        return "" if self._prompts is None else f',"prompt_token_ids":{json.dumps(self._prompts[index])}'

    def role_chunk(self, index: int, usage: str) -> bytes:
        """The event that opens a choice of a chat answer, before its first token."""
        rest = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return f"{self._before_index}{index},{rest}]{self._prompt_ids(index)}{usage}}}\n\n".encode()

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event with the final counts, and no choices."""
        return f'{self._chunk}],"usage":{usage.as_json()}}}\n\n'.encode()

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The JSON of an answer that was not streamed: the pieces of each choice, none empty."""
        told = ",".join(self._choice(index, pieces) for index, pieces in enumerate(choices))
        prompt = self._prompt_ids(0) if self._is_chat else ""
        return f'{self._whole}{told}]{prompt},"usage":{usage.as_json()}}}'.encode()

    def _choice(self, index: int, pieces: Sequence[Piece]) -> str:
        text = json.dumps("".join(piece.text for piece in pieces))
        content = f'"message":{{"role":"assistant","content":{text}}}' if self._is_chat else f'"text":{text}'
        reports = [piece.report for piece in pieces if piece.report is not None]
        logprobs = json.dumps(self._logprobs(reports)) if reports else "null"
        ids = "" if self._prompts is None else f',"token_ids":{json.dumps([piece.token_id for piece in pieces])}'
        prompt = "" if self._is_chat else self._prompt_ids(index)
        return f'{{"index":{index},{content},"logprobs":{logprobs},"finish_reason":{_end(pieces[-1])}{prompt}{ids}}}'

    def _logprobs(self, reports: Sequence[TokenReport]) -> dict[str, object]:
        if self._is_chat:
            return {"content": [_chat_token(report) for report in reports]}
        return {
            "text_offset": [report.text_offset for report in reports],
            "token_logprobs": [_finite(report.logprob) for report in reports],
            "tokens": [report.token for report in reports],
            # With the token drawn among them, likely or not. Tokens that read the same share an entry.
            "top_logprobs": [
                {token: _finite(logprob) for token, logprob in ((report.token, report.logprob), *report.top)}
                for report in reports
            ],
        }


def _end(piece: Piece) -> str:
    """A finish reason, and what vLLM adds to it."""
    reason = "null" if piece.finish_reason is None else f'"{piece.finish_reason.value}"'
    return f'{reason},"stop_reason":{json.dumps(piece.stop_reason)}'


def _chat_token(report: TokenReport) -> dict[str, object]:
    top = [_named(token, logprob) for token, logprob in report.top]
    return {**_named(report.token, report.logprob), "top_logprobs": top}


def _named(token: str, logprob: float) -> dict[str, object]:
    # A token of half a character has no text whose bytes these could be.
    as_bytes = None if "\ufffd" in token else list(token.encode())
    return {"token": token, "logprob": _finite(logprob), "bytes": as_bytes}


def _finite(logprob: float) -> float:
    return max(_LEAST_LOGPROB, logprob)  # in this order NaN loses


def error_event(error: ApiError) -> bytes:
    """The event that ends a stream which cannot go on."""
    return f"data: {json.dumps(error.body())}\n\n".encode()
