"""Bytes of one KV block by the model's shape, believed only where the engine's own account bears it out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.engine_config import Setting

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_ROUNDING_BYTES = 6 * 2**20
"""What is said in GiB with two digits is off by half a hundredth, 5.1 MiB."""


def kv_block_bytes(
    shape: Mapping[str, Any],
    in_force: Mapping[str, Setting],
    *,
    block_size: int,
    blocks_a_core: int,
    kv_cache_bytes: int,
) -> int | None:
    """Bytes of one block over all ranks of a core: keys and values of every layer; None where that is not known.

    Only of models whose every layer attends to everything by its own heads: others keep less, each in its own way.

    Args:
        shape: the model's config.json.
        in_force: the engine parameters that run.
        blocks_a_core: of one engine core.
        kv_cache_bytes: what one rank reserved for them, as its log says.
    """
    shape = shape.get("text_config") or shape
    layers, heads = shape.get("num_hidden_layers"), shape.get("num_key_value_heads")
    size = _BYTES.get(str(in_force.get("dtype" if in_force.get("kv_cache_dtype") == "auto" else "kv_cache_dtype")))
    width = shape.get("head_dim") or shape.get("hidden_size", 0) // (shape.get("num_attention_heads") or 1)
    if not (isinstance(layers, int) and isinstance(heads, int) and width and size) or not _attends_to_all(shape):
        return None
    bytes_a_block = 2 * layers * heads * width * size * block_size
    ranks = int(in_force.get("tensor_parallel_size", 1)) * int(in_force.get("pipeline_parallel_size", 1))
    # A rank fills what it reserved with whole blocks: what is left over is less than one.
    left_over = kv_cache_bytes - blocks_a_core * bytes_a_block / ranks
    bears_out = -_ROUNDING_BYTES <= left_over <= bytes_a_block / ranks + _ROUNDING_BYTES
    return bytes_a_block if bears_out else None


def _attends_to_all(shape: Mapping[str, Any]) -> bool:
    slides = shape.get("sliding_window") and shape.get("use_sliding_window", True)
    types = set(shape.get("layer_types") or ["full_attention"])
    return not slides and types == {"full_attention"} and "kv_lora_rank" not in shape
