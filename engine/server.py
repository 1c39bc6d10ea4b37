"""OpenAI-compatible HTTP: completions, chat, models, health, version, metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from aiohttp import web

from engine.answers import DONE_EVENT, AnswerFormat, Usage, error_event
from engine.choice import Choice, Piece, TextStop
from engine.config import ResolvedConfig
from engine.core import prompt_refusal
from engine.frontend import EngineGoneError, Frontend, Generation, NewRequest, OverloadedError
from engine.protocol import ApiError, ChatRequest, CompletionRequest, StreamOptions, parse_body
from engine.request import SamplingParams
from engine.scheduler import RequestRefusedError, refusal
from engine.stats import engine_version
from engine.tokenizer import ChatTemplateError, TextTokenizer

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 2**20
_DEFAULT_COMPLETION_TOKENS = 16
_CLIENT_GONE = 499
_LONG_TEXT = 4096
"""From here on a text takes milliseconds to encode. Unit: characters."""

_Done = TypeVar("_Done")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A request that was found good: what to generate and how to answer."""

    choices: tuple[NewRequest, ...]
    """In the order of their indexes: all of the first prompt, all of the second …"""

    num_prompt_tokens: int
    """Of all prompts, each once. Unit: tokens."""

    text_stop: TextStop
    is_chat: bool
    stream: bool
    options: StreamOptions
    tells_token_ids: bool

    def answer_format(self, model: str) -> AnswerFormat:
        """What writes the answer."""
        prompts = [choice.prompt_token_ids for choice in self.choices] if self.tells_token_ids else None
        return AnswerFormat(model, is_chat=self.is_chat, prompts=prompts)


