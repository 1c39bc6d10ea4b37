"""The scheduler: which tokens of which requests the next step computes.

There is no prefill phase and no decode phase: in every step, computed tokens chase known tokens, within a budget of
tokens and a limit of running requests (vLLM V1: `vllm/v1/core/sched/scheduler.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.config import ResolvedConfig
from engine.kv_blocks import KvBlocks
from engine.request import FinishReason, Request, RequestState
from engine.step import ScheduledRequest, StepPlan, StepResult, TokenLogprobs


class RequestRefusedError(ValueError):
    """A request that can never run; the message says what it needs and what there is."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One new token of a request, and, with its last one, why it ended."""

    request_id: str
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class _Step:
    """A step while it is being planned."""

    budget_tokens: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


def refusal(config: ResolvedConfig, num_prompt_tokens: int) -> str | None:
    """Why a prompt of this length can never run, with both numbers; None if it can."""
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

    def __init__(self, config: ResolvedConfig) -> None:
        self._config = config
        self._chunked = config.asked.enable_chunked_prefill
        self._max_num_seqs = config.asked.max_num_seqs
        self._blocks = KvBlocks(num_blocks=config.num_gpu_blocks, block_size=config.asked.block_size)
        # The last token drawn needs no KV, so a request may know one token more than the cache holds.
        self._max_known_tokens = min(config.max_model_len, config.num_gpu_blocks * config.asked.block_size + 1)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._in_flight: tuple[ScheduledRequest, ...] = ()
        self.num_preemptions = 0

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
        """Share of the KV blocks in use, from 0 to 1."""
        return self._blocks.usage

    def add(self, request: Request) -> None:
        """Queue a request behind all others.

        Raises:
            RequestRefusedError: if it can never run.
        """
        reason = refusal(self._config, len(request.prompt_token_ids))
        if reason is not None:
            raise RequestRefusedError(reason)
        if request.request_id in self._requests:
            raise RequestRefusedError(f"request id {request.request_id!r} is in use: ids must be unique")
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its blocks at once; a token it has in flight is dropped.

        An id that is unknown, or already finished, is ignored: the client's goodbye may cross the last token.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        self._finish(request, FinishReason.ABORT)
        self._waiting = deque(item for item in self._waiting if item is not request)
        self._running = [item for item in self._running if item is not request]

    def schedule(self) -> StepPlan:
        """Plan the next step; empty only when there is no request."""
        step = _Step(self._config.asked.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        self._in_flight = tuple(step.scheduled)
        return StepPlan(
            scheduled=self._in_flight,
            admitted=tuple(step.admitted),
            resumed=tuple(step.resumed),
            preempted=tuple(step.preempted),
        )

    def commit(self, result: StepResult) -> list[TokenOutput]:
        """Take in what the planned step computed; returns the new tokens in the plan's order.

        Blocks of requests that end here are free for the next step.
        """
        outputs: list[TokenOutput] = []
        any_finished = False
        for item in self._in_flight:
            request = self._requests.get(item.request_id)
            if request is None:
                continue  # aborted while the step ran
            request.num_computed_tokens += len(item.token_ids)
            if item.samples:
                token_id = result.sampled_token_ids[item.request_id]
                output = self._append(request, token_id, result.logprobs.get(item.request_id))
                any_finished = any_finished or output.finish_reason is not None
                outputs.append(output)
        self._in_flight = ()
        if any_finished:
            self._running = [request for request in self._running if request.state is RequestState.RUNNING]
        return outputs

    def check_integrity(self) -> None:
        """Check, between steps, that the books agree: blocks, tables, states and limits.

        Raises:
            AssertionError: naming what disagrees.
        """
        self._blocks.check_integrity()
        held = sum(len(self._blocks.table(request.request_id)) for request in self._running)
        if held != self._blocks.num_blocks - self._blocks.num_free:
            raise AssertionError(f"running requests hold {held} blocks, {self._blocks.num_free} are free: some leaked")
        for request in self._running:
            expected = self._blocks.blocks_for(request.num_computed_tokens)
            if len(self._blocks.table(request.request_id)) != expected:
                raise AssertionError(f"{request.request_id} must hold {expected} blocks: {request}")
        if len(self._running) > self._max_num_seqs:
            raise AssertionError(f"{len(self._running)} running requests pass max_num_seqs={self._max_num_seqs}")
        if len(self._requests) != len(self._running) + len(self._waiting):
            raise AssertionError("every request is either running or waiting")

    def _schedule_running(self, step: _Step) -> None:
        """Walk the running list in admission order until the token budget is spent."""
        index = 0
        while index < len(self._running) and step.budget_tokens > 0:
            request = self._running[index]
            num_tokens = min(request.num_known_tokens - request.num_computed_tokens, step.budget_tokens)
            if not self._make_room(request, num_tokens, step):
                return
            self._put(request, num_tokens, step)
            index += 1

    def _make_room(self, request: Request, num_tokens: int, step: _Step) -> bool:
        """Get blocks for `num_tokens` more, preempting from the end of the running list; False if it took `request`."""
        while not self._blocks.try_grow(request.request_id, request.num_computed_tokens + num_tokens):
            victim = self._running.pop()
            self._preempt(victim)
            step.preempted.append(victim.request_id)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        """Free the victim's blocks and queue it first; its outputs stay and will be recomputed with the prompt."""
        self._blocks.release(victim.request_id)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.state = RequestState.PREEMPTED
        self._waiting.appendleft(victim)
        self.num_preemptions += 1

    def _admit_waiting(self, step: _Step) -> None:
        """Admit from the head of the waiting queue; the first request that does not fit ends it."""
        while self._waiting and step.budget_tokens > 0 and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            num_known = request.num_known_tokens
            if num_known > step.budget_tokens and not self._chunked:
                return
            # All known tokens must fit what is free now, not only this step's chunk; nothing is set aside for later.
            if self._blocks.blocks_for(num_known) > self._blocks.num_free:
                return
            self._waiting.popleft()
            self._running.append(request)
            (step.admitted if request.state is RequestState.WAITING else step.resumed).append(request.request_id)
            request.state = RequestState.RUNNING
            num_tokens = min(num_known, step.budget_tokens)
            self._blocks.try_grow(request.request_id, num_tokens)
            self._put(request, num_tokens, step)

    def _put(self, request: Request, num_tokens: int, step: _Step) -> None:
        """Put the next `num_tokens` of a request, whose blocks it already holds, into the step."""
        start = request.num_computed_tokens
        stop = start + num_tokens
        samples = stop == request.num_known_tokens
        needs_history = samples and request.sampling.has_penalties
        step.budget_tokens -= num_tokens
        step.scheduled.append(
            ScheduledRequest(
                request_id=request.request_id,
                token_ids=request.known_tokens(start, stop),
                start=start,
                block_ids=self._blocks.table(request.request_id),
                samples=samples,
                output_index=len(request.output_token_ids),
                sampling=request.sampling,
                prompt_token_ids=request.prompt_token_ids if needs_history else (),
                output_token_ids=tuple(request.output_token_ids) if needs_history else (),
            )
        )

    def _append(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        """Give a request its next token and end it if that was its last."""
        request.output_token_ids.append(token_id)
        reason = self._finish_reason(request, token_id)
        if reason is not None:
            self._finish(request, reason)
        return TokenOutput(request.request_id, token_id, reason, logprobs)

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        """Whether this token is the request's last: tokens that stop it first, then the limits on length."""
        sampling = request.sampling
        is_eos = token_id in self._config.eos_token_ids and not sampling.ignore_eos
        may_stop = len(request.output_token_ids) >= sampling.min_tokens
        if may_stop and (is_eos or token_id in sampling.stop_token_ids):
            return FinishReason.STOP
        if request.num_known_tokens >= self._max_known_tokens:
            return FinishReason.LENGTH
        if len(request.output_token_ids) >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self._blocks.release(request.request_id)
        del self._requests[request.request_id]
