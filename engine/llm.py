"""The engine without a server: a batch of prompts in, their outputs back, in this process."""

from __future__ import annotations

import itertools
import operator
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.core import EXECUTORS, Abort, Core, Refused, StepReport, Submit, load_executor, prompt_refusal
from engine.models.folder import model_folder
from engine.request import FinishReason, SamplingParams
from engine.scheduler import RequestRefusedError
from engine.step import TokenLogprobs
from engine.tokenizer import TextTokenizer

_DEFAULT_SAMPLING = SamplingParams(max_tokens=16)
"""OpenAI's and vLLM's length where nobody asks for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What became of one prompt."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    """One for each token, where the sampling parameters asked for them."""


@dataclass(slots=True)
class _Growing:
    """A request on its way to an `Output`."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class LLM:
    """A loaded model, with the same scheduler and executor as the server's core.

    Not for several threads at once. The process's CPUs are left alone: pin it from outside.
    """

    def __init__(self, model: str, *, factory: str | None = None, **config: Any) -> None:
        """Load the model and allocate its KV blocks.

        Args:
            model: as `EngineConfig.model`.
            factory: `module:name` of what makes the executor; None takes the one that the config names.
            config: any other field of `EngineConfig`, such as `max_num_seqs`.

        Raises:
            ConfigError: for a config that cannot work, as the server would refuse it; `data_parallel_size` above 1 and
                `cpu_omp_threads_bind` need a server's processes.
            TypeError: for a name that is no field.
        """
        asked = EngineConfig(model=model, **{"cpu_omp_threads_bind": "nobind", **config})
        if asked.data_parallel_size > 1:
            raise ConfigError(f"data_parallel_size={asked.data_parallel_size}: one process is one core, start a server")
        if asked.cpu_omp_threads_bind != "nobind":
            raise ConfigError(
                f"cpu_omp_threads_bind={asked.cpu_omp_threads_bind!r}: only a server pins its cores; "
                "leave it out and pin this process from outside"
            )
        self._tokenizer = TextTokenizer(model_folder(model))
        loaded = load_executor(factory or EXECUTORS[asked.executor], asked)
        self.resolved: ResolvedConfig = loaded.resolved
        """The values in force."""

        self._core = Core(loaded)
        self._request_numbers = itertools.count()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Run a batch to its end; outputs in the order of the prompts.

        Ctrl-C, or an error in a step, ends the batch and frees all it held; the next one starts on an empty engine. An
        interrupt takes effect when the step it falls into is done.

        Args:
            prompts: texts, or sequences of token ids.
            sampling_params: for all prompts, or one for each; None generates 16 tokens each, at temperature 1.

        Raises:
            ValueError: for another number of sampling parameters than prompts.
            TypeError: for a prompt that is neither text nor token ids.
            RequestRefusedError: before anything is computed, for a prompt that can never run, with its index.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts is one text: pass a list of prompts")
        params = _one_each(sampling_params, len(prompts))
        requests = [self._request(*each) for each in enumerate(zip(prompts, params, strict=True))]
        growing = self._run(requests)
        return [self._output(request, growing[request.request_id]) for request in requests]

    def _request(self, index: int, asked: tuple[str | Sequence[int], SamplingParams]) -> Submit:
        prompt, sampling = asked
        if isinstance(prompt, str):
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=True)
        else:
            token_ids = _token_ids(index, prompt)
        if (reason := prompt_refusal(self.resolved, token_ids)) is not None:
            raise RequestRefusedError(f"prompt {index}: {reason}")
        request_id = str(next(self._request_numbers))
        return Submit(request_id=request_id, prompt_token_ids=token_ids, sampling=sampling)

    def _run(self, requests: Sequence[Submit]) -> dict[str, _Growing]:
        growing = {request.request_id: _Growing() for request in requests}
        with _interrupts_between_steps() as check_interrupt:
            try:
                for request in requests:
                    if isinstance(refused := self._core.take(request), Refused):
                        raise RequestRefusedError(refused.reason)
                while self._core.has_work:
                    _take_in(growing, self._core.step())
                    check_interrupt()
            finally:
                for request_id in growing:
                    self._core.take(Abort(request_id))
        return growing

    def _output(self, request: Submit, done: _Growing) -> Output:
        if done.finish_reason is None:
            raise RuntimeError(f"request {request.request_id} ended without a reason: an engine fault")
        return Output(
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(done.token_ids),
            text=self._tokenizer.decode(done.token_ids),
            finish_reason=done.finish_reason,
            logprobs=None if request.sampling.num_logprobs is None else tuple(done.logprobs),
        )


def _token_ids(index: int, prompt: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers of any kind, such as numpy's, as Python's own."""
    try:
        return tuple(map(operator.index, prompt))
    except TypeError as error:
        raise TypeError(f"prompt {index} is neither text nor a sequence of token ids: {error}") from error


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or _DEFAULT_SAMPLING] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts: pass one, or one for each prompt")
    return params


def _take_in(growing: dict[str, _Growing], report: StepReport) -> None:
    for request_id, token_id in zip(report.request_ids, report.token_ids, strict=True):
        request = growing[request_id]
        request.token_ids.append(token_id)
        request.finish_reason = report.finished.get(request_id)
        if (logprobs := report.logprobs.get(request_id)) is not None:
            request.logprobs.append(logprobs)


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back while the books are being written; gives what raises it where they agree.

    Only where Python's own handler would raise, which is in the main thread.
    """
    interrupted = threading.Event()

    def note(_number: int, _frame: FrameType | None) -> None:
        interrupted.set()

    def check() -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt

    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
