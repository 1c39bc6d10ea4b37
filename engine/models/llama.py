"""One decoder for Llama, Mistral, Qwen and Gemma 3: what differs between them is data in `ModelConfig`.

A layer is `h += output(attend(rope(norm(q, k)), v))`, then `h += down(act(gate) * up)`, each on the root mean square
norm of h (Touvron et al. 2023, arXiv:2302.13971; a norm per head: Qwen3, arXiv:2505.09388; norms before adding, and
layers of two kinds: Gemma 3, arXiv:2503.19786).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from engine.attention import AttentionInputs, attend
from engine.kv_cache import KvCache, LayerKv
from engine.models.config import ModelConfig
from engine.models.rope import Rope
from engine.models.weights import LayerWeights, ModelWeights
from kernels.dispatch import add_rms_norm, gelu_tanh_mul, rms_norm, rotary_embedding, silu_mul

_GATED = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}


class Decoder:
    """Token ids and a paged KV cache in, hidden states and logits out; holds weights, no state between steps."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        like = weights.embedding
        self._inverse_frequencies = {
            rope: rope.inverse_frequencies(config.head_dim).to(like.device) for rope in set(config.layer_ropes)
        }
        self._embedding_scale = like.new_tensor(config.embedding_scale).item()
        self._gated = _GATED[config.activation]

    def forward(self, token_ids: Tensor, positions: Tensor, inputs: AttentionInputs, kv_cache: KvCache) -> Tensor:
        """Hidden states after the last norm.

        Args:
            token_ids: (T,) int64.
            positions: (T,) int64.
            kv_cache: written in place.

        Returns:
            (T, hidden size).
        """
        config, eps = self.config, self.config.rms_norm_eps
        rotations = {rope: self._rotation(rope, positions) for rope in self._inverse_frequencies}
        residual = F.embedding(token_ids, self.weights.embedding)
        if self._embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        hidden = torch.zeros_like(residual)
        kinds = zip(config.layer_ropes, config.layer_windows, strict=True)
        for layer, kv, (rope, window) in zip(self.weights.layers, kv_cache.layers(), kinds, strict=True):
            hidden, residual = add_rms_norm(hidden, residual, layer.attention_norm, eps)
            hidden = self._attention(layer, hidden, rotations[rope], inputs, kv, window)
            if layer.attention_output_norm is not None:
                hidden = rms_norm(hidden, layer.attention_output_norm, eps)
            hidden, residual = add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = layer.down(self._gated(layer.gate_up(hidden)))
            if layer.mlp_output_norm is not None:
                hidden = rms_norm(hidden, layer.mlp_output_norm, eps)
        return add_rms_norm(hidden, residual, self.weights.final_norm, eps)[0]

    def _rotation(self, rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every token, as `rotary_embedding` wants them."""
        angles = (positions.unsqueeze(1) * self._inverse_frequencies[rope]).unsqueeze(1)
        cos, sin = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _attention(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        inputs: AttentionInputs,
        kv: LayerKv,
        window: int | None,
    ) -> Tensor:
        config = self.config
        num_tokens, head_dim = hidden.shape[0], config.head_dim
        packed = layer.qkv(hidden).view(num_tokens, -1, head_dim)
        query_key, value = packed.tensor_split([config.num_heads + config.num_kv_heads], dim=1)
        if layer.qk_norm is not None:
            query_key = rms_norm(query_key, layer.qk_norm, config.rms_norm_eps)
        query_key = rotary_embedding(query_key, *rotation)
        query, key = query_key.tensor_split([config.num_heads], dim=1)
        out = attend(query, key, value, kv, inputs, scale=config.query_scale, window=window)
        return layer.output(out.reshape(num_tokens, -1))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary: (rows, hidden size) to (rows, vocabulary), float32."""
        return self.weights.lm_head(hidden).float()

    def one_layer_of_each_kind(self) -> Decoder:
        """As few layers as need, for a step, as much memory at once as all do.

        Layers differ in what they attend to, not in shape, and what one computes is released before the next.
        """
        config, weights = self.config, self.weights
        kinds = list(zip(config.layer_ropes, config.layer_windows, strict=True))
        first = sorted({kinds.index(kind) for kind in kinds})
        fewer = replace(
            config,
            num_layers=len(first),
            layer_ropes=tuple(config.layer_ropes[index] for index in first),
            layer_windows=tuple(config.layer_windows[index] for index in first),
        )
        return Decoder(fewer, replace(weights, layers=tuple(weights.layers[index] for index in first)))
