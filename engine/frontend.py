"""The bridge between async HTTP handlers and the core's process."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from time import perf_counter

from engine.config import ResolvedConfig
from engine.core import Abort, CoreFailed, CoreProcess, Ready, StepReport, Submit
from engine.request import FinishReason, SamplingParams
from engine.stats import EngineStats
from engine.step import TokenLogprobs

logger = logging.getLogger(__name__)


class EngineGoneError(RuntimeError):
    """The engine cannot finish a request: its core died, or it is being stopped."""


@dataclass(frozen=True, slots=True)
class NewToken:
    """One generated token, and, with the last one, why generation ended."""

    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class _Stream:
    """What a handler waits on, and the times its metrics need."""

    num_prompt_tokens: int
    submitted_at_s: float
    last_token_at_s: float | None = None
    tokens: asyncio.Queue[NewToken | EngineGoneError] = field(default_factory=asyncio.Queue)


async def wait_until_ready(core: CoreProcess) -> Ready | CoreFailed:
    """Wait for a starting core's first word, without blocking the event loop."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(core.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(core.fileno())
    match core.receive():
        case StepReport():
            return CoreFailed("crashed", "the core reported a step before it was ready")
        case first:
            return first


class Frontend:
    """Submits requests to a core that is ready, and hands each its tokens as they come.

    Belongs to the event loop it was made in.
    """

    def __init__(self, core: CoreProcess, resolved: ResolvedConfig) -> None:
        self.stats = EngineStats(resolved)
        self.failed: asyncio.Future[CoreFailed] = asyncio.get_running_loop().create_future()
        """Done when the core is gone."""
        self._core = core
        self._streams: dict[str, _Stream] = {}
        self._request_numbers = itertools.count()
        self._gone: str | None = None
        asyncio.get_running_loop().add_reader(core.fileno(), self._on_readable)

    @property
    def is_alive(self) -> bool:
        """Whether requests can still be served."""
        return self._gone is None

    async def generate(
        self, prompt_token_ids: tuple[int, ...], sampling: SamplingParams
    ) -> AsyncGenerator[NewToken, None]:
        """Yield the request's tokens; closing the generator early aborts the request and frees its blocks.

        Args:
            prompt_token_ids: a prompt that `scheduler.refusal` has nothing against.

        Raises:
            EngineGoneError: if the engine ends first.
        """
        if self._gone is not None:
            raise EngineGoneError(self._gone)
        request_id = str(next(self._request_numbers))
        stream = _Stream(num_prompt_tokens=len(prompt_token_ids), submitted_at_s=perf_counter())
        self._streams[request_id] = stream
        self._core.send(Submit(request_id=request_id, prompt_token_ids=prompt_token_ids, sampling=sampling))
        try:
            while True:
                token = await stream.tokens.get()
                if isinstance(token, EngineGoneError):
                    raise token
                yield token
                if token.finish_reason is not None:
                    return
        finally:
            if self._streams.pop(request_id, None) is not None:
                self._core.send(Abort(request_id))
                self.stats.observe_end(FinishReason.ABORT, e2e_s=perf_counter() - stream.submitted_at_s)

    def close(self, why: str) -> None:
        """Take no more requests and end those in flight with an error."""
        if self._gone is not None:
            return
        self._gone = why
        asyncio.get_running_loop().remove_reader(self._core.fileno())
        for stream in self._streams.values():
            stream.tokens.put_nowait(EngineGoneError(why))
        self._streams.clear()

    def _on_readable(self) -> None:
        match self._core.receive():
            case StepReport() as report:
                self._deliver(report)
            case CoreFailed() as failure:
                self.close(f"the engine's core is gone: {failure.message}")
                self.failed.set_result(failure)
            case Ready():
                logger.warning("the core said twice that it is ready")

    def _deliver(self, report: StepReport) -> None:
        """Hand out a step's tokens; those of requests aborted meanwhile go nowhere."""
        now_s = perf_counter()
        self.stats.observe_step(report)
        for request_id in report.admitted:
            if (stream := self._streams.get(request_id)) is not None:
                self.stats.observe_admission(queue_s=report.scheduled_at_s - stream.submitted_at_s)
        for request_id, token_id in zip(report.request_ids, report.token_ids, strict=True):
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            reason = report.finished.get(request_id)
            stream.tokens.put_nowait(NewToken(token_id, reason, report.logprobs.get(request_id)))
            self._observe_token(stream, now_s)
            if reason is not None:
                del self._streams[request_id]
                self.stats.observe_end(reason, e2e_s=now_s - stream.submitted_at_s)

    def _observe_token(self, stream: _Stream, now_s: float) -> None:
        if stream.last_token_at_s is None:
            self.stats.observe_first_token(
                ttft_s=now_s - stream.submitted_at_s, num_prompt_tokens=stream.num_prompt_tokens
            )
        else:
            self.stats.observe_next_token(itl_s=now_s - stream.last_token_at_s)
        stream.last_token_at_s = now_s