def _job(body: CompletionRequest | ChatRequest, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> _Job:
    return _Job(
        choices=tuple(
            NewRequest(prompt, _for_choice(params, index)) for prompt in prompts for index in range(body.num_choices)
        ),
        num_prompt_tokens=sum(map(len, prompts)),
        text_stop=body.text_stop(),
        is_chat=isinstance(body, ChatRequest),
        stream=bool(body.stream),
        options=body.stream_options or StreamOptions(),
        tells_token_ids=bool(body.return_token_ids),
    )


def _for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The same but for the seed, so that the choices of one prompt differ (vLLM: `ParentRequest`)."""
    return params if params.seed is None or index == 0 else replace(params, seed=params.seed + index)


class Api:
    """The endpoints of one engine."""

    def __init__(self, frontend: Frontend, tokenizer: TextTokenizer, resolved: ResolvedConfig) -> None:
        self._frontend = frontend
        self._tokenizer = tokenizer
        self._resolved = resolved
        self._created = int(datetime.now(UTC).timestamp())

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[_errors_as_json], client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_get("/metrics", self.metrics)
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = parse_body(CompletionRequest, await request.read())
        self._check_model(body.model)
        prompts = [await self._prompt(prompt) for prompt in body.prompts()]
        params = body.sampling(default_max_tokens=_DEFAULT_COMPLETION_TOKENS, vocab_size=self._resolved.vocab_size)
        return await self._answer(request, _job(body, prompts, params))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = parse_body(ChatRequest, await request.read())
        self._check_model(body.model)
        try:
            text = self._tokenizer.render_chat(body.plain_messages())
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from error
        prompt = await self._encode(text, param="messages", add_special_tokens=False)
        self._check_prompt(prompt, param="messages")
        params = body.sampling(
            default_max_tokens=self._resolved.max_model_len - len(prompt), vocab_size=self._resolved.vocab_size
        )
        return await self._answer(request, _job(body, [prompt], params))

    async def models(self, _request: web.Request) -> web.Response:
        """GET /v1/models."""
        card = {
            "id": self._resolved.served_model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "kneetune" if self._resolved.asked.executor == "torch" else "kneetune (simulated)",
            "root": self._resolved.asked.model,
            "max_model_len": self._resolved.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health: 200 while the core lives, 503 after."""
        return web.Response(status=200 if self._frontend.is_alive else 503)

    async def version(self, _request: web.Request) -> web.Response:
        """GET /version."""
        return web.json_response({"version": engine_version()})

    async def metrics(self, _request: web.Request) -> web.Response:
        """GET /metrics, in Prometheus' text format."""
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self._frontend.stats.render(), headers={"Content-Type": content_type})

    def _check_model(self, name: str | None) -> None:
        served = self._resolved.served_model_name
        if name not in (None, served):
            raise ApiError(
                404, f"the model {name!r} is not served here: use {served!r}", param="model", code="model_not_found"
            )

    async def _prompt(self, given: str | list[int]) -> tuple[int, ...]:
        if isinstance(given, str):
            prompt = await self._encode(given, param="prompt", add_special_tokens=True)
        else:
            prompt = tuple(given)
        self._check_prompt(prompt, param="prompt")
        return prompt

    async def _encode(self, text: str, *, param: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text; a long one is encoded beside the event loop, where it holds up nobody's stream.

        Raises:
            ApiError: for a text too long however it is cut, before the time is spent that its encoding takes.
        """
        longest = self._resolved.max_model_len * self._tokenizer.longest_token
        if len(text) > longest:
            reason = (
                f"the prompt has {len(text)} characters, max_model_len={self._resolved.max_model_len} tokens stand for "
                f"at most {longest}: shorten it"
            )
            raise ApiError(400, reason, param=param, code="context_length_exceeded")
        encode = partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return encode() if len(text) < _LONG_TEXT else await asyncio.to_thread(encode)

    def _check_prompt(self, prompt: tuple[int, ...], *, param: str) -> None:
        """Refuse what the core could not run; a tokenizer may know more tokens than its model has."""
        reason = prompt_refusal(self._resolved, prompt)
        if reason is not None:
            is_long = bool(prompt) and refusal(self._resolved, len(prompt)) is not None
            raise ApiError(400, reason, param=param, code="context_length_exceeded" if is_long else None)

    async def _answer(self, request: web.Request, job: _Job) -> web.StreamResponse:
        with self._frontend.admit(job.choices) as generations:
            return await (self._stream(request, job, generations) if job.stream else self._whole(job, generations))

    async def _whole(self, job: _Job, generations: Sequence[Generation]) -> web.Response:
        choices = await together(
            [self._collect(job, index, generation) for index, generation in enumerate(generations)]
        )
        answer = job.answer_format(self._resolved.served_model_name)
        usage = Usage(job.num_prompt_tokens, sum(map(len, choices)))
        return web.Response(body=answer.whole(choices, usage), content_type="application/json")

    async def _collect(self, job: _Job, index: int, generation: Generation) -> list[Piece]:
        choice = self._choice(job, index)
        pieces: list[Piece] = []
        async for token in generation:
            pieces.append(choice.take(token))
            if pieces[-1].finish_reason is not None:
                self._frontend.stop(generation)
                break
        return pieces

    async def _stream(self, request: web.Request, job: _Job, generations: Sequence[Generation]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await self._write_events(response, job, generations)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - a stream that has begun can only say so as an event; it is logged
            await response.write(error_event(_as_api_error(error)))
        await response.write_eof()
        return response

    async def _write_events(self, response: web.StreamResponse, job: _Job, generations: Sequence[Generation]) -> None:
        """One event a token, even where its text is still empty; then the final counts where asked for."""
        answer = job.answer_format(self._resolved.served_model_name)
        usage = Usage(job.num_prompt_tokens)

        async def write_choice(index: int, generation: Generation) -> None:
            """Write one choice's tokens as they come; the choices' events interleave."""
            choice = self._choice(job, index)
            async for token in generation:
                piece = choice.take(token)
                usage.completion_tokens += 1
                if piece.finish_reason is not None:
                    self._frontend.stop(generation)
                await response.write(answer.chunk(index, piece, _usage_field(job.options, usage)))
                if piece.finish_reason is not None:
                    break

        if job.is_chat:
            for index in range(len(generations)):
                await response.write(answer.role_chunk(index, _usage_field(job.options, usage)))
        await together([write_choice(index, generation) for index, generation in enumerate(generations)])
        if job.options.include_usage:
            await response.write(answer.usage_chunk(usage))
        await response.write(DONE_EVENT)

    def _choice(self, job: _Job, index: int) -> Choice:
        """What reads a choice's tokens. Where it finds an end that the engine does not, `Frontend.stop` tells it."""
        sampling = job.choices[index].sampling
        return Choice(self._tokenizer, sampling, job.text_stop, eos_token_ids=self._resolved.eos_token_ids)


async def together(works: Sequence[Coroutine[None, None, _Done]]) -> list[_Done]:
    """Do all at once; the first to fail ends the others and is what the caller sees."""
    if len(works) == 1:  # the common case needs no task of its own
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


def _usage_field(options: StreamOptions, usage: Usage) -> str:
    if options.continuous_usage_stats:
        return f',"usage":{usage.as_json()}'
    return ',"usage":null' if options.include_usage else ""


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Every error in OpenAI's shape, those of the HTTP layer and those nobody foresaw too."""
    try:
        return await handler(request)
    except ConnectionError:
        return web.Response(status=_CLIENT_GONE)  # nobody reads it; what is raised here is logged as a fault of ours
    except Exception as error:  # noqa: BLE001 - the edge of the process: one request's fault, told and logged
        answer = _as_api_error(error)
        return web.json_response(answer.body(), status=answer.status, headers=_headers_of(error))


def _headers_of(error: Exception) -> dict[str, str]:
    """What an error says beside its body: when to come back, or which methods a path has."""
    match error:
        case OverloadedError():
            return {"Retry-After": str(error.retry_after_s)}
        case web.HTTPMethodNotAllowed():
            return {"Allow": ", ".join(sorted(error.allowed_methods))}
    return {}


def _as_api_error(error: Exception) -> ApiError:
    """What the client is told; an error nobody foresaw is logged with its trace."""
    match error:
        case ApiError():
            return error
        case EngineGoneError():
            return ApiError(503, str(error), code="engine_gone")
        case OverloadedError():
            return ApiError(503, str(error), code="overloaded")
        case RequestRefusedError():
            return ApiError(400, str(error))
        case web.HTTPError():
            return ApiError(error.status, error.reason)
        case web.RequestPayloadError():
            return ApiError(400, f"the body cannot be read: {error}")
    logger.error("a request failed in a way nobody foresaw", exc_info=error)
    return ApiError(500, f"the server failed: {type(error).__name__}: {error}")
