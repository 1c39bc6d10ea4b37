"""What a start takes at least, by the model's shape alone: nothing is loaded, run or allocated for it.

What cannot fit is so refused in a moment, where measuring it would first take the memory that is not there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.memory import KvLayout, LeastMemory
from engine.models.config import ModelConfig
from engine.models.weights import load_weights
from kernels.linear import is_packed

_SCORE_BYTES = 24
"""Held at once for each score of a distribution that is cut and reported: the score, its log-probability, its
probability before and after a cut, and a running sum in float64."""


def kv_layout(config: EngineConfig, model: ModelConfig, *, itemsize: int) -> KvLayout:
    """How KV is stored in numbers of so many bytes."""
    token_bytes = model.num_layers * 2 * model.num_kv_heads * model.head_dim * itemsize
    return KvLayout(block_size=config.block_size, block_bytes=config.block_size * token_bytes)


def least_memory(
    config: EngineConfig, model: ModelConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> LeastMemory:
    """Weights as they are packed, and of buffers and activations the parts that grow largest."""
    layout = kv_layout(config, model, itemsize=1 if config.kv_cache_dtype == "fp8" else dtype.itemsize)
    one_request = layout.blocks_for(max_model_len)
    # The gate, what it is multiplied by, the product, and the hidden state beside its residual.
    mlp_bytes = config.max_num_batched_tokens * (3 * model.intermediate_size + 2 * model.hidden_size) * dtype.itemsize
    return LeastMemory(
        weights_bytes=_weights_bytes(model, dtype, device),
        activation_bytes=max(mlp_bytes, config.max_num_seqs * model.vocab_size * _SCORE_BYTES),
        request_buffers_bytes=config.max_num_seqs * one_request * torch.int32.itemsize,
        layout=layout,
        max_model_len=max_model_len,
    )


def _weights_bytes(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    weights = load_weights(_Shapes(), model, dtype=dtype, device=torch.device("meta"))
    num_bytes = weights.num_bytes()
    if weights.lm_head.holds(weights.embedding) and is_packed(dtype, device):
        num_bytes += weights.embedding.nbytes
    return num_bytes


class _Shapes:
    """A source of weights that have a shape and no numbers."""

    def __contains__(self, name: object) -> bool:
        return False

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:  # noqa: ARG002 - a `Source` is asked by name
        return torch.empty(shape, device="meta")
