"""A decoder's weights: read from safetensors, or made up from a seed; packed once for the forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ConfigError
from engine.models.config import ModelConfig
from kernels.linear import Linear

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LM_HEAD = "lm_head.weight"
_READ_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHARPENED = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
_SHARPENED_GAIN = 2.0


class Source(Protocol):
    """Where weights come from."""

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name."""
        ...

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, which must have that shape; valid for a moment: copy it.

        Raises:
            ConfigError: where it is missing, damaged or of another shape.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer; Q query heads, K key/value heads, D head size, H hidden size, I intermediate size."""

    attention_norm: Tensor
    """(H,): before attention."""

    qkv: Linear
    """H to (Q + 2 K) D: queries, keys, values."""

    qk_norm: Tensor | None
    """(Q + K, D): the query norm for each query head, the key norm for each key head."""

    output: Linear
    """Q D to H."""

    attention_output_norm: Tensor | None
    """(H,)"""

    mlp_norm: Tensor
    """(H,): before the MLP."""

    gate_up: Linear
    """H to 2 I."""

    down: Linear
    """I to H."""

    mlp_output_norm: Tensor | None
    """(H,)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """The whole decoder; V vocabulary."""

    embedding: Tensor
    """(V, H)"""

    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """(H,)"""

    lm_head: Linear
    """H to V. With tied embeddings its weight is `embedding` itself, unless it is packed."""

    def num_bytes(self) -> int:
        """Bytes of all weights, a shared one counted once."""
        total = self.final_norm.nbytes + self.lm_head.nbytes
        if not self.lm_head.holds(self.embedding):
            total += self.embedding.nbytes
        for layer in self.layers:
            held: list[Linear | Tensor | None] = [getattr(layer, name) for name in LayerWeights.__slots__]
            total += sum(part.nbytes for part in held if part is not None)
        return total


