"""The bridge between async HTTP handlers and the cores' processes: admits, routes, delivers, counts."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple, Self

from engine.config import ResolvedConfig
from engine.core import (
    Abort,
    CoreFailed,
    FromCore,
    PrefixCacheReset,
    Ready,
    Refused,
    ResetPrefixCache,
    StepReport,
    Submit,
    ToCore,
)
from engine.core_process import CoreProcess
from engine.request import FinishReason, SamplingParams
from engine.scheduler import RequestRefusedError
from engine.stats import CoreStats, ServerStats
from engine.step import TokenLogprobs
from engine.step_log import StepLog
from engine.valves import Overload, Valves

logger = logging.getLogger(__name__)

_WAITING_WEIGHT = 6.0
_PRESSURE_FROM = 0.5


class EngineGoneError(RuntimeError):
    """The engine cannot finish a request: a core died, or it is being stopped."""


class OverloadedError(RuntimeError):
    """A valve keeps a request out for now."""

    def __init__(self, overload: Overload) -> None:
        super().__init__(overload.message)
        self.retry_after_s = overload.retry_after_s


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What to generate, of a prompt that `core.prompt_refusal` has nothing against."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


class NewToken(NamedTuple):
    """One generated token, and, with the last one, why generation ended."""

    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class RunningCore:
    """A core that is ready, and what it decided."""

    process: CoreProcess
    resolved: ResolvedConfig


@dataclass(slots=True)
class _Core:
    """A core as the frontend sees it."""

    rank: int
    process: CoreProcess
    stats: CoreStats
    num_in_flight: int = 0
    num_waiting: int = 0
    """As of its last report."""

    kv_cache_usage: float = 0.0
    """As of its last report."""

    resets: deque[asyncio.Future[bool]] = field(default_factory=deque)
    """Answers it owes, in order."""


class Generation:
    """The tokens of one admitted request, as they come.

    Iterating raises `EngineGoneError` if the engine ends first, and `RequestRefusedError` if the core will not run it.
    """

    def __init__(self, request_id: str, core: _Core, num_prompt_tokens: int) -> None:
        self.request_id = request_id
        self.core = core
        self.num_prompt_tokens = num_prompt_tokens
        self.submitted_at_s = perf_counter()
        self.last_token_at_s: float | None = None
        # With one reader a deque and a future do what `asyncio.Queue` does, for half its time, once a token.
        self._news: deque[NewToken | EngineGoneError | RequestRefusedError] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._is_over = False

    def put(self, news: NewToken | EngineGoneError | RequestRefusedError) -> None:
        """Hand over the next token, or why there will be none."""
        self._news.append(news)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> NewToken:
        if self._is_over:
            raise StopAsyncIteration
        if not self._news:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        news = self._news.popleft()
        if not isinstance(news, NewToken):
            self._is_over = True
            raise news
        self._is_over = news.finish_reason is not None
        return news


def in_force(cores: Sequence[ResolvedConfig]) -> ResolvedConfig:
    """What the server refuses by: any core may get any request, so the smallest KV cache decides."""
    first = cores[0]
    return replace(
        first,
        num_gpu_blocks=min(core.num_gpu_blocks for core in cores),
        warnings=tuple(dict.fromkeys(warning for core in cores for warning in core.warnings)),
    )


class Frontend:
    """Submits requests to cores that are ready, and hands each its tokens as they come.

    Belongs to the event loop it was made in.
    """

    def __init__(self, cores: Sequence[RunningCore], *, step_log: StepLog | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.resolved = in_force([core.resolved for core in cores])
        self.core_configs = tuple(core.resolved for core in cores)
        """What each core decided, in order of rank."""

        self.stats = ServerStats(self.resolved, self.core_configs)
        self.failed: asyncio.Future[CoreFailed] = loop.create_future()
        """Done when a core is gone: the others' requests end with it."""

        self._cores = [_Core(rank, core.process, self.stats.cores[rank]) for rank, core in enumerate(cores)]
        self._step_log = step_log
        self._valves = Valves(self.resolved.asked)
        self._generations: dict[str, Generation] = {}
        self._request_numbers = itertools.count()
        self._gone: str | None = None
        for core in self._cores:
            loop.add_reader(core.process.fileno(), self._on_readable, core)

    @property
    def is_alive(self) -> bool:
        """Whether requests can still be served."""
        return self._gone is None

    @contextmanager
    def admit(self, requests: Sequence[NewRequest]) -> Iterator[tuple[Generation, ...]]:
        """Submit requests, all or none; leaving the context aborts those that still run and frees their blocks.

        Raises:
            EngineGoneError: if the engine is gone or going.
            OverloadedError: if a valve keeps them out for now.
            RequestRefusedError: if there are more of them than the valve ever lets in.
        """
        self._enter(requests)
        generations = tuple(map(self._submit, requests))
        try:
            yield generations
        finally:
            for generation in generations:
                self._abort(generation, FinishReason.ABORT)

    def stop(self, generation: Generation) -> None:
        """End a request whose text is complete, though the engine would go on: it counts as stopped, not as aborted."""
        self._abort(generation, FinishReason.STOP)

    async def reset_prefix_cache(self) -> bool:
        """Ask every core to forget its cached prefixes; False if any could not, because requests hold blocks.

        Raises:
            EngineGoneError: if the engine ends first.
        """
        if self._gone is not None:
            raise EngineGoneError(self._gone)
        answers = []
        for core in self._cores:
            answers.append(asyncio.get_running_loop().create_future())
            core.resets.append(answers[-1])
            self._send(core, ResetPrefixCache())
        return all(await asyncio.gather(*answers))

    def close(self, why: str) -> None:
        """Take no more requests and end those in flight with an error."""
        if self._gone is not None:
            return
        self._gone = why
        loop = asyncio.get_running_loop()
        for core in self._cores:
            loop.remove_reader(core.process.fileno())
            loop.remove_writer(core.process.fileno())
            for owed in core.resets:
                if not owed.done():  # its client may have left
                    owed.set_exception(EngineGoneError(why))
        for generation in self._generations.values():
            generation.put(EngineGoneError(why))
        self._generations.clear()

    def _enter(self, requests: Sequence[NewRequest]) -> None:
        if self._gone is not None:
            raise EngineGoneError(self._gone)
        if (reason := self._valves.never(len(requests))) is not None:
            raise RequestRefusedError(reason)
        lens = [len(request.prompt_token_ids) for request in requests]
        if (overload := self._valves.try_enter(lens, now_s=perf_counter())) is not None:
            self.stats.observe_rejection(overload.valve)
            raise OverloadedError(overload)

    def _submit(self, request: NewRequest) -> Generation:
        core = min(self._cores, key=_load)
        generation = Generation(str(next(self._request_numbers)), core, len(request.prompt_token_ids))
        core.num_in_flight += 1
        self._generations[generation.request_id] = generation
        self._send(
            core,
            Submit(
                request_id=generation.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=request.sampling,
            ),
        )
        return generation

    def _abort(self, generation: Generation, counted_as: FinishReason) -> None:
        if generation.request_id in self._generations:
            self._send(generation.core, Abort(generation.request_id))
            self._end(generation, counted_as, now_s=perf_counter())

    def _end(self, generation: Generation, reason: FinishReason, *, now_s: float) -> None:
        del self._generations[generation.request_id]
        generation.core.num_in_flight -= 1
        in_prefill = generation.last_token_at_s is None
        self._valves.note_end(generation.num_prompt_tokens, in_prefill=in_prefill, now_s=now_s)
        generation.core.stats.observe_end(reason, e2e_s=now_s - generation.submitted_at_s)

    def _send(self, core: _Core, message: ToCore) -> None:
        """Send without waiting; what the core's socket does not take goes out when it does."""
        core.process.send(message)
        if core.process.has_backlog:
            asyncio.get_running_loop().add_writer(core.process.fileno(), self._on_writable, core)

    def _on_writable(self, core: _Core) -> None:
        core.process.flush()
        if not core.process.has_backlog:
            asyncio.get_running_loop().remove_writer(core.process.fileno())

    def _on_readable(self, core: _Core) -> None:
        for message in core.process.receive():
            if self._gone is None:
                self._take(core, message)

    def _take(self, core: _Core, message: FromCore) -> None:
        match message:
            case StepReport():
                self._deliver(core, message)
            case PrefixCacheReset(done):
                if not (owed := core.resets.popleft()).done():  # its client may have left
                    owed.set_result(done)
            case Refused(request_id, reason):
                self._refuse(request_id, reason)
            case CoreFailed(kind, text):
                failure = CoreFailed(kind, text if len(self._cores) == 1 else f"core {core.rank}: {text}")
                self.close(f"the engine's core is gone: {failure.message}")
                self.failed.set_result(failure)
            case Ready():
                logger.warning("core %d said twice that it is ready", core.rank)

    def _refuse(self, request_id: str | None, reason: str) -> None:
        logger.error("a core refused what the server had let through: %s", reason)
        generation = None if request_id is None else self._generations.get(request_id)
        if generation is not None:
            generation.put(RequestRefusedError(reason))
            self._end(generation, FinishReason.ABORT, now_s=perf_counter())

    def _deliver(self, core: _Core, report: StepReport) -> None:
        """Hand out a step's tokens; those of requests aborted meanwhile go nowhere."""
        now_s = perf_counter()
        core.num_waiting = report.num_waiting
        core.kv_cache_usage = report.kv_cache_usage
        core.stats.observe_step(report)
        if self._step_log is not None:
            self._step_log.write(core.rank, report)
        for request_id in report.admitted:
            if (generation := self._generations.get(request_id)) is not None:
                core.stats.observe_admission(queue_s=report.scheduled_at_s - generation.submitted_at_s)
        for request_id, token_id in zip(report.request_ids, report.token_ids, strict=True):
            generation = self._generations.get(request_id)
            if generation is None:
                continue
            reason = report.finished.get(request_id)
            generation.put(NewToken(token_id, reason, report.logprobs.get(request_id)))
            self._observe_token(generation, now_s)
            if reason is not None:
                self._end(generation, reason, now_s=now_s)

    def _observe_token(self, generation: Generation, now_s: float) -> None:
        stats = generation.core.stats
        if generation.last_token_at_s is None:
            num_tokens = generation.num_prompt_tokens
            stats.observe_first_token(ttft_s=now_s - generation.submitted_at_s, num_prompt_tokens=num_tokens)
            self._valves.note_first_token(num_tokens, now_s=now_s)
        else:
            stats.observe_next_token(itl_s=now_s - generation.last_token_at_s)
        generation.last_token_at_s = now_s


def _load(core: _Core) -> float:
    """What a new request would queue behind: requests in flight, and waiting ones once more where KV blocks are short.

    A queue at a core whose blocks are taken drains slowly (vLLM: `vllm/v1/engine/core_client.py`, `DPLBAsyncMPClient`).
    Ties go to the lowest rank, where vLLM's take turns: with exact counts either way spreads them.
    """
    pressure = max(0.0, core.kv_cache_usage - _PRESSURE_FROM)
    return core.num_in_flight + _WAITING_WEIGHT * core.num_waiting * pressure
