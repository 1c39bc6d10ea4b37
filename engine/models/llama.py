"""One decoder for Llama, Qwen2 and Qwen3: what differs between them is data in `ModelConfig`.

A layer is `h += output(attend(rope(norm(q, k)), v))`, then `h += down(silu(gate) * up)`, each on the root mean
square norm of h (Touvron et al. 2023, arXiv:2302.13971; Qwen3's per-head norm: arXiv:2505.09388).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from engine.attention import AttentionInputs, attend
from engine.models.config import ModelConfig
from engine.models.weights import LayerWeights, ModelWeights
from kernels.reference import add_rms_norm, rms_norm, rotary_embedding, silu_mul


class Decoder:
    """Token ids and a paged KV cache in, hidden states and logits out; holds weights, no state between steps."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self._inverse_frequencies = inverse_frequencies(config).to(weights.embedding.device)
        self._scale = config.head_dim**-0.5

    def forward(self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs, kv_cache: Tensor) -> Tensor:
        """Hidden states after the last norm.

        Args:
            token_ids: (T,) int64.
            positions: (T,) int64.
            kv_cache: (layers, 2, blocks, block size, key/value heads, head size), written in place.

        Returns:
            (T, hidden size).
        """
        angles = (positions.unsqueeze(1) * self._inverse_frequencies).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        rotation = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        eps = self.config.rms_norm_eps
        residual = F.embedding(token_ids, self.weights.embedding)
        hidden = torch.zeros_like(residual)
        layers = zip(self.weights.layers, kv_cache.unbind(), self.config.layer_windows, strict=True)
        for layer, layer_cache, window in layers:
            hidden, residual = add_rms_norm(hidden, residual, layer.input_norm, eps)
            hidden = self._attention(layer, hidden, rotation, inputs, layer_cache, window)
            hidden, residual = add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = F.linear(silu_mul(F.linear(hidden, layer.gate_up)), layer.down)
        return add_rms_norm(hidden, residual, self.weights.final_norm, eps)[0]

    def _attention(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        inputs: AttentionInputs,
        kv_cache: Tensor,
        window: int | None,
    ) -> Tensor:
        config = self.config
        num_tokens, head_dim = hidden.shape[0], config.head_dim
        packed = F.linear(hidden, layer.qkv, layer.qkv_bias).view(num_tokens, -1, head_dim)
        query_key, value = packed.tensor_split([config.num_heads + config.num_kv_heads], dim=1)
        if layer.qk_norm is not None:
            query_key = rms_norm(query_key, layer.qk_norm, config.rms_norm_eps)
        query_key = rotary_embedding(query_key, *rotation)
        query, key = query_key.tensor_split([config.num_heads], dim=1)
        out = attend(query, key, value, kv_cache, inputs, scale=self._scale, window=window)
        return F.linear(out.reshape(num_tokens, -1), layer.output)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary: (rows, hidden size) to (rows, vocabulary), float32."""
        return F.linear(hidden, self.weights.lm_head).float()


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotary frequencies `theta ** (-2 i / D)` for i in [0, D / 2), float32 (Su et al. 2021, arXiv:2104.09864).

    Llama 3 scaling divides the slow ones by `factor`, keeps the fast ones, and blends in between (transformers:
    `modeling_rope_utils.py`, `rope_type` "llama3").
    """
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    rope = config.llama3_rope
    if rope is None:
        return frequencies
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor
