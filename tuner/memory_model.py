"""Predicts KV blocks from the first launch, and refuses what cannot hold one request before it is launched."""

from __future__ import annotations

import math

from tuner.engine_config import EngineConfig, Setting
from tuner.frozen import Record
from tuner.records import EngineFacts

_HELD = (
    *("dtype", "kv_cache_dtype", "block_size", "quantization", "speculative_config", "enforce_eager"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
)


def _held(config: EngineConfig) -> tuple[Setting | None, ...]:
    return tuple(getattr(config, name) for name in _HELD)


def _share_decides(config: EngineConfig) -> bool:
    """Whether it is the share that says how many KV blocks there are."""
    return config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is None


class MemoryModel(Record):
    """What one launch told about memory: enough to know what another share would leave for KV blocks.

    The part the share does not change (weights, activations of the budget, buffers) is what the measured launch left
    between its requested bytes and its KV blocks; activations are scaled by the token budget, which they are linear in.
    """

    total_bytes: int
    block_bytes: int
    block_size: int
    max_model_len: int
    fixed_bytes: int
    """Weights and whatever else neither share nor budget changes."""

    activation_bytes_per_token: float
    held: tuple[Setting | None, ...]
    """The settings that say what is in memory besides, in the order of `_HELD`."""

    @classmethod
    def calibrated(cls, config: EngineConfig, facts: EngineFacts) -> MemoryModel | None:
        """The model after a launch of `config`; None where the engine does not say enough."""
        blocks, block_size, block_bytes = facts.num_gpu_blocks, facts.block_size, facts.kv_block_bytes
        total, reserved, activation = facts.memory_total_bytes, facts.memory_reserved_bytes, facts.activation_peak_bytes
        if blocks is None or block_size is None or block_bytes is None:
            return None
        if total is None or reserved is None or activation is None or not _share_decides(config):
            return None
        return cls(
            total_bytes=total,
            block_bytes=block_bytes,
            block_size=block_size,
            max_model_len=facts.max_model_len,
            fixed_bytes=max(0, reserved - activation - blocks * block_bytes),
            activation_bytes_per_token=activation / config.max_num_batched_tokens,
            held=_held(config),
        )

    def covers(self, config: EngineConfig) -> bool:
        """Whether `config` keeps weights and KV blocks as they were measured: of others nothing is known."""
        return _share_decides(config) and _held(config) == self.held

    def num_blocks(self, config: EngineConfig) -> int:
        """KV blocks `config` would have; can be negative. Unit: blocks."""
        requested = self.total_bytes * config.share
        activation = self.activation_bytes_per_token * config.max_num_batched_tokens
        return math.floor((requested - self.fixed_bytes - activation) / self.block_bytes)

    def refusal(self, config: EngineConfig) -> str | None:
        """Why `config` cannot hold a single request of full length, or None.

        A tenth is allowed for the prediction's own error: what is close is launched and the engine decides.
        """
        length = config.max_model_len or self.max_model_len
        needed = math.ceil(length / self.block_size)
        blocks = self.num_blocks(config)
        if not self.covers(config) or blocks >= 0.9 * needed:
            return None
        return (
            f"gpu_memory_utilization={config.share:g} would leave {max(0, blocks)} KV blocks, "
            f"one request of max_model_len={length} needs {needed}: raise the share or lower max_model_len"
        )

    def requests_that_fit(self, config: EngineConfig, tokens_per_request: float) -> int:
        """How many requests of that many tokens the KV cache holds at once. Unit: requests."""
        return max(0, math.floor(self.num_blocks(config) * self.block_size / tokens_per_request))
