"""OpenAI's requests as values: what may be asked, what it means to the engine, and how a refusal is told."""

from __future__ import annotations

import reprlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from engine.choice import TextStop
from engine.request import MAX_LOGPROBS, SamplingParams

MAX_CHOICES_PER_PROMPT = 128
_MAX_PROMPTS = 2048
_MAX_STOP_STRINGS = 4
"""These three are OpenAI's limits."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "logit_bias": ({},),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "bad_words": ([],),
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
        *("parallel_tool_calls", "spaces_between_special_tokens", "priority"),
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


def _kind_of_list(value: object) -> str:
    """What a list holds, by its first item."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        return _TEXTS
    return _TOKEN_LISTS if isinstance(first, list) else _TOKENS


def _kind_of_prompt(value: object) -> str:
    return _kind_of_list(value) if isinstance(value, list) else _TEXT


def _kind_of_stop(value: object) -> str:
    return _TEXTS if isinstance(value, list) else _TEXT


_TEXT, _TEXTS, _TOKENS, _TOKEN_LISTS = _KINDS = ("text", "texts", "tokens", "token lists")
_StopString = Annotated[str, Field(min_length=1)]
_Prompt = Annotated[
    Annotated[str, Tag(_TEXT)]
    | Annotated[list[int], Tag(_TOKENS)]
    | Annotated[list[str], Field(max_length=_MAX_PROMPTS), Tag(_TEXTS)]
    | Annotated[list[list[int]], Field(max_length=_MAX_PROMPTS), Tag(_TOKEN_LISTS)],
    Discriminator(_kind_of_prompt),
]
_Stop = Annotated[
    Annotated[_StopString, Tag(_TEXT)] | Annotated[list[_StopString], Field(max_length=_MAX_STOP_STRINGS), Tag(_TEXTS)],
    Discriminator(_kind_of_stop),
]
"""One choice by what is there, so that an error is about what the client meant."""

_NO_SEED = -1
"""As good as none (vLLM: `vllm/sampling_params.py`)."""

_MOST_WRITTEN = 100
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Value = TypeVar("_Value")


def _written(value: object) -> str:
    """A value that is refused, on one line of the error."""
    text = reprlib.repr(value)
    return text if len(text) <= _MOST_WRITTEN else f"{text[:_MOST_WRITTEN]}..."


def _or(asked: _Value | None, default: _Value) -> _Value:
    return default if asked is None else asked


class _GenerationRequest(BaseModel):
    """What both endpoints take. Fields this engine does not have may be sent only with a neutral value."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stop | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_PROMPT)] | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Check what no single field can say.

        Raises:
            ApiError: for fields that do not go together, or one that this engine does not have and that asks for
                something.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if self.best_of not in (None, self.num_choices):
            raise ApiError(
                400,
                f"best_of={self.best_of} with n={self.num_choices}: this engine returns every answer it generates, so "
                "they must be equal; leave best_of out",
                param="best_of",
            )
        for name, value in (self.model_extra or {}).items():
            _check_extra(name, value)

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return _or(self.n, 1)

    def text_stop(self) -> TextStop:
        """What ends the text."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return TextStop(tuple(strings), included=_or(self.include_stop_str_in_output, False))  # noqa: FBT003

    def sampling(self, *, default_max_tokens: int, vocab_size: int) -> SamplingParams:
        """How to sample, with OpenAI's defaults for what was not said.

        Raises:
            ApiError: for more `min_tokens` than `max_tokens`, or stop tokens the model does not have.
        """
        max_tokens = self._asked_max_tokens() or default_max_tokens
        min_tokens = _or(self.min_tokens, 0)
        if min_tokens > max_tokens:
            raise ApiError(400, f"min_tokens={min_tokens} is above max_tokens={max_tokens}", param="min_tokens")
        for token_id in self.stop_token_ids or ():
            if not 0 <= token_id < vocab_size:
                raise ApiError(
                    400,
                    f"stop_token_ids: {token_id} is outside the vocabulary [0, {vocab_size})",
                    param="stop_token_ids",
                )
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(0, _or(self.top_k, 0)),
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids or ())),  # each once: at most the vocabulary
            num_logprobs=self._num_logprobs(),
            seed=None if self.seed == _NO_SEED else self.seed,
            ignore_eos=_or(self.ignore_eos, False),  # noqa: FBT003
        )

    def _asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @abstractmethod
    def _num_logprobs(self) -> int | None:
        """As in `SamplingParams`; the endpoints ask in ways of their own."""


def _check_extra(name: str, value: object) -> None:
    if value is None or name in _HARMLESS:
        return
    if name not in _NEUTRAL:
        raise ApiError(400, f"{name} is not a field this engine knows: leave it out", param=name)
    # Python's 0 equals False, but 0 may ask for something where false does not.
    if any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in _NEUTRAL[name]):
        return
    raise ApiError(
        400, f"{name}={_written(value)} is not supported and would change the output: leave it out", param=name
    )


_Request = TypeVar("_Request", bound=_GenerationRequest)
_NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class CompletionRequest(_GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: _Prompt
    logprobs: _NumLogprobs | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, one or a batch."""
        if _kind_of_prompt(self.prompt) in (_TEXT, _TOKENS):
            return [cast("str | list[int]", self.prompt)]
        return cast("list[str] | list[list[int]]", self.prompt)

    def _num_logprobs(self) -> int | None:
        return self.logprobs


class ChatRequest(_GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, object]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: _NumLogprobs | None = None

    def check(self) -> None:
        """As both endpoints, and that `top_logprobs` comes with `logprobs`.

        Raises:
            ApiError: as there.
        """
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, f"top_logprobs={self.top_logprobs} needs logprobs: true", param="top_logprobs")

    def _asked_max_tokens(self) -> int | None:
        """The newer name of `max_tokens` wins."""
        return self.max_completion_tokens or self.max_tokens

    def _num_logprobs(self) -> int | None:
        return _or(self.top_logprobs, 0) if self.logprobs else None

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
        parts = [str(part) for part in first["loc"] if part not in _KINDS]
        if not parts:
            raise ApiError(400, first["msg"]) from error
        value = "" if first["type"] == "missing" else f"={_written(first['input'])}"
        raise ApiError(400, f"{'.'.join(parts)}{value}: {first['msg']}", param=parts[0]) from error
    request.check()
    return request
