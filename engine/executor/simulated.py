"""The simulated executor: the same steps, KV blocks and limits, but a timed wait in place of the forward pass.

It is the ground truth of tests, a server whose knee, preemptions and memory failures are known, and a rehearsal of a
tuning job for hardware that is not there. Nothing it says is a measurement of a device, so everything it says is
labelled `simulated`.
"""

from __future__ import annotations

import math

import numpy as np

from engine.config import (
    ConfigError,
    EngineConfig,
    MemoryBudget,
    OutOfDeviceMemoryError,
    ResolvedConfig,
    check_against_model,
    check_one_device,
)
from engine.executor.clock import Clock, RealClock
from engine.executor.graph_sizes import graph_sizes
from engine.executor.law import Law, law_names, load_law
from engine.memory import DeviceMemory, KvLayout, human, kv_blocks_in_force, memory_budget, requested_bytes
from engine.models.config import read_model_config
from engine.models.folder import model_folder
from engine.step import ScheduledRequest, StepPlan, StepResult, TokenLogprobs
from engine.tokenizer import TextTokenizer

_CERTAIN = 0.0
"""The log-probability of a token that was made up: nothing else was possible."""

_MOST_IDS = 4096
"""Vocabulary entries looked through for printable ones."""


class SimulatedExecutor:
    """Takes the time and the memory its law says, and makes up tokens.

    The model's folder gives tokenizer and vocabulary; the law gives the length, the data type and the device.

    Raises:
        ConfigError: for no law, an unknown one, a length beyond the law's, another data type than the law's, more than
            one device; and as on a real device `NotEnoughMemoryError`, `NoKvMemoryError` and `OutOfDeviceMemoryError`.
    """

    resolved: ResolvedConfig

    def __init__(self, config: EngineConfig, *, clock: Clock | None = None) -> None:
        if config.law is None:
            raise ConfigError(f"executor='simulated' needs a law: take one of {', '.join(law_names())}, or a YAML file")
        law = load_law(config.law)
        if config.device_memory_bytes is not None:
            raise ConfigError(
                f"device_memory_bytes={config.device_memory_bytes}: law {law.name!r} brings a device of its own size; "
                "leave it out, or change memory.total_bytes in a copy of the law"
            )
        max_model_len = _max_model_len(config, law)
        _check_dtype(config, law)
        check_one_device(config.tensor_parallel_size)
        warnings = check_against_model(config, max_model_len=max_model_len)
        budget, self._headroom_bytes = _start(config, law, max_model_len)
        self._law = law
        self._clock = RealClock() if clock is None else clock
        self._kv_scale = _kv_scale(config, law)
        layout = KvLayout(
            block_size=config.block_size,
            block_bytes=math.ceil(config.block_size * law.memory.kv_bytes_per_token * self._kv_scale),
        )
        num_blocks, overridden = kv_blocks_in_force(config, budget, layout, max_model_len=max_model_len)
        folder = model_folder(config.model)
        model = read_model_config(folder)
        self._token_ids = _made_up_text(config, TextTokenizer(folder), vocab_size=model.vocab_size)
        self._noise = np.random.default_rng(config.seed)
        self._largest_graph = max(graph_sizes(config.max_num_seqs))
        self._step_end_s = self._clock.now_s()
        self.resolved = ResolvedConfig(
            asked=config,
            served_model_name=config.served_model_name or config.model,
            max_model_len=max_model_len,
            dtype=law.dtype,
            device=f"simulated:{law.name}",
            num_gpu_blocks=num_blocks,
            kv_block_bytes=layout.block_bytes,
            memory=budget,
            eos_token_ids=model.eos_token_ids,
            vocab_size=model.vocab_size,
            captures_graphs=law.graphs.without_graph_factor > 1,
            warnings=(_LABEL.format(law=law), *warnings, *overridden),
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Wait as long as the plan takes by the law, and make a token up for each request that samples.

        Raises:
            OutOfDeviceMemoryError: `oom_runtime`, for a step that needs more than start-up left.
        """
        if not plan.scheduled:
            return StepResult(sampled_token_ids={})
        self._check_memory(plan)
        start_s = self._start_of(plan)
        self._step_end_s = max(start_s + self._step_s(plan), self._clock.now_s())
        self._clock.wait_until(self._step_end_s)
        drawn = {item.request_id: self._token_id(item) for item in plan.scheduled if item.samples}
        asked = [item for item in plan.scheduled if item.samples and item.sampling.num_logprobs is not None]
        logprobs = {item.request_id: _certain(drawn[item.request_id], item.sampling.num_logprobs) for item in asked}
        return StepResult(sampled_token_ids=drawn, logprobs=logprobs)

    def _start_of(self, plan: StepPlan) -> float:
        """When the step begins: where a request goes on, at the end of the step before, else now.

        So the law's time runs from step to step, and what planning and a late wake-up cost in between is part of it,
        as it is for an engine that plans a step while the device computes the one before.
        """
        goes_on = len(plan.scheduled) > len(plan.admitted) + len(plan.resumed)
        return self._step_end_s if goes_on else self._clock.now_s()

    def _step_s(self, plan: StepPlan) -> float:
        law = self._law
        step_s = law.step_time.step_s(plan, kv_scale=self._kv_scale)
        is_decode = plan.num_scheduled_tokens == len(plan.scheduled)
        if is_decode and len(plan.scheduled) > self._largest_graph:
            step_s *= law.graphs.without_graph_factor
        if law.noise_sigma:
            # The mean of a lognormal is exp(mu + sigma^2 / 2): this mu keeps it at 1.
            step_s *= self._noise.lognormal(mean=-(law.noise_sigma**2) / 2, sigma=law.noise_sigma)
        return step_s

    def _check_memory(self, plan: StepPlan) -> None:
        per_token = self._law.memory.unprofiled.step_bytes_per_token
        needed = per_token * plan.num_scheduled_tokens
        if needed > self._headroom_bytes:
            raise OutOfDeviceMemoryError(
                "oom_runtime",
                f"simulated: a step of {plan.num_scheduled_tokens} tokens needs {human(needed)} beyond what was "
                f"profiled, and gpu_memory_utilization={self.resolved.asked.gpu_memory_utilization} leaves "
                f"{human(self._headroom_bytes)}: lower it, or max_num_batched_tokens",
            )

    def _token_id(self, item: ScheduledRequest) -> int:
        """The next token of a text that the request's seed says where to begin."""
        return self._token_ids[((item.sampling.seed or 0) + item.output_index) % len(self._token_ids)]


_LABEL = "SIMULATED: step times and memory follow the law {law.name} ({law.description}), tokens are made up"


def _start(config: EngineConfig, law: Law, max_model_len: int) -> tuple[MemoryBudget, int]:
    """Take memory in the order an engine does; returns the budget and the bytes that are left past the share.

    Raises:
        OutOfDeviceMemoryError: where the device runs out, with the phase that it ran out in.
    """
    memory, sizes = law.memory, graph_sizes(config.max_num_seqs)
    total = memory.total_bytes
    device = DeviceMemory(total_bytes=total, free_bytes=max(0, total - memory.used_by_others_bytes))
    if memory.weights_bytes > device.free_bytes:
        raise OutOfDeviceMemoryError(
            "oom_startup",
            f"simulated: the weights take {human(memory.weights_bytes)}, "
            f"and {human(device.free_bytes)} of {human(total)} is free",
        )
    requested = requested_bytes(device, config.gpu_memory_utilization, least_bytes=memory.weights_bytes)
    budget = memory_budget(
        total_bytes=total,
        free_bytes=device.free_bytes,
        requested_bytes=requested,
        weights_bytes=memory.weights_bytes,
        activation_peak_bytes=memory.activation_bytes_per_token * config.max_num_batched_tokens
        + memory.sampled_row_bytes * config.max_num_seqs,
        request_buffers_bytes=memory.request_buffer_bytes_per_token * config.max_num_seqs * max_model_len,
        non_torch_bytes=memory.non_torch_bytes,
        graph_bytes=memory.graph_bytes_per_size * len(sizes),
    )
    headroom = device.free_bytes - requested
    for kind, what, needed in (
        ("oom_graph_capture", f"capturing {len(sizes)} graphs", memory.unprofiled.graph_bytes_per_size * len(sizes)),
        (
            "oom_sampler_warmup",
            f"warming the sampler up with max_num_seqs={config.max_num_seqs} rows",
            memory.unprofiled.sampler_bytes_per_row * config.max_num_seqs,
        ),
    ):
        headroom -= needed
        if headroom < 0:
            raise OutOfDeviceMemoryError(
                kind,
                f"simulated: {what} needs {human(needed)} beyond what was profiled, {human(-headroom)} more than "
                f"gpu_memory_utilization={config.gpu_memory_utilization} leaves: lower it, or max_num_seqs",
            )
    return budget, headroom


def _max_model_len(config: EngineConfig, law: Law) -> int:
    if config.max_model_len is not None and config.max_model_len > law.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is above the {law.max_model_len} positions of law {law.name!r}: "
            f"ask for at most {law.max_model_len}"
        )
    return config.max_model_len or law.max_model_len


