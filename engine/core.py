"""The engine's core: plan, execute, commit; and the process it runs in behind a server.

The parent sends `Submit`, `Abort` and `ResetPrefixCache`; the core answers `Ready` once, then a `StepReport` a step,
and now and then `Refused` or `PrefixCacheReset`. A core that cannot start or go on says why with `CoreFailed` and ends.
It never outlives its parent, and never waits for it while there is work.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias, cast

from engine.channel import Channel
from engine.config import ConfigError, EngineConfig, OutOfDeviceMemoryError, ResolvedConfig
from engine.device_ledger import DeviceLedgerError
from engine.memory import NoKvMemoryError, NotEnoughMemoryError
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduler import RequestRefusedError, Scheduler, SchedulerConfig, TokenOutput, refusal
from engine.step import StepPlan, StepResult, TokenLogprobs

logger = logging.getLogger(__name__)

EXECUTORS = {
    "torch": "engine.executor.torch:TorchExecutor",
    "simulated": "engine.executor.simulated:SimulatedExecutor",
}
"""Where the core finds an executor, by its name in `EngineConfig`, as `module:factory`."""

_PR_SET_PDEATHSIG = 1
_LAST_WORDS_S = 5.0


class Executor(Protocol):
    """What computes a step. Built from an `EngineConfig` by a factory that may raise `ConfigError`."""

    resolved: ResolvedConfig

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan and draw a token for every request in it that samples."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Parent → core: a new request, already checked against `prompt_refusal`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Abort:
    """Parent → core: forget a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Parent → core: forget all cached prefixes; answered in order by `PrefixCacheReset`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Core → parent: the model is loaded and these values are in force."""

    resolved: ResolvedConfig


@dataclass(frozen=True, slots=True)
class CoreFailed:
    """Core → parent, or seen by the parent: the core is gone. `kind` is one of the project's failure classes."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Core → parent: a request that can never run, or a message that is none; the core goes on."""

    request_id: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    """Core → parent: whether the cache was emptied; it is not while requests hold blocks."""

    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Core → parent: what one step brought, and how the engine stands after it."""

    request_ids: tuple[str, ...]
    """Requests with a new token, in the plan's order."""

    token_ids: tuple[int, ...]
    """Their tokens, in the same order."""

    finished: dict[str, FinishReason]
    """Those of them that ended with it."""

    logprobs: dict[str, TokenLogprobs]
    """How likely the tokens were, for requests that asked."""

    admitted: tuple[str, ...]
    """Requests admitted for the first time in this step."""

    scheduled_at_s: float
    """When the step was planned, on the machine-wide `perf_counter` clock of Linux."""

    execute_s: float
    """How long the executor took; 0 when only an abort was handled."""

    num_step_tokens: int
    """Tokens computed in the step; 0 when only an abort was handled."""

    num_prefill_tokens: int
    """Of these, tokens of prompts, and of outputs recomputed after a preemption. Unit: tokens."""

    num_decodes: int
    """Requests that computed the one token they drew last. Unit: requests."""

    num_context_tokens: int
    """Tokens whose keys and values the step read. Unit: tokens."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    """Preemptions since the start."""

    num_prefix_queries_tokens: int
    """Tokens looked up in the prefix cache since the start. Unit: tokens."""

    num_prefix_hits_tokens: int
    """Tokens found there since the start. Unit: tokens."""


ToCore: TypeAlias = Submit | Abort | ResetPrefixCache
FromCore: TypeAlias = Ready | StepReport | Refused | PrefixCacheReset | CoreFailed


def prompt_refusal(resolved: ResolvedConfig, prompt_token_ids: tuple[int, ...]) -> str | None:
    """Why this prompt can never run here: a token the model does not have, or its length; None if it can."""
    size = resolved.vocab_size
    if prompt_token_ids and not (min(prompt_token_ids) >= 0 and max(prompt_token_ids) < size):
        bad = next(token_id for token_id in prompt_token_ids if not 0 <= token_id < size)
        return f"token id {bad} is outside the vocabulary [0, {size})"
    return refusal(resolved, len(prompt_token_ids))


class Core:
    """Requests in, one step at a time, a report a step: what the server's core process and the offline `LLM` share.

    Messages are taken between steps only, so an abort frees its blocks before the next step is planned: what the
    scheduler would do with one between `schedule` and `commit` does not come up here.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._scheduler = Scheduler(SchedulerConfig.from_resolved(executor.resolved))

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""
        return bool(self._scheduler.num_running or self._scheduler.num_waiting)

    def take(self, message: object) -> Refused | PrefixCacheReset | None:
        """Take in one message; what cannot be done is answered, and harms no other request."""
        match message:
            case Submit():
                return self._add(message)
            case Abort(request_id):
                self._scheduler.abort(request_id)
                return None
            case ResetPrefixCache():
                return PrefixCacheReset(done=self._scheduler.reset_prefix_cache())
            case _:
                return Refused(None, f"the core knows no message {message!r:.200}")

    def step(self) -> StepReport:
        """Plan, execute and commit one step; with no request, only say how the engine stands."""
        scheduler = self._scheduler
        scheduled_at_s = time.perf_counter()
        execute_s = 0.0
        plan = scheduler.schedule()
        if plan.scheduled:
            started_at_s = time.perf_counter()
            result = self._executor.execute(plan)
            execute_s = time.perf_counter() - started_at_s
            outputs = scheduler.commit(result)
        elif scheduler.num_waiting:
            raise RuntimeError(f"{scheduler.num_waiting} requests wait and none can be scheduled: a scheduler fault")
        else:
            outputs = []
        return self._report(plan, outputs, scheduled_at_s=scheduled_at_s, execute_s=execute_s)

    def _report(
        self, plan: StepPlan, outputs: list[TokenOutput], *, scheduled_at_s: float, execute_s: float
    ) -> StepReport:
        scheduler = self._scheduler
        num_step_tokens, num_decodes = plan.num_scheduled_tokens, plan.num_decodes
        return StepReport(
            request_ids=tuple([output.request_id for output in outputs]),
            token_ids=tuple([output.token_id for output in outputs]),
            finished={output.request_id: output.finish_reason for output in outputs if output.finish_reason},
            logprobs={output.request_id: output.logprobs for output in outputs if output.logprobs},
            admitted=plan.admitted,
            scheduled_at_s=scheduled_at_s,
            execute_s=execute_s,
            num_step_tokens=num_step_tokens,
            num_prefill_tokens=num_step_tokens - num_decodes,
            num_decodes=num_decodes,
            num_context_tokens=plan.num_context_tokens,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.kv_cache_usage,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queries_tokens=scheduler.num_prefix_queries_tokens,
            num_prefix_hits_tokens=scheduler.num_prefix_hits_tokens,
        )

    def _add(self, new: Submit) -> Refused | None:
        reason = prompt_refusal(self._executor.resolved, new.prompt_token_ids)
        if reason is not None:
            return Refused(new.request_id, reason)
        request = Request(request_id=new.request_id, prompt_token_ids=new.prompt_token_ids, sampling=new.sampling)
        try:
            self._scheduler.add(request)
        except RequestRefusedError as error:
            return Refused(new.request_id, str(error))
        return None


