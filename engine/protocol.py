"""The OpenAI HTTP protocol as values: requests as they may be asked, errors, and the pieces of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.request import FinishReason, SamplingParams

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "min_tokens": (0, 1),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
}
"""Fields that would change the output, with the values that ask for what this engine does anyway; null always does."""

_HARMLESS = frozenset(
    {
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"),
        *("parallel_tool_calls", "spaces_between_special_tokens", "include_stop_str_in_output", "priority"),
    }
)
"""Fields that do not change the tokens; they are accepted and have no effect."""


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self._param = param
        self._code = code

    def body(self) -> dict[str, object]:
        """The JSON that tells the client."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self._param, "code": self._code}}


class StreamOptions(BaseModel):
    """When a stream carries token counts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    include_usage: bool = False
    """One more chunk at the end, without choices, holds the final counts."""

    continuous_usage_stats: bool = False
    """Every chunk holds the counts so far."""


class _GenerationRequest(BaseModel):
    """What both endpoints take. Fields this engine does not have may be sent only with a neutral value."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Check what no single field can say.

        Raises:
            ApiError: for a field that this engine does not have and that asks for something.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        for name, value in (self.model_extra or {}).items():
            self._check_extra(name, value)

    def _check_extra(self, name: str, value: object) -> None:
        if value is None or name in _HARMLESS or (name == "min_tokens" and self.ignore_eos):
            return
        if name not in _NEUTRAL:
            raise ApiError(400, f"{name} is not a field this engine knows: leave it out", param=name)
        # Python's 0 equals False, but `logprobs: 0` asks for something.
        if any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in _NEUTRAL[name]):
            return
        raise ApiError(400, f"{name}={value!r} is not supported and would change the output: leave it out", param=name)

    def sampling(self, *, default_max_tokens: int) -> SamplingParams:
        """How to sample, with OpenAI's defaults for what was not said."""
        return SamplingParams(
            max_tokens=self._asked_max_tokens() or default_max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )

    def _asked_max_tokens(self) -> int | None:
        return self.max_tokens


_Request = TypeVar("_Request", bound=_GenerationRequest)


class CompletionRequest(_GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: str | list[int]


class ChatRequest(_GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, object]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    def _asked_max_tokens(self) -> int | None:
        """The newer name of `max_tokens` wins."""
        return self.max_completion_tokens or self.max_tokens

    def plain_messages(self) -> list[dict[str, object]]:
        """The messages with text parts joined into one string, as chat templates expect.

        Raises:
            ApiError: for a message without a role, or a part that is not text.
        """
        return [_plain_message(message) for message in self.messages]


def _plain_message(message: dict[str, object]) -> dict[str, object]:
    if not isinstance(message.get("role"), str):
        raise ApiError(400, "every message needs a role, such as user", param="messages")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise ApiError(
            400, "a message's content may hold text parts only: this engine reads no other", param="messages"
        )
    return {**message, "content": "\n".join(str(text) for text in texts)}


def parse_body(kind: type[_Request], body: bytes) -> _Request:
    """Read a request's body.

    Raises:
        ApiError: naming the first field that is wrong.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        param = str(first["loc"][0]) if first["loc"] else None
        raise ApiError(400, f"{path}: {first['msg']}" if path else first["msg"], param=param) from error
    request.check()
    return request


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int

    def as_json(self) -> str:
        """The `usage` object."""
        total = self.prompt_tokens + self.completion_tokens
        return (
            f'{{"prompt_tokens":{self.prompt_tokens},"completion_tokens":{self.completion_tokens},'
            f'"total_tokens":{total}}}'
        )


class AnswerFormat:
    """Writes one answer, whole or in chunks; what is the same in every chunk is put together once."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        created = int(datetime.now(UTC).timestamp())
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}"
        whole, chunk = ("chat.completion", "chat.completion.chunk") if is_chat else ("text_completion",) * 2
        rest = f'"created":{created},"model":{json.dumps(model)},"choices":['
        self._is_chat = is_chat
        self._whole = f'{{"id":"{answer_id}","object":"{whole}",{rest}'
        self._chunk = f'data: {{"id":"{answer_id}","object":"{chunk}",{rest}'
        self._before_text = self._chunk + ('{"index":0,"delta":{"content":' if is_chat else '{"index":0,"text":')
        self._after_text = ("}" if is_chat else "") + ',"logprobs":null,"finish_reason":'

    def chunk(self, text: str, reason: FinishReason | None, usage: str) -> bytes:
        """The event of one token. `usage` is what `usage_field` gave."""
        why = "null" if reason is None else f'"{reason.value}"'
        return f"{self._before_text}{json.dumps(text)}{self._after_text}{why}}}]{usage}}}\n\n".encode()

    def role_chunk(self, usage: str) -> bytes:
        """The event that opens a chat answer, before its first token."""
        choice = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return f"{self._chunk}{choice}]{usage}}}\n\n".encode()

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event with the final counts, and no choices."""
        return f'{self._chunk}],"usage":{usage.as_json()}}}\n\n'.encode()

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> bytes:
        """The JSON of an answer that was not streamed."""
        message = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice = json.dumps({"index": 0, **message, "logprobs": None, "finish_reason": reason.value})
        return f'{self._whole}{choice}],"usage":{usage.as_json()}}}'.encode()


def error_event(error: ApiError) -> bytes:
    """The event that ends a stream which cannot go on."""
    return f"data: {json.dumps(error.body())}\n\n".encode()


DONE_EVENT = b"data: [DONE]\n\n"
