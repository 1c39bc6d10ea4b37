"""The scheduler: which tokens of which requests the next step computes.

There is no prefill phase and no decode phase: in every step, computed tokens chase known tokens, within a budget of
tokens and a limit of running requests (vLLM V1: `vllm/v1/core/sched/scheduler.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from engine.config import ResolvedConfig
from engine.kv_blocks import KvBlocks
from engine.request import FinishReason, Request, RequestState
from engine.step import ScheduledRequest, StepPlan, StepResult, TokenLogprobs


class RequestRefusedError(ValueError):
    """A request that cannot be taken in; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler decides by: limits and sizes in force, defaults and shares resolved."""

    max_num_seqs: int
    """Most requests running at once. Unit: requests."""

    max_num_scheduled_tokens: int
    """Token budget of one step. Unit: tokens."""

    max_known_tokens: int
    """A request ends with `length` when it knows this many, prompt and outputs together. Unit: tokens."""

    num_blocks: int
    """KV blocks, all of them usable. Unit: blocks."""

    block_size: int
    """Tokens that one KV block holds. Unit: tokens."""

    watermark_blocks: int = 0
    """Blocks that admission leaves free for requests that run already. Unit: blocks."""

    long_prefill_token_threshold: int = 0
    """Most tokens a step takes of one request while others run or wait; 0 is no limit. Unit: tokens."""

    reserve_full_isl: bool = True
    """Whether all known tokens of a request must fit the free blocks to admit it, not only its next chunk."""

    enable_chunked_prefill: bool = True
    """Whether the budget may split a prompt over several steps."""

    enable_prefix_caching: bool = False
    """Whether requests share the KV blocks of equal prefixes."""

    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an output unless the request ignores them."""

    @classmethod
    def from_resolved(cls, resolved: ResolvedConfig) -> Self:
        """The part of an engine's values that the scheduler needs."""
        asked = resolved.asked
        # The last token drawn needs no KV, so a request may know one token more than the cache holds. vLLM does not
        # start where a request of max_model_len outgrows the cache; here it ends with `length`, and hangs nobody.
        most_in_cache = resolved.num_gpu_blocks * asked.block_size + 1
        return cls(
            max_num_seqs=asked.max_num_active_seqs or asked.max_num_seqs,
            max_num_scheduled_tokens=asked.max_num_scheduled_tokens or asked.max_num_batched_tokens,
            max_known_tokens=min(resolved.max_model_len, most_in_cache),
            num_blocks=resolved.num_gpu_blocks,
            block_size=asked.block_size,
            watermark_blocks=int(asked.watermark * resolved.num_gpu_blocks),
            long_prefill_token_threshold=asked.long_prefill_token_threshold,
            reserve_full_isl=asked.scheduler_reserve_full_isl,
            enable_chunked_prefill=asked.enable_chunked_prefill,
            enable_prefix_caching=asked.enable_prefix_caching,
            eos_token_ids=resolved.eos_token_ids,
        )


class TokenOutput(NamedTuple):
    """One new token of a request, and, with its last one, why it ended."""

    request_id: str
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSnapshot:
    """How the books stand between two steps."""

    running: tuple[tuple[str, int], ...]
    """Request id and computed tokens, in order of admission."""

    waiting: tuple[str, ...]
    """Request ids, the next to be admitted first."""

    free_block_ids: tuple[int, ...]
    """Blocks nobody holds, the next to be handed out first."""

    cached_free_block_ids: tuple[int, ...]
    """Those of them that still hold a cached prefix, in the same order."""


@dataclass(slots=True)
class _Step:
    """A step while it is being planned."""

    budget_tokens: int
    """Tokens the step may still take."""

    most_tokens: int
    """Most of them for one request."""

    requests: list[Request] = field(default_factory=list)
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    """What of each of `requests` is computed, in the same order."""

    admitted: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


