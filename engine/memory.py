"""The memory budget: what the device has, what a step takes, and how many KV blocks that leaves.

`requested = total x gpu_memory_utilization`, and `kv = requested - weights - activation peak - request buffers -
non-torch - graphs` (vLLM: `vllm/v1/worker/gpu_worker.py`). The share is per instance: two on one device each take
theirs. What is counted is tensors; the memory of the Python processes around them (interpreter, libraries, token ids,
block lists) is not. Plain arithmetic: `engine/device_memory.py` brings the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import ConfigError, EngineConfig, MemoryBudget
from engine.device_ledger import Claim

_SHARES = tuple(hundredths / 100 for hundredths in range(1, 101))
"""The shares that messages offer; the bytes of one are cut as `requested_bytes` cuts them."""


class NotEnoughMemoryError(ConfigError):
    """More memory was asked for than is free now; it may be once another process ends."""


class NoKvMemoryError(ConfigError):
    """What is left for KV blocks does not hold one request of `max_model_len` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The device before this engine takes anything."""

    total_bytes: int
    free_bytes: int
    claims: tuple[Claim, ...] = ()
    """What other engines of this user hold of it, where that is known: on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """What an instance may take of a device."""

    memory: DeviceMemory
    requested_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How KV is stored: `block_size` tokens a block, `block_bytes` over all layers."""

    block_size: int
    block_bytes: int

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of this length needs."""
        return -(-num_tokens // self.block_size)

    def tokens_in(self, num_bytes: int) -> int:
        """Tokens that whole blocks of so much memory hold."""
        return max(0, num_bytes // self.block_bytes) * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """What a start takes at least, as far as it is known before anything is loaded."""

    weights_bytes: int
    activation_bytes: int
    request_buffers_bytes: int
    layout: KvLayout
    max_model_len: int

    @property
    def step_bytes(self) -> int:
        """What the largest step takes, weights included and no KV blocks."""
        return self.weights_bytes + self.activation_bytes + self.request_buffers_bytes

    @property
    def total_bytes(self) -> int:
        """With KV blocks of one request of `max_model_len`."""
        return self.step_bytes + self.layout.blocks_for(self.max_model_len) * self.layout.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a start measured, before any KV block is made: enough to say how many there are, or why too few."""

    device: str
    budget: MemoryBudget
    layout: KvLayout
    max_model_len: int
    peak_step: str
    """The step that took the activation peak, in words."""


def requested_bytes(device: DeviceMemory, share: float, *, least_bytes: int) -> int:
    """`total x share`.

    Args:
        least_bytes: what the model and one request are known to take; no share below it is offered.

    Raises:
        NotEnoughMemoryError: where less is free, naming total, requested, free, who holds how much where that is known,
            and the way out: the highest share that is free, or, where the model does not fit that, what to stop.
    """
    requested = int(device.total_bytes * share)
    if requested <= device.free_bytes:
        return requested
    way_out = _way_out(device, requested, least_bytes)
    raise NotEnoughMemoryError(
        f"gpu_memory_utilization={share} asks for {human(requested)} of {human(device.total_bytes)}, "
        f"but {human(device.free_bytes)} is free now{_held_by(device.claims)}: {way_out}"
    )


def _way_out(device: DeviceMemory, requested: int, least_bytes: int) -> str:
    highest = highest_share(free_bytes=device.free_bytes, total_bytes=device.total_bytes)
    stop = f"stop {_to_stop(device, max(requested, least_bytes))}"
    least = f"the model and one request of max_model_len, which take {human(least_bytes)} at least"
    if least_bytes > device.total_bytes:
        return f"no share of this device holds {least}: it takes a smaller model, max_model_len or max_num_seqs"
    if highest > 0 and least_bytes <= int(device.total_bytes * highest):
        return (
            f"{stop}, or set gpu_memory_utilization to at most {highest:.2f}, which may hold {least}: "
            "`python -m engine plan` with the same flags says whether it does"
        )
    smallest = _smallest_share(least_bytes, device.total_bytes)
    raised = f" and set gpu_memory_utilization to at least {smallest:.2f}" if requested < least_bytes else ""
    return f"{stop}{raised}: what is free does not hold {least}"


def _to_stop(device: DeviceMemory, num_bytes: int) -> str:
    """The fewest of those that are known to hold memory whose end leaves so much free, in words."""
    pids, missing = [], num_bytes - device.free_bytes
    for claim in sorted(device.claims, key=lambda claim: -claim.num_bytes):
        if missing > 0:
            pids.append(f"pid {claim.pid}")
            missing -= claim.num_bytes
    others = [] if missing <= 0 else [f"what else holds {'it' if not pids else 'the rest'}"]
    return " and ".join([*pids, *others])


def _held_by(claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    holders = ", ".join(f"pid {claim.pid} holds {human(claim.num_bytes)}" for claim in claims)
    return f" ({holders})"


def memory_budget(
    *,
    total_bytes: int,
    free_bytes: int,
    requested_bytes: int,
    weights_bytes: int,
    activation_peak_bytes: int,
    request_buffers_bytes: int,
    non_torch_bytes: int,
    graph_bytes: int = 0,
) -> MemoryBudget:
    """Subtract what is taken from what was requested; less than 0 may be left for KV."""
    taken = weights_bytes + activation_peak_bytes + request_buffers_bytes + non_torch_bytes + graph_bytes
    return MemoryBudget(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        requested_bytes=requested_bytes,
        weights_bytes=weights_bytes,
        activation_peak_bytes=activation_peak_bytes,
        request_buffers_bytes=request_buffers_bytes,
        non_torch_bytes=non_torch_bytes,
        graph_bytes=graph_bytes,
        kv_cache_bytes=requested_bytes - taken,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """How far KV blocks are from holding one request of `max_model_len`, and what would do instead."""

    needed_bytes: int
    left_bytes: int
    longest_that_fits: int
    """The largest `max_model_len` at this share; 0 where none is. Unit: tokens."""

    smallest_share: float | None
    """The least `gpu_memory_utilization` that holds `max_model_len`, in hundredths; None where none does."""

    highest_free_share: float
    """The highest `gpu_memory_utilization` that is free now, in hundredths."""

    longest_at_highest: int
    """The largest `max_model_len` at that share; 0 where none is. Unit: tokens."""

    longest_at_full: int
    """The largest `max_model_len` if the whole device were free and taken; 0: the model itself does not fit. Unit:
    tokens."""


def shortfall(budget: MemoryBudget, layout: KvLayout, *, max_model_len: int) -> Shortfall | None:
    """What is missing for one request of `max_model_len`, or None where it fits."""
    needed = layout.blocks_for(max_model_len) * layout.block_bytes
    if budget.kv_cache_bytes >= needed:
        return None
    taken, total = budget.requested_bytes - budget.kv_cache_bytes, budget.total_bytes
    highest = highest_share(free_bytes=budget.free_bytes, total_bytes=total)
    return Shortfall(
        needed_bytes=needed,
        left_bytes=max(0, budget.kv_cache_bytes),
        longest_that_fits=layout.tokens_in(budget.kv_cache_bytes),
        smallest_share=_smallest_share(taken + needed, total),
        highest_free_share=highest,
        longest_at_highest=layout.tokens_in(int(total * highest) - taken),
        longest_at_full=layout.tokens_in(total - taken),
    )


def highest_share(*, free_bytes: int, total_bytes: int) -> float:
    """The highest share that is free, in hundredths; 0.0 where not even one is."""
    return max((share for share in _SHARES if int(total_bytes * share) <= free_bytes), default=0.0)


def _smallest_share(needed_bytes: int, total_bytes: int) -> float | None:
    return min((share for share in _SHARES if int(total_bytes * share) >= needed_bytes), default=None)


def num_kv_blocks(budget: MemoryBudget, layout: KvLayout, *, max_model_len: int) -> int:
    """Whole blocks in what is left for KV.

    Raises:
        NoKvMemoryError: where they do not hold one request of `max_model_len`, naming what is left, what that needs,
            the longest request that fits, and the smallest share that would do, if any.
    """
    missing = shortfall(budget, layout, max_model_len=max_model_len)
    if missing is None:
        return budget.kv_cache_bytes // layout.block_bytes
    raise NoKvMemoryError(
        f"one request of max_model_len={max_model_len} needs {human(missing.needed_bytes)} of KV blocks, but "
        f"{human(missing.left_bytes)} of the requested {human(budget.requested_bytes)} is left "
        f"(weights {human(budget.weights_bytes)}, activations {human(budget.activation_peak_bytes)}, request buffers "
        f"{human(budget.request_buffers_bytes)}, non-torch {human(budget.non_torch_bytes)}"
        f"{f', graphs {human(budget.graph_bytes)}' if budget.graph_bytes else ''}): "
        f"{'; '.join(ways_out(missing, budget))}"
    )


def hopeless_report(least: LeastMemory, share: DeviceShare, *, device: str) -> MemoryReport | None:
    """What is known of a start that would take more than the whole device before any KV block; None for any other.

    `num_kv_blocks` says of it why it is refused.
    """
    memory = share.memory
    if least.step_bytes <= memory.total_bytes:
        return None
    budget = memory_budget(
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        requested_bytes=share.requested_bytes,
        weights_bytes=least.weights_bytes,
        activation_peak_bytes=least.activation_bytes,
        request_buffers_bytes=least.request_buffers_bytes,
        non_torch_bytes=0,
    )
    return MemoryReport(
        device=device,
        budget=budget,
        layout=least.layout,
        max_model_len=least.max_model_len,
        peak_step="the model's shape, at least: nothing was loaded or run",
    )


def num_blocks_of_ranks(ranks: Sequence[int]) -> int:
    """KV blocks to count on where several devices have different numbers of them: the fewest.

    (vLLM: `vllm/v1/core/kv_cache_utils.py`; a count taken from one rank overruns the others.)
    """
    return min(ranks)


def ways_out(missing: Shortfall, budget: MemoryBudget) -> list[str]:
    """What to do about it, each a clause; none of them fails for the same reason again."""
    longest = missing.longest_that_fits
    return [
        f"the largest max_model_len that fits is {longest}" if longest else "no request fits at all",
        _share_that_would_do(missing, budget),
    ]


def _share_that_would_do(missing: Shortfall, budget: MemoryBudget) -> str:
    free_now = f"{human(budget.free_bytes)} of {human(budget.total_bytes)} is free now"
    if missing.smallest_share is not None:
        would_do = f"the smallest gpu_memory_utilization that would do is {missing.smallest_share:.2f}"
        is_free = missing.smallest_share <= missing.highest_free_share
        return would_do if is_free else f"{would_do}, but only {free_now}"
    if missing.longest_at_full:
        at_most = f"at {missing.highest_free_share:.2f} max_model_len={missing.longest_at_highest} fits"
        alternative = at_most if missing.longest_at_highest else f"only {free_now}"
        return f"no gpu_memory_utilization holds that length on this device; {alternative}"
    way_out = "a smaller model or a larger device"
    if budget.weights_bytes < budget.total_bytes:
        way_out += ", or smaller max_num_batched_tokens and max_num_seqs"
    return f"the model fits a device of {human(budget.total_bytes)} at no gpu_memory_utilization: it takes {way_out}"


def kv_blocks_in_force(
    config: EngineConfig, budget: MemoryBudget, layout: KvLayout, *, max_model_len: int
) -> tuple[int, tuple[str, ...]]:
    """KV blocks to use, and warnings where an override breaks a rule that the budget would have kept.

    Raises:
        NoKvMemoryError: as `num_kv_blocks`; with an override only where the device does not hold the model.
    """
    asked = config.num_gpu_blocks_override
    if asked is None:
        return num_kv_blocks(budget, layout, max_model_len=max_model_len), ()
    if budget.requested_bytes - budget.kv_cache_bytes > budget.total_bytes:
        # No number of blocks makes room for what does not fit without any.
        return num_kv_blocks(budget, layout, max_model_len=max_model_len), ()
    warnings = []
    fitting = max(0, budget.kv_cache_bytes // layout.block_bytes)
    if asked > fitting:
        warnings.append(f"num_gpu_blocks_override={asked} is above the {fitting} blocks that the memory share leaves")
    needed = layout.blocks_for(max_model_len)
    if asked < needed:
        warnings.append(
            f"num_gpu_blocks_override={asked} is below the {needed} blocks that one request of "
            f"max_model_len={max_model_len} needs"
        )
    return asked, tuple(warnings)


def human(num_bytes: int) -> str:
    """Bytes as a person reads them."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"