class _Packer:
    """Copies what a source has into tensors of our own: cast, moved, and stacked, one part at a time."""

    def __init__(self, source: Source, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._config = source, config
        self._dtype, self._device = dtype, device

    def stack(self, rows: Mapping[str, int], *columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensors of these names, of so many rows each, one below the other."""
        packed = torch.empty(sum(rows.values()), *columns, dtype=dtype or self._dtype, device=self._device)
        first = 0
        for name, count in rows.items():
            part = packed[first : first + count]
            part.copy_(self._source.read(self._config.weight_prefix + name, tuple(part.shape)))
            first += count
        return packed

    def linear(self, rows: Mapping[str, int], columns: int, *, has_bias: bool) -> Linear:
        """Projections of the same input, as one."""
        weight = self.stack({f"{name}.weight": count for name, count in rows.items()}, columns)
        bias = self.stack({f"{name}.bias": count for name, count in rows.items()}) if has_bias else None
        return Linear(weight, bias)

    def norm(self, name: str, size: int) -> Tensor:
        """A norm's weight; with its offset added it stays in float32, which the product is then taken in (Gemma)."""
        if not self._config.norm_offset:
            return self.stack({name: size})
        return self.stack({name: size}, dtype=torch.float32).add_(self._config.norm_offset)


def load_weights(source: Source, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Take every weight of the shape `config` describes from `source`, cast, move and pack it."""
    pack = _Packer(source, config, dtype, device)
    embedding = pack.stack({"model.embed_tokens.weight": config.vocab_size}, config.hidden_size)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_load_layer(pack, config, f"model.layers.{index}.") for index in range(config.num_layers)),
        final_norm=pack.norm("model.norm.weight", config.hidden_size),
        lm_head=Linear(_load_lm_head(pack, source, config, embedding), None),
    )


def _load_lm_head(pack: _Packer, source: Source, config: ModelConfig, embedding: Tensor) -> Tensor:
    """The embedding where they are tied, unless the checkpoint has another after all (as transformers decides)."""
    if config.tie_word_embeddings and config.weight_prefix + _LM_HEAD not in source:
        return embedding
    lm_head = pack.stack({_LM_HEAD: config.vocab_size}, config.hidden_size)
    return embedding if config.tie_word_embeddings and torch.equal(lm_head, embedding) else lm_head


def _load_layer(pack: _Packer, config: ModelConfig, prefix: str) -> LayerWeights:
    hidden, head, intermediate = config.hidden_size, config.head_dim, config.intermediate_size
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    queries = config.num_heads * head
    qk_norm = None
    if config.has_qk_norm:
        norms = [pack.norm(f"{attention}{part}_norm.weight", head).expand(heads[part], head) for part in "qk"]
        qk_norm = torch.cat(norms)
    # Llama calls the norm before the MLP after what comes before it; Gemma has a norm there too.
    after, before_mlp = "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight"
    has_output_norms = config.has_output_norms
    return LayerWeights(
        attention_norm=pack.norm(prefix + "input_layernorm.weight", hidden),
        qkv=pack.linear(
            {f"{attention}{part}_proj": count * head for part, count in heads.items()},
            hidden,
            has_bias=config.has_qkv_bias,
        ),
        qk_norm=qk_norm,
        output=pack.linear({attention + "o_proj": hidden}, queries, has_bias=config.has_output_bias),
        attention_output_norm=pack.norm(prefix + after, hidden) if has_output_norms else None,
        mlp_norm=pack.norm(prefix + (before_mlp if has_output_norms else after), hidden),
        gate_up=pack.linear(
            {f"{mlp}{part}_proj": intermediate for part in ("gate", "up")}, hidden, has_bias=config.has_mlp_bias
        ),
        down=pack.linear({mlp + "down_proj": hidden}, intermediate, has_bias=config.has_mlp_bias),
        mlp_output_norm=(pack.norm(prefix + "post_feedforward_layernorm.weight", hidden) if has_output_norms else None),
    )


class _TensorFile(Protocol):
    """What `safe_open` gives."""

    def keys(self) -> Sequence[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """Reads tensors from `model.safetensors`, or from the shards its index names.

    Raises:
        ConfigError: where the folder has neither, a shard is missing or damaged, or the index is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = {name: _open(folder / name) for name in _file_names(folder)}
        self._holders: dict[str, str] = {}
        for name, file in self._files.items():
            self._holders.update(dict.fromkeys(file.keys(), name))

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._holders

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, as it is in the file."""
        if name not in self._holders:
            raise ConfigError(f"{self._folder}: the checkpoint has no tensor {name}")
        tensor = self._files[self._holders[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{self._folder}: {name} has shape {tuple(tensor.shape)}, but config.json makes it {shape}"
            )
        if tensor.dtype not in _READ_DTYPES:
            read = ", ".join(_dtype_name(dtype) for dtype in _READ_DTYPES)
            raise ConfigError(
                f"{self._folder}: {name} is {_dtype_name(tensor.dtype)}, not supported; supported: {read}"
            )
        return tensor


class _Index(BaseModel):
    """`model.safetensors.index.json`."""

    model_config = ConfigDict(strict=True)

    weight_map: dict[str, str]
    """Tensor name to file name."""


def _file_names(folder: Path) -> list[str]:
    index = folder / _INDEX
    if not index.is_file():
        if (folder / _SINGLE).is_file():
            return [_SINGLE]
        raise ConfigError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}: only safetensors are read; "
            "load_format=dummy makes weights up"
        )
    try:
        names = sorted(set(_Index.model_validate_json(index.read_bytes()).weight_map.values()))
    except ValidationError as error:
        raise ConfigError(f"{index} is not an index of tensors: {error.errors()[0]['msg']}") from error
    outside = [name for name in names if PurePath(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise ConfigError(f"{index} names {outside[0]!r}, which is not a .safetensors file of its folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing)}: {len(missing)} of the {len(names)} shards of its index"
        )
    return names


def _open(path: Path) -> _TensorFile:
    try:
        file: _TensorFile = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}; is it whole?") from error
    return file


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Dummy:
    """Makes weights up: the same for the same seed, on every device.

    Matrices are normal with variance 1 / columns, which keeps each layer's output at the scale of its input, so
    that the layers and not the token's own embedding decide what comes next. Queries and keys are larger, which
    sharpens attention: with an even average over the context, greedy output soon repeats one token for ever.
    """

    def __init__(self, seed: int, config: ModelConfig) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._norm_offset = config.norm_offset
        self._embedding_scale = config.embedding_scale

    def __contains__(self, name: object) -> bool:
        """Nothing is there before it is asked for."""
        return False

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The next tensor: what it is depends on all that were read before."""
        gain = _SHARPENED_GAIN if name.endswith(_SHARPENED) else 1.0
        if name.endswith("norm.weight"):
            return torch.full(shape, gain - self._norm_offset)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        if name.endswith("embed_tokens.weight"):
            gain /= self._embedding_scale
        return torch.randn(shape, generator=self._generator) * (gain / math.sqrt(shape[-1]))