def _check_dtype(config: EngineConfig, law: Law) -> None:
    if config.dtype not in ("auto", law.dtype):
        raise ConfigError(f"dtype={config.dtype!r}: law {law.name!r} holds for {law.dtype} only; leave it at auto")


def _kv_scale(config: EngineConfig, law: Law) -> float:
    if config.kv_cache_dtype == "auto":
        return 1.0
    return 0.25 if law.dtype == "float32" else 0.5


def _certain(token_id: int, num_logprobs: int | None) -> TokenLogprobs:
    return TokenLogprobs(_CERTAIN, ((token_id, _CERTAIN),) if num_logprobs else ())


def _made_up_text(config: EngineConfig, tokenizer: TextTokenizer, *, vocab_size: int) -> tuple[int, ...]:
    """Printable tokens in an order that the engine's seed decides; none of them special, so none ends an output."""
    texts = {token_id: tokenizer.decode([token_id]) for token_id in range(min(vocab_size, _MOST_IDS))}
    printable = [token_id for token_id, text in texts.items() if text.isascii() and text.isprintable() and text.strip()]
    if not printable:
        raise ConfigError(f"model={config.model!r}: none of its first {len(texts)} tokens is printable")
    return tuple(np.random.default_rng(config.seed).permutation(printable).tolist())
