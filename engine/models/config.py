"""What a checkpoint's `config.json` makes of the decoder, and whether we can compute it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.config import ConfigError
from engine.models.families import FAMILIES, Activation, EosTokenId, Family
from engine.models.rope import Rope

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder, as its checkpoint gives it: all that its code needs to know of a model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    """Most positions of a request, stretched by the rotary embedding where it does that."""

    rms_norm_eps: float
    tie_word_embeddings: bool
    activation: Activation
    """What the gate of the MLP goes through."""

    query_scale: float
    """What attention scores are multiplied by."""

    embedding_scale: float
    """What a token's embedding is multiplied by, rounded to the weights' dtype (Gemma)."""

    norm_offset: float
    """Added to the weight of every norm (Gemma)."""

    has_qk_norm: bool
    """Whether queries and keys are normed per head (Qwen3, Gemma)."""

    has_output_norms: bool
    """Whether what attention and the MLP give is normed before it is added (Gemma)."""

    has_qkv_bias: bool
    """Whether the query, key and value projections add a bias (Qwen2)."""

    has_output_bias: bool
    """Whether the output projection of attention adds a bias."""

    has_mlp_bias: bool
    """Whether the projections of the MLP add a bias."""

    layer_windows: tuple[int | None, ...]
    """For each layer, how many positions back a token sees, itself included; None is all (sliding window)."""

    layer_ropes: tuple[Rope, ...]
    """For each layer, its rotary embedding."""

    weight_prefix: str
    """What the names of the weights begin with in the checkpoint."""

    fits_float16: bool
    """Whether it can be computed in float16: Gemma's trained weights overflow it (vLLM: `vllm/config/model.py`)."""

    checkpoint_dtype: str
    """The dtype the weights were saved in; float32 where the checkpoint does not say."""

    eos_token_ids: tuple[int, ...]


class _Named(BaseModel):
    """What must be known before the rest of a `config.json` can be read."""

    model_config = ConfigDict(strict=True)

    architectures: list[str] | None = None
    text_config: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None


class _Generation(BaseModel):
    """What a `generation_config.json` says of the end."""

    model_config = ConfigDict(strict=True)

    eos_token_id: EosTokenId = None


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for the end-of-sequence tokens) in a checkpoint's folder.

    Raises:
        ConfigError: for a file that is damaged, a value that makes no sense, and an architecture or a feature this
            engine does not compute, naming it and what is supported.
    """
    path = folder / "config.json"
    try:
        family = _family(_read_json(path))
        eos = _eos_token_ids(family, folder / "generation_config.json")
        return _model_config(family, eos)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_json(path: Path) -> Json:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not there; not text; not JSON; too deep
        raise ConfigError(f"{path.name} cannot be read as JSON: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path.name} is not a JSON object")
    return read


def _family(raw: Json) -> Family:
    named = _Named.model_validate(raw)
    if named.quantization_config:
        method = named.quantization_config.get("quant_method", "an unknown method")
        raise ConfigError(f"weights quantised with {method} are not supported; use float32, bfloat16 or float16")
    architectures = named.architectures or ["none"]
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture].model_validate({**raw, **(named.text_config or {})})
    raise ConfigError(f"architecture {', '.join(architectures)} is not supported; supported: {', '.join(FAMILIES)}")


def _model_config(family: Family, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    family.check_heads()
    num_positions = family.num_positions()
    if num_positions < 1:
        raise ConfigError(f"the rotary embedding's factor leaves {num_positions} positions")
    return ModelConfig(
        hidden_size=family.hidden_size,
        num_layers=family.num_hidden_layers,
        num_heads=family.num_attention_heads,
        num_kv_heads=family.num_kv_heads,
        head_dim=family.head_size,
        intermediate_size=family.intermediate_size,
        vocab_size=family.vocab_size,
        max_position_embeddings=num_positions,
        rms_norm_eps=family.rms_norm_eps,
        tie_word_embeddings=family.tie_word_embeddings,
        activation=family.activation,
        query_scale=family.query_scale,
        embedding_scale=family.embedding_scale,
        norm_offset=family.norm_offset,
        has_qk_norm=family.has_qk_norm,
        has_output_norms=family.has_output_norms,
        has_qkv_bias=family.has_qkv_bias,
        has_output_bias=family.attention_bias,
        has_mlp_bias=family.mlp_bias,
        layer_windows=family.layer_windows(),
        layer_ropes=family.layer_ropes(),
        weight_prefix=family.weight_prefix,
        fits_float16=family.fits_float16,
        checkpoint_dtype=family.dtype or family.torch_dtype or "float32",
        eos_token_ids=eos_token_ids,
    )


def _eos_token_ids(family: Family, path: Path) -> tuple[int, ...]:
    """`generation_config.json` wins over `config.json`, as in transformers."""
    eos = _Generation.model_validate(_read_json(path)).eos_token_id if path.is_file() else None
    if eos is None:
        eos = family.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _explain(error: ValidationError) -> str:
    """What pydantic found, one clause a value: its name, the value, and what is supported or right."""
    clauses = []
    for found in error.errors():
        name, value = ".".join(str(part) for part in found["loc"]), found["input"]
        match found["type"]:
            case "literal_error":
                clause = f"{name}={value!r} is not supported; supported: {found['ctx']['expected']}"
            case "none_required":
                clause = f"{name}={value!r} is not supported; supported: null"
            case "missing":
                clause = f"{name} is missing"
            case "extra_forbidden":
                clause = f"{name}={value!r} is not known"
            case _ if name:
                clause = f"{name}={value!r}: {found['msg']}"
            case _:
                clause = found["msg"]
        clauses.append(clause)
    return "; ".join(clauses)
