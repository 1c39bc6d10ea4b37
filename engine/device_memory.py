"""What a device has, what is free of it, and what a step takes: read from the machine, at start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.config import EngineConfig, split_device
from engine.device_ledger import Claim, locked_ledger
from engine.limits import read_ram
from engine.memory import DeviceMemory, DeviceShare, requested_bytes


def take_share(config: EngineConfig, device: torch.device, *, limit_bytes: int | None, least_bytes: int) -> DeviceShare:
    """Claim this instance's share for this process as long as it lives.

    On CPU looking and claiming are one: of two instances that start at once, only those get theirs that fit together.

    Args:
        limit_bytes: see `device_memory`.
        least_bytes: see `requested_bytes`.

    Raises:
        NotEnoughMemoryError: where less is free than the share.
        DeviceLedgerError: where it cannot be known what is free.
    """
    if device.type == "cuda":
        memory = device_memory(config, device, limit_bytes=limit_bytes)
        requested = requested_bytes(memory, config.gpu_memory_utilization, least_bytes=least_bytes)
        return DeviceShare(memory=memory, requested_bytes=requested)
    with locked_ledger(virtual_device(config)) as ledger:
        memory = _budget_of_cpu(config, limit_bytes, ledger.others)
        requested = requested_bytes(memory, config.gpu_memory_utilization, least_bytes=least_bytes)
        ledger.claim(requested)
    return DeviceShare(memory=memory, requested_bytes=requested)


def virtual_device(config: EngineConfig) -> str:
    """The name under which instances on a CPU share a budget: `cpu:0` where no number is asked for."""
    return f"cpu:{split_device(config.device)[1]}"


def device_label(config: EngineConfig, device: torch.device) -> str:
    """The device in force, as it was asked for or found: `cpu`, `cuda`, or with a number above 0, as `cpu:1`."""
    number = split_device(config.device)[1]
    return f"{device.type}:{number}" if number else device.type


def device_memory(config: EngineConfig, device: torch.device, *, limit_bytes: int | None) -> DeviceMemory:
    """Total and free memory now.

    On CPU the total is `device_memory_bytes`, else half the RAM, which data-parallel cores share equally, and what is
    free is the smallest of what other engines have left of that budget, the RAM that is available, and the limit.

    Args:
        limit_bytes: on CPU, the most this process may use; the RAM counts as no larger. None: no limit.

    Raises:
        DeviceLedgerError: where it cannot be known what other engines hold.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total_bytes=total, free_bytes=free)
    with locked_ledger(virtual_device(config)) as ledger:
        return _budget_of_cpu(config, limit_bytes, ledger.others)


def _budget_of_cpu(config: EngineConfig, limit_bytes: int | None, claims: Sequence[Claim]) -> DeviceMemory:
    ram = read_ram()
    limit = ram.total_bytes if limit_bytes is None else limit_bytes
    total = config.device_memory_bytes or min(ram.total_bytes, limit) // 2 // config.data_parallel_size
    left = max(0, total - sum(claim.num_bytes for claim in claims))
    return DeviceMemory(total_bytes=total, free_bytes=min(left, ram.available_bytes, limit), claims=tuple(claims))


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
