"""What a checkpoint's `config.json` says of the decoder's shape, and whether we can compute it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import ConfigError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Stretched rotary frequencies of Llama 3.1 and later; the fields keep the checkpoint's names."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-like decoder, as its checkpoint gives it."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    llama3_rope: Llama3Rope | None
    tie_word_embeddings: bool
    has_qk_norm: bool
    """Whether queries and keys are normed per head (Qwen3)."""

    has_qkv_bias: bool
    """Whether the query, key and value projections add a bias (Qwen2)."""

    layer_windows: tuple[int | None, ...]
    """For each layer, how many positions back a token sees, itself included; None is all (sliding window)."""

    checkpoint_dtype: str
    """The dtype the weights were saved in; float32 where the checkpoint does not say."""

    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What one architecture leaves unsaid in its `config.json` (transformers' defaults), and its extras."""

    vocab_size: int
    max_position_embeddings: int
    intermediate_size: int
    num_kv_heads: int | None
    """None: as many as query heads."""

    head_dim: int | None
    """None: hidden size over heads."""

    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    eos_token_id: int | None = None


_QWEN2 = _Family(
    vocab_size=151936,
    max_position_embeddings=32768,
    intermediate_size=22016,
    num_kv_heads=32,
    head_dim=None,
    has_qkv_bias=True,
)
_FAMILIES = {
    "LlamaForCausalLM": _Family(
        vocab_size=32000,
        max_position_embeddings=2048,
        intermediate_size=11008,
        num_kv_heads=None,
        head_dim=None,
        eos_token_id=2,
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": replace(_QWEN2, head_dim=128, has_qkv_bias=False, has_qk_norm=True),
}


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for the end-of-sequence tokens) in a checkpoint's folder.

    Raises:
        ConfigError: for an architecture, a rotary scaling or a feature this engine does not compute, naming it
            and what is supported.
    """
    path = folder / "config.json"
    raw = _read_json(path)
    family = _family(raw, path)
    _refuse_unsupported(raw, path)
    num_heads = raw.get("num_attention_heads", 32)
    hidden_size = raw.get("hidden_size", 4096)
    theta, llama3 = _rope(raw, path)
    return ModelConfig(
        hidden_size=hidden_size,
        num_layers=raw.get("num_hidden_layers", 32),
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads", family.num_kv_heads) or num_heads,
        head_dim=raw.get("head_dim", family.head_dim) or hidden_size // num_heads,
        intermediate_size=raw.get("intermediate_size", family.intermediate_size),
        vocab_size=raw.get("vocab_size", family.vocab_size),
        max_position_embeddings=raw.get("max_position_embeddings", family.max_position_embeddings),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        llama3_rope=llama3,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=family.has_qkv_bias,
        layer_windows=(None,) * raw.get("num_hidden_layers", 32),
        checkpoint_dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        eos_token_ids=_eos_token_ids(raw, folder, family),
    )


def _read_json(path: Path) -> Json:
    try:
        read: Json = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return read


def _family(raw: Json, path: Path) -> _Family:
    architectures = raw.get("architectures") or []
    for architecture in architectures:
        if architecture in _FAMILIES:
            return _FAMILIES[architecture]
    named = ", ".join(architectures) or "none"
    raise ConfigError(f"{path}: architecture {named} is not supported; supported: {', '.join(_FAMILIES)}")


def _refuse_unsupported(raw: Json, path: Path) -> None:
    """Refuse what would silently compute something else."""
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(
            f"{path}: weights quantised with {method} are not supported; use float32, bfloat16 or float16"
        )
    required = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    for key, only in required.items():
        if raw.get(key, only) != only:
            raise ConfigError(f"{path}: {key}={raw[key]!r} is not supported; supported: {only!r}")
    others = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if others:
        raise ConfigError(f"{path}: layer_types {', '.join(others)} are not supported; supported: full_attention")


def _rope(raw: Json, path: Path) -> tuple[float, Llama3Rope | None]:
    """Rotary base and scaling, in transformers 5's form (`rope_parameters`) or the older one (`rope_scaling`)."""
    parameters = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor={partial} is not supported; supported: 1.0")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(f"{path}: rope_type={kind!r} is not supported; supported: default, llama3")
    try:
        return theta, Llama3Rope(**{name: parameters[name] for name in Llama3Rope.__slots__})
    except KeyError as missing:
        raise ConfigError(f"{path}: rope_type='llama3' needs {missing}") from missing


def _eos_token_ids(raw: Json, folder: Path, family: _Family) -> tuple[int, ...]:
    """`generation_config.json` wins over `config.json`, as in transformers."""
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = raw.get("eos_token_id", family.eos_token_id)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
