"""A decoder's weights: read from safetensors, or made up from a seed; packed once for the forward pass."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.config import ConfigError
from engine.models.config import ModelConfig

Source = Callable[[str, tuple[int, ...]], Tensor]
"""Gives the tensor of a name, which must have that shape."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARPENED = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
_SHARPENED_GAIN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer; Q query heads, K key/value heads, D head size, H hidden size, I intermediate size."""

    input_norm: Tensor
    """(H,)"""

    qkv: Tensor
    """((Q + 2 K) D, H): queries, keys, values."""

    qkv_bias: Tensor | None
    """((Q + 2 K) D,)"""

    qk_norm: Tensor | None
    """(Q + K, D): the query norm for each query head, the key norm for each key head."""

    output: Tensor
    """(H, Q D)"""

    post_norm: Tensor
    """(H,)"""

    gate_up: Tensor
    """(2 I, H)"""

    down: Tensor
    """(H, I)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """The whole decoder; V vocabulary. With tied embeddings `lm_head` is `embedding` itself."""

    embedding: Tensor
    """(V, H)"""

    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """(H,)"""

    lm_head: Tensor
    """(V, H)"""

    def num_bytes(self) -> int:
        """Bytes of all weights, a shared one counted once."""
        tensors = [self.embedding, self.final_norm, self.lm_head]
        for layer in self.layers:
            fields = (getattr(layer, name) for name in LayerWeights.__slots__)
            tensors.extend(tensor for tensor in fields if tensor is not None)
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def load_weights(source: Source, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Take every weight of the shape `config` describes from `source`, cast, move and pack it."""

    def take(name: str, *shape: int) -> Tensor:
        return source(name, shape).to(device=device, dtype=dtype)

    embedding = take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_load_layer(take, config, f"model.layers.{index}.") for index in range(config.num_layers))
    tied = config.tie_word_embeddings
    return ModelWeights(
        embedding=embedding,
        layers=layers,
        final_norm=take("model.norm.weight", config.hidden_size),
        lm_head=embedding if tied else take("lm_head.weight", config.vocab_size, config.hidden_size),
    )


def _load_layer(take: Callable[..., Tensor], config: ModelConfig, prefix: str) -> LayerWeights:
    hidden, head, intermediate = config.hidden_size, config.head_dim, config.intermediate_size
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = [take(f"{attention}{part}_proj.weight", count * head, hidden) for part, count in heads.items()]
    bias = qk_norm = None
    if config.has_qkv_bias:
        bias = torch.cat([take(f"{attention}{part}_proj.bias", count * head) for part, count in heads.items()])
    if config.has_qk_norm:
        qk_norm = torch.cat([take(f"{attention}{part}_norm.weight", head).expand(heads[part], head) for part in "qk"])
    return LayerWeights(
        input_norm=take(prefix + "input_layernorm.weight", hidden),
        qkv=torch.cat(qkv),
        qkv_bias=bias,
        qk_norm=qk_norm,
        output=take(attention + "o_proj.weight", hidden, config.num_heads * head),
        post_norm=take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=torch.cat([take(f"{mlp}{part}_proj.weight", intermediate, hidden) for part in ("gate", "up")]),
        down=take(mlp + "down_proj.weight", hidden, intermediate),
    )


def checkpoint(folder: Path) -> Source:
    """Read tensors from `model.safetensors`, or from the shards its index names.

    Raises:
        ConfigError: where the folder has neither; by the source, for a tensor that is missing or has another shape.
    """
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    elif single.is_file():
        with safe_open(single, framework="pt") as file:
            shards = dict.fromkeys(file.keys(), _SINGLE)
    else:
        raise ConfigError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}: only safetensors are read; "
            "load_format=dummy makes weights up"
        )

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in shards:
            raise ConfigError(f"{folder}: the checkpoint has no tensor {name}")
        with safe_open(folder / shards[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{folder}: {name} has shape {tuple(tensor.shape)}, but config.json makes it {shape}")
        return tensor

    return read


def dummy(seed: int) -> Source:
    """Make weights up: the same for the same seed, on every device.

    Matrices are normal with variance 1 / columns, which keeps each layer's output at the scale of its input, so
    that the layers and not the token's own embedding decide what comes next. Queries and keys are larger, which
    sharpens attention: with an even average over the context, greedy output soon repeats one token for ever.
    """
    generator = torch.Generator().manual_seed(seed)

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        gain = _SHARPENED_GAIN if name.endswith(_SHARPENED) else 1.0
        if name.endswith("norm.weight"):
            return torch.full(shape, gain)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        return torch.randn(shape, generator=generator) * (gain / math.sqrt(shape[-1]))

    return make
