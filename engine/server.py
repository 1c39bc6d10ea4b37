"""OpenAI-compatible HTTP: completions, chat, models, health, version, metrics."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from aiohttp import web

from engine.config import ResolvedConfig
from engine.core import prompt_refusal
from engine.frontend import EngineGoneError, Frontend, Generation, NewRequest, OverloadedError
from engine.protocol import (
    DONE_EVENT,
    AnswerFormat,
    ApiError,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    Usage,
    error_event,
    parse_body,
)
from engine.request import FinishReason, SamplingParams
from engine.scheduler import RequestRefusedError, refusal
from engine.stats import engine_version
from engine.tokenizer import ChatTemplateError, TextTokenizer

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 2**20
_DEFAULT_COMPLETION_TOKENS = 16
_CLIENT_GONE = 499
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A request that was found good: what to generate and how to answer."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    is_chat: bool
    stream: bool
    options: StreamOptions


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
        if isinstance(body.prompt, str):
            prompt = self._tokenizer.encode(body.prompt, add_special_tokens=True)
        else:
            prompt = tuple(body.prompt)
        self._check_prompt(prompt, param="prompt")
        job = _Job(
            prompt_token_ids=prompt,
            sampling=body.sampling(default_max_tokens=_DEFAULT_COMPLETION_TOKENS),
            is_chat=False,
            stream=body.stream,
            options=body.stream_options or StreamOptions(),
        )
        return await self._answer(request, job)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = parse_body(ChatRequest, await request.read())
        self._check_model(body.model)
        try:
            text = self._tokenizer.render_chat(body.plain_messages())
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from error
        prompt = self._tokenizer.encode(text, add_special_tokens=False)
        self._check_prompt(prompt, param="messages")
        job = _Job(
            prompt_token_ids=prompt,
            sampling=body.sampling(default_max_tokens=self._resolved.max_model_len - len(prompt)),
            is_chat=True,
            stream=body.stream,
            options=body.stream_options or StreamOptions(),
        )
        return await self._answer(request, job)

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

    def _check_prompt(self, prompt: tuple[int, ...], *, param: str) -> None:
        """Refuse what the core could not run; a tokenizer may know more tokens than its model has."""
        reason = prompt_refusal(self._resolved, prompt)
        if reason is not None:
            is_long = bool(prompt) and refusal(self._resolved, len(prompt)) is not None
            raise ApiError(400, reason, param=param, code="context_length_exceeded" if is_long else None)

    async def _answer(self, request: web.Request, job: _Job) -> web.StreamResponse:
        with self._frontend.admit([NewRequest(job.prompt_token_ids, job.sampling)]) as (generation,):
            return await (self._stream(request, job, generation) if job.stream else self._whole(job, generation))

    async def _whole(self, job: _Job, generation: Generation) -> web.Response:
        detokenizer = self._tokenizer.detokenizer()
        texts: list[str] = []
        reason = FinishReason.ABORT
        async for token in generation:
            texts.append(detokenizer.push(token.token_id, is_last=token.finish_reason is not None))
            reason = token.finish_reason or reason
        answer = AnswerFormat(self._resolved.served_model_name, is_chat=job.is_chat)
        usage = Usage(len(job.prompt_token_ids), len(texts))
        return web.Response(body=answer.whole("".join(texts), reason, usage), content_type="application/json")

    async def _stream(self, request: web.Request, job: _Job, generation: Generation) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await self._write_events(response, job, generation)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - a stream that has begun can only say so as an event; it is logged
            await response.write(error_event(_as_api_error(error)))
        await response.write_eof()
        return response

    async def _write_events(self, response: web.StreamResponse, job: _Job, generation: Generation) -> None:
        """One event a token, even where its text is still empty; then the final counts where asked for."""
        answer = AnswerFormat(self._resolved.served_model_name, is_chat=job.is_chat)
        detokenizer = self._tokenizer.detokenizer()
        num_prompt = len(job.prompt_token_ids)
        num_tokens = 0
        if job.is_chat:
            await response.write(answer.role_chunk(_usage_field(job.options, num_prompt, 0)))
        async for token in generation:
            num_tokens += 1
            text = detokenizer.push(token.token_id, is_last=token.finish_reason is not None)
            usage = _usage_field(job.options, num_prompt, num_tokens)
            await response.write(answer.chunk(text, token.finish_reason, usage))
        if job.options.include_usage:
            await response.write(answer.usage_chunk(Usage(num_prompt, num_tokens)))
        await response.write(DONE_EVENT)


def _usage_field(options: StreamOptions, num_prompt: int, num_tokens: int) -> str:
    if options.continuous_usage_stats:
        return f',"usage":{Usage(num_prompt, num_tokens).as_json()}'
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
        headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, OverloadedError) else None
        return web.json_response(answer.body(), status=answer.status, headers=headers)


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
    logger.error("a request failed in a way nobody foresaw", exc_info=error)
    return ApiError(500, f"the server failed: {type(error).__name__}: {error}")