def run_core(core: Core, channel: Channel) -> NoReturn:
    """Serve the parent until it closes the channel; with nothing to do, sleep until it says something.

    Raises:
        EOFError, OSError: when it does.
    """
    while True:
        messages = channel.receive_all()
        for message in messages:
            if (answer := core.take(message)) is not None:
                channel.send(answer)
        if messages or core.has_work:
            channel.send(core.step())
        else:
            channel.wait()


def core_main(
    end: socket.socket, config: EngineConfig, executor: str, cpus: tuple[int, ...] | None, parent_pid: int
) -> None:
    """The core process: load, then serve until the parent is gone."""
    _die_with_parent(parent_pid)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    _bind_cpus(cpus)
    channel = Channel(end)
    try:
        engine = load_executor(executor, config)
    except (ConfigError, DeviceLedgerError) as error:
        _fail(channel, CoreFailed(start_error_kind(error), str(error)))
    except Exception as error:
        logger.exception("the core cannot start")
        kind = _failure_kind(error, out_of_memory="oom_startup")
        _fail(channel, CoreFailed(kind, f"{type(error).__name__}: {error}"))
    gc.collect()
    gc.freeze()  # a full collection in mid-step would walk all that is loaded, for tens of milliseconds
    channel.send(Ready(engine.resolved))
    try:
        run_core(Core(engine), channel)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        logger.info("the parent is gone, so the core ends")
    except Exception as error:
        logger.exception("the core cannot go on")
        kind = _failure_kind(error, out_of_memory="oom_runtime")
        _fail(channel, CoreFailed(kind, f"{type(error).__name__}: {error}"))


def load_executor(path: str, config: EngineConfig) -> Executor:
    """Build the executor that `path`, a `module:factory`, names.

    Raises:
        ConfigError: for a config that cannot work; anything else that the factory raises passes through.
    """
    module, _, name = path.partition(":")
    factory = cast("Callable[[EngineConfig], Executor]", getattr(importlib.import_module(module), name))
    return factory(config)


def _die_with_parent(parent_pid: int) -> None:
    """Leave stopping to the parent, and do not survive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            sys.exit(1)  # it died before the call


def _bind_cpus(cpus: tuple[int, ...] | None) -> None:
    """Pin this process and size OpenMP's pool to match; before torch is imported, which reads both."""
    if cpus is None:
        return
    os.sched_setaffinity(0, cpus)
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))


def _fail(channel: Channel, failure: CoreFailed) -> NoReturn:
    """Say why, after all that was to be said before, and end; a parent that does not read loses it."""
    with contextlib.suppress(OSError):
        channel.send(failure)
        channel.drain(_LAST_WORDS_S)
    sys.exit(1)


def start_error_kind(error: ConfigError | DeviceLedgerError) -> str:
    """The failure class of what keeps an engine from starting."""
    if isinstance(error, DeviceLedgerError):
        return "infrastructure"
    if isinstance(error, NoKvMemoryError):
        return "no_kv_memory"
    # What is not free now was taken by others, and comes back with them: it says nothing about the config.
    return "infrastructure" if isinstance(error, NotEnoughMemoryError) else "invalid_config"


def _failure_kind(error: Exception, *, out_of_memory: str) -> str:
    """The failure class of an error: its own, or `out_of_memory` for lack of it in a phase that is not known closer."""
    if isinstance(error, OutOfDeviceMemoryError):
        return error.kind
    return out_of_memory if _is_out_of_memory(error) else "crashed"


def _is_out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator has no class of its own for it.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
