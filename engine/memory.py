"""The memory budget: what the device has, what a step takes, and how many KV blocks that leaves.

`requested = total x gpu_memory_utilization`, and `kv = requested - weights - activation peak - request buffers -
non-torch` (vLLM: `vllm/v1/worker/gpu_worker.py`). All but the functions that end the file are plain arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from engine.config import ConfigError, EngineConfig, MemoryBudget


class NotEnoughMemoryError(ConfigError):
    """More memory was asked for than is free now; it may be once another process ends."""


class NoKvMemoryError(ConfigError):
    """What is left for KV blocks does not hold one request of `max_model_len` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The device before this engine takes anything."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How KV is stored: `block_size` tokens a block, `block_bytes` over all layers."""

    block_size: int
    block_bytes: int

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of this length needs."""
        return -(-num_tokens // self.block_size)


def requested_bytes(device: DeviceMemory, share: float) -> int:
    """`total x share`.

    Raises:
        NotEnoughMemoryError: where less is free, naming total, requested, free and the highest share that is.
    """
    requested = int(device.total_bytes * share)
    if requested <= device.free_bytes:
        return requested
    highest = math.floor(device.free_bytes / device.total_bytes * 100) / 100
    way_out = f"free some, or set gpu_memory_utilization to at most {highest:.2f}" if highest > 0 else "free some"
    raise NotEnoughMemoryError(
        f"gpu_memory_utilization={share} asks for {_human(requested)} of {_human(device.total_bytes)}, "
        f"but {_human(device.free_bytes)} is free now: {way_out}"
    )


def memory_budget(
    *,
    total_bytes: int,
    requested_bytes: int,
    weights_bytes: int,
    activation_peak_bytes: int,
    request_buffers_bytes: int,
    non_torch_bytes: int,
) -> MemoryBudget:
    """Subtract what is taken from what was requested; less than 0 may be left for KV."""
    taken = weights_bytes + activation_peak_bytes + request_buffers_bytes + non_torch_bytes
    return MemoryBudget(
        total_bytes=total_bytes,
        requested_bytes=requested_bytes,
        weights_bytes=weights_bytes,
        activation_peak_bytes=activation_peak_bytes,
        request_buffers_bytes=request_buffers_bytes,
        non_torch_bytes=non_torch_bytes,
        kv_cache_bytes=requested_bytes - taken,
    )


def num_kv_blocks(budget: MemoryBudget, layout: KvLayout, *, max_model_len: int) -> int:
    """Whole blocks in what is left for KV.

    Raises:
        NoKvMemoryError: where they do not hold one request of `max_model_len`, naming what is left, what that needs,
            the longest request that fits, and the smallest share that would do, if any.
    """
    blocks = max(0, budget.kv_cache_bytes // layout.block_bytes)
    needed = layout.blocks_for(max_model_len)
    if blocks >= needed:
        return blocks
    left, need_bytes = max(0, budget.kv_cache_bytes), needed * layout.block_bytes
    fits = blocks * layout.block_size
    longest = f"the largest max_model_len that fits is {fits}" if fits else "no request fits at all"
    raise NoKvMemoryError(
        f"one request of max_model_len={max_model_len} needs {_human(need_bytes)} of KV blocks, but "
        f"{_human(left)} of the requested {_human(budget.requested_bytes)} is left "
        f"(weights {_human(budget.weights_bytes)}, activations {_human(budget.activation_peak_bytes)}, request buffers "
        f"{_human(budget.request_buffers_bytes)}, non-torch {_human(budget.non_torch_bytes)}): {longest}; "
        f"{_share_that_would_do(budget, layout, max_model_len)}"
    )


def _share_that_would_do(budget: MemoryBudget, layout: KvLayout, max_model_len: int) -> str:
    taken = budget.requested_bytes - budget.kv_cache_bytes
    total = budget.total_bytes
    needed = taken + layout.blocks_for(max_model_len) * layout.block_bytes
    if needed <= total:
        share = math.ceil(needed / total * 100) / 100
        return f"the smallest gpu_memory_utilization that would do is {share:.2f}"
    if taken + layout.block_bytes <= total:
        fits = (total - taken) // layout.block_bytes * layout.block_size
        return f"no gpu_memory_utilization holds that length on this device; at 1.00 max_model_len={fits} fits"
    way_out = "a smaller model or a larger device"
    if budget.weights_bytes < total:
        way_out += ", or smaller max_num_batched_tokens and max_num_seqs"
    return f"the model fits a device of {_human(total)} at no gpu_memory_utilization: it takes {way_out}"


def _human(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"


def device_memory(config: EngineConfig, device: torch.device, *, limit_bytes: int | None) -> DeviceMemory:
    """Total and free memory now.

    On CPU the total is `device_memory_bytes`, else half the RAM, and what is free is the smaller of that budget
    and the RAM that is available.

    Args:
        limit_bytes: on CPU, the most this process may use; the RAM counts as no larger. None: no limit.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total_bytes=total, free_bytes=free)
    ram = psutil.virtual_memory()
    limit = ram.total if limit_bytes is None else limit_bytes
    total = config.device_memory_bytes or min(ram.total, limit) // 2
    return DeviceMemory(total_bytes=total, free_bytes=min(total, ram.available, limit))


def activation_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Most bytes `run` holds at once beyond what was held before.

    On a GPU: the caching allocator's own peak. On CPU: the running sum of every allocation and release that torch's
    CPU allocator reports to its profiler, the scratch space inside an op included. Both are exact and repeatable;
    scratch that math libraries (MKL, oneDNN) take past torch's allocator is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profiler:
        run()
    results = profiler.kineto_results
    events = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        held += change
        peak = max(peak, held)
    return peak


def non_torch_bytes(before: DeviceMemory, device: torch.device) -> int:
    """What libraries took on the device outside torch's tensors since `before`, by difference.

    0 on CPU, where it is not counted: the budget there is for tensors, and the process's resident size moves by
    more than the difference sought with every import and thread.
    """
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, before.free_bytes - free - torch.cuda.memory_reserved(device))