def refusal(config: ResolvedConfig, num_prompt_tokens: int) -> str | None:
    """Why a prompt of this length can never run, with both numbers; None if it can.

    To be asked before a request is added: the scheduler itself refuses no length, and a prompt that never fits blocks
    all behind it (so does vLLM's, whose front end refuses as well).
    """
    if num_prompt_tokens < 1:
        return "the prompt is empty: a request needs at least 1 prompt token"
    if num_prompt_tokens >= config.max_model_len:
        return (
            f"the prompt has {num_prompt_tokens} tokens, max_model_len is {config.max_model_len}: "
            "a prompt must leave room for at least 1 output token; shorten it"
        )
    needed = -(-num_prompt_tokens // config.asked.block_size)
    if needed > config.num_gpu_blocks:
        return (
            f"the prompt of {num_prompt_tokens} tokens needs {needed} KV blocks of {config.asked.block_size} tokens, "
            f"the cache has {config.num_gpu_blocks}: shorten the prompt or give the engine more memory"
        )
    return None


class Scheduler:
    """Plans steps and keeps the books: requests, block tables, budgets.

    `schedule` and `commit` alternate. The running list is in order of admission; the waiting queue is first come, first
    served, with preempted requests at its head.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._blocks = KvBlocks(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._requests: dict[str, Request] = {}
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: list[Request] = []
        self._in_flight: _Step | None = None
        self.num_preemptions = 0
        """Preemptions since the start."""

        self.num_prefix_queries_tokens = 0
        """Known tokens of the requests admitted since the start, if they were looked up in the prefix cache. As in vLLM
        (`PrefixCacheStats`), what is looked up again after a preemption does not count. Unit: tokens."""

        self.num_prefix_hits_tokens = 0
        """Those of them that were found. Unit: tokens."""

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks. Unit: requests."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or preempted. Unit: requests."""
        return len(self._waiting)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that requests hold, from 0 to 1; cached prefixes nobody uses do not count."""
        return self._blocks.usage

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no request holds. Unit: blocks."""
        return self._blocks.num_free

    def add(self, request: Request) -> None:
        """Queue a request behind all others. It is one that `refusal` has nothing against.

        Raises:
            RequestRefusedError: if another of that id is not finished yet.
        """
        if request.request_id in self._requests:
            raise RequestRefusedError(f"request id {request.request_id!r} is in use: ids must be unique")
        self._requests[request.request_id] = request
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks at once; a token it has in flight is dropped.

        An id that is unknown, or already finished, is ignored: the client's goodbye may cross the last token.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        was_running = request.state is RequestState.RUNNING
        self._finish(request, FinishReason.ABORT)
        if was_running:
            self._running = [item for item in self._running if item is not request]
        else:
            del self._waiting[request_id]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing changes, while any request holds KV blocks."""
        return self._blocks.reset_prefix_cache()

    def schedule(self) -> StepPlan:
        """Plan the next step; empty only when there is no request that fits.

        A plan that was never committed counts as never computed, as when the executor raised: those of its requests
        that are still here are preempted.
        """
        if self._in_flight is not None:
            self._discard(self._in_flight)
        config = self._config
        budget_tokens = most_tokens = config.max_num_scheduled_tokens
        if config.long_prefill_token_threshold and len(self._running) + len(self._waiting) > 1:
            most_tokens = config.long_prefill_token_threshold
        step = _Step(budget_tokens, most_tokens)
        self._schedule_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        self._in_flight = step
        return StepPlan(
            scheduled=tuple(step.scheduled),
            admitted=tuple(step.admitted),
            resumed=tuple(step.resumed),
            preempted=tuple(step.preempted),
        )

    def commit(self, result: StepResult) -> list[TokenOutput]:
        """Take in what the planned step computed; returns the new tokens in the plan's order.

        Blocks of requests that end here are free for the next step.
        """
        outputs: list[TokenOutput] = []
        step, self._in_flight = self._in_flight, None
        if step is None:
            return outputs
        self._blocks.end_step(is_computed=True)
        sampled, logprobs = result.sampled_token_ids, result.logprobs
        any_finished = False
        for request, item in zip(step.requests, step.scheduled, strict=True):
            if request.state is RequestState.FINISHED:
                continue  # aborted while the step ran
            request.num_computed_tokens += len(item.token_ids)
            if not item.samples:
                continue
            token_id = sampled[item.request_id]
            request.output_token_ids.append(token_id)
            reason = self._finish_reason(request, token_id)
            if reason is not None:
                self._finish(request, reason)
                any_finished = True
            outputs.append(TokenOutput(item.request_id, token_id, reason, logprobs.get(item.request_id)))
        if any_finished:
            self._running = [request for request in self._running if request.state is RequestState.RUNNING]
        return outputs

    def snapshot(self) -> SchedulerSnapshot:
        """How the books stand between two steps."""
        return SchedulerSnapshot(
            running=tuple((request.request_id, request.num_computed_tokens) for request in self._running),
            waiting=tuple(self._waiting),
            free_block_ids=self._blocks.free_ids(),
            cached_free_block_ids=self._blocks.cached_free_ids(),
        )

    def check_integrity(self) -> None:
        """Check, between steps, that the books agree: blocks, tables, states and limits.

        Raises:
            AssertionError: naming what disagrees.
        """
        self._blocks.check_integrity()
        held = {block for request in self._running for block in self._blocks.table(request.request_id)}
        if len(held) != self._blocks.num_blocks - self._blocks.num_free:
            raise AssertionError(
                f"running requests hold {len(held)} of {self._blocks.num_blocks} blocks, {self._blocks.num_free} "
                "are free: some leaked"
            )
        for request in self._running:
            expected = self._blocks.blocks_for(request.num_computed_tokens)
            if len(self._blocks.table(request.request_id)) != expected:
                raise AssertionError(f"{request.request_id} must hold {expected} blocks: {request}")
        for request in self._waiting.values():
            if request.num_computed_tokens or self._blocks.table(request.request_id):
                raise AssertionError(f"{request.request_id} waits and must hold nothing: {request}")
        if len(self._running) > self._config.max_num_seqs:
            raise AssertionError(f"{len(self._running)} running requests pass max_num_seqs={self._config.max_num_seqs}")
        if len(self._requests) != len(self._running) + len(self._waiting):
            raise AssertionError("every request is either running or waiting")

    def _schedule_running(self, step: _Step) -> None:
        """Walk the running list in admission order until the token budget is spent."""
        running = self._running
        index = 0
        while index < len(running) and step.budget_tokens > 0:
            request = running[index]
            start = request.num_computed_tokens
            num_tokens = min(request.num_known_tokens - start, step.most_tokens, step.budget_tokens)
            table = self._make_room(request, start + num_tokens, step)
            if table is None:
                return
            self._put(request, start, start + num_tokens, table, step)
            index += 1

    def _make_room(self, request: Request, num_tokens: int, step: _Step) -> tuple[int, ...] | None:
        """Get blocks up to `num_tokens`, preempting from the end of the running list; None if that took `request`."""
        while (table := self._blocks.try_grow(request, num_tokens)) is None:
            victim = self._running.pop()
            self._preempt(victim)
            step.preempted.append(victim.request_id)
            if victim is request:
                return None
        return table

    def _preempt(self, victim: Request) -> None:
        """Free the victim's blocks and queue it first; its outputs stay and will be recomputed with the prompt."""
        self._blocks.release(victim.request_id)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.state = RequestState.PREEMPTED
        self._waiting[victim.request_id] = victim
        self._waiting.move_to_end(victim.request_id, last=False)
        self.num_preemptions += 1

    def _discard(self, step: _Step) -> None:
        """Start over with what a step was to compute: others may have counted on it in the same step."""
        self._blocks.end_step(is_computed=False)
        for request in reversed(step.requests):
            if request.state is RequestState.RUNNING:
                self._running.remove(request)
                self._preempt(request)

    def _admit_waiting(self, step: _Step) -> None:
        """Admit from the head of the waiting queue; the first request that does not fit ends it."""
        config, blocks = self._config, self._blocks
        while self._waiting and step.budget_tokens > 0 and len(self._running) < config.max_num_seqs:
            request = next(iter(self._waiting.values()))
            num_known = request.num_known_tokens
            prefix = blocks.cached_prefix(request)
            start = len(prefix) * config.block_size
            num_tokens = min(num_known - start, step.most_tokens)
            if num_tokens > step.budget_tokens:
                if not config.enable_chunked_prefill:
                    return
                num_tokens = step.budget_tokens
            # What is free now is compared; nothing is set aside for the later chunks of those that run.
            num_to_hold = num_known if config.reserve_full_isl else start + num_tokens
            num_spare = config.watermark_blocks if self._running else 0
            if blocks.num_needed(num_to_hold, prefix) + num_spare > blocks.num_free:
                return
            self._waiting.popitem(last=False)
            self._admit(request, prefix, step)
            table = blocks.try_grow(request, start + num_tokens)
            if table is None:
                raise AssertionError(f"{request.request_id} was admitted without blocks for {num_tokens} tokens")
            self._put(request, start, start + num_tokens, table, step)

    def _admit(self, request: Request, prefix: tuple[int, ...], step: _Step) -> None:
        """Let a request run whose cached prefix counts as computed."""
        self._running.append(request)
        (step.admitted if request.state is RequestState.WAITING else step.resumed).append(request.request_id)
        request.state = RequestState.RUNNING
        request.num_computed_tokens = request.num_cached_tokens = len(prefix) * self._config.block_size
        self._blocks.begin(request, prefix)
        if self._config.enable_prefix_caching and request.num_preemptions == 0:
            self.num_prefix_queries_tokens += request.num_known_tokens
            self.num_prefix_hits_tokens += request.num_cached_tokens

    def _put(self, request: Request, start: int, stop: int, table: tuple[int, ...], step: _Step) -> None:
        """Put a request's tokens [start, stop), for which `table` has room, into the step."""
        outputs = request.output_token_ids
        samples = stop == request.num_known_tokens
        needs_history = samples and request.needs_history
        step.budget_tokens -= stop - start
        step.requests.append(request)
        step.scheduled.append(
            # By position, which takes half the time that names take.
            ScheduledRequest(
                request.request_id,
                (outputs[-1],) if samples and stop - start == 1 and outputs else request.known_tokens(start, stop),
                start,
                table,
                samples,
                len(outputs),
                request.sampling,
                request.prompt_token_ids if needs_history else (),
                tuple(outputs) if needs_history else (),
            )
        )

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        """Whether this token is the request's last: tokens that stop it first, then the limits on length."""
        sampling = request.sampling
        num_outputs = len(request.output_token_ids)
        is_eos = token_id in self._config.eos_token_ids and not sampling.ignore_eos
        if (is_eos or token_id in sampling.stop_token_ids) and num_outputs >= sampling.min_tokens:
            return FinishReason.STOP
        if num_outputs >= sampling.max_tokens or request.num_known_tokens >= self._config.max_known_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self._blocks.release(request.request_id)
        del self._requests[request.request_id]
