"""What a KV block takes, known only where two accounts agree."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.engine_config import Setting
from tuner.engines.kv_block import kv_block_bytes

SHAPE = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_attention_heads": 8,
    "hidden_size": 256,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 4,
}
IN_FORCE: dict[str, Setting] = {"dtype": "float32", "kv_cache_dtype": "auto", "tensor_parallel_size": 1}
KV_BYTES = round(1.66 * 2**30)
"""Of a real vLLM 0.32.0 with this model: 434,176 tokens in blocks of 128."""


def _bytes(shape: dict[str, Any] = SHAPE, *, in_force: dict[str, Setting] = IN_FORCE, blocks: int = 3392) -> int | None:
    return kv_block_bytes(shape, in_force, block_size=128, blocks_a_core=blocks, kv_cache_bytes=KV_BYTES)


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    """Memory in use is reckoned from it, and so is whether a model is bound by memory."""
    assert _bytes() == 2 * 4 * 4 * 32 * 4 * 128
    assert _bytes(SHAPE | {"head_dim": 32, "hidden_size": 999}) == 524_288
    assert _bytes({"text_config": SHAPE}) == 524_288
    half = IN_FORCE | {"kv_cache_dtype": "bfloat16"}
    assert _bytes(in_force=half, blocks=6798) == 262_144
    halves = IN_FORCE | {"tensor_parallel_size": 2}
    assert _bytes(in_force=halves, blocks=6798) == 524_288


@pytest.mark.parametrize(
    "over",
    [
        {"sliding_window": 512},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"kv_lora_rank": 512},
        {"num_key_value_heads": None},
        {"num_hidden_layers": 8},
    ],
)
def test_a_model_of_another_kind_is_unknown(over: dict[str, object]) -> None:
    """A wrong size would be off by the number of layers that keep less, and nobody would see it."""
    assert _bytes(SHAPE | over) is None


def test_blocks_that_do_not_fill_what_was_reserved_make_it_unknown() -> None:
    """An override of the number of blocks, or a layout nobody foresaw: the two accounts differ."""
    assert _bytes(blocks=20) is None
    assert _bytes(in_force=IN_FORCE | {"kv_cache_dtype": "nvfp4"}) is None
