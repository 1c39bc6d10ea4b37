"""Rotary frequencies against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.config import ConfigError
from engine.models.rope import Rope, read_rope

POSITIONS = 4096
_THETA = {"rope_theta": 10000.0}
_FACTOR = st.floats(1.0, 64.0)
_TRAINED = st.sampled_from((256, 2048, 8192))
_KINDS = {
    "linear": st.fixed_dictionaries({"factor": _FACTOR}),
    "dynamic": st.fixed_dictionaries({"factor": _FACTOR}),
    "llama3": st.fixed_dictionaries(
        {
            "factor": _FACTOR,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 16.0),
            "original_max_position_embeddings": _TRAINED,
        }
    ),
    "yarn": st.fixed_dictionaries(
        {"factor": _FACTOR, "original_max_position_embeddings": _TRAINED},
        optional={
            "attention_factor": st.floats(0.5, 2.0),
            "mscale": st.sampled_from((0.0, 0.707, 1.0)),
            "mscale_all_dim": st.sampled_from((0.0, 0.8, 1.0)),
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "truncate": st.booleans(),
        },
    ),
}


@pytest.mark.parametrize("kind", _KINDS)
@given(data=st.data(), rope_theta=st.floats(100.0, 1e6), head_dim=st.sampled_from((2, 8, 20, 128)))
@settings(max_examples=25)
def test_frequencies_are_transformers_own(kind: str, data: st.DataObject, rope_theta: float, head_dim: int) -> None:
    """A long-context checkpoint sees the positions it was tuned to."""
    if kind == "dynamic" and head_dim == 2:
        head_dim = 4  # transformers divides by head_dim - 2
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": rope_theta, **data.draw(_KINDS[kind])}
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=POSITIONS, rope_parameters=dict(parameters))
    theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](config, seq_len=POSITIONS)

    rope = read_rope(parameters, rope_theta=1.5, max_position_embeddings=POSITIONS)

    torch.testing.assert_close(rope.inverse_frequencies(head_dim), theirs, rtol=2e-6, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)


def test_default_frequencies_are_transformers_own() -> None:
    """A checkpoint without scaling is turned by its own base, exactly."""
    config = LlamaConfig(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    rope = read_rope({}, rope_theta=5e5, max_position_embeddings=POSITIONS)

    assert torch.equal(rope.inverse_frequencies(64), LlamaRotaryEmbedding(config).inv_freq)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 4096),
        ({"rope_type": "yarn", "factor": 2.5}, 4096),
    ],
)
def test_a_request_is_as_long_as_in_vllm(parameters: dict[str, Any], expected: int) -> None:
    """`max_model_len` means the same there; YaRN's `max_position_embeddings` counts what is stretched already."""
    rope = read_rope(parameters, **_THETA, max_position_embeddings=POSITIONS)

    assert rope.num_positions(POSITIONS) == expected


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "longrope"}, ["longrope", "how long each request is", "default, dynamic, linear, llama3, yarn"]),
        ({"type": "su"}, ["su", "yarn"]),
        ({"rope_type": ["yarn"]}, ["['yarn']"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(parameters: dict[str, Any], named: list[str]) -> None:
    """Nobody measures a model whose positions are silently wrong."""
    with pytest.raises(ConfigError) as error:
        read_rope(parameters, **_THETA, max_position_embeddings=POSITIONS)

    assert all(word in str(error.value) for word in named)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.0}, "factor"),
        ({"rope_type": "yarn", "factor": None}, "factor"),
        ({"rope_type": "yarn", "factor": "4"}, "factor"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
    ],
)
def test_values_that_make_no_sense_are_refused(parameters: dict[str, Any], named: str) -> None:
    """A damaged config.json does not become NaN."""
    with pytest.raises(ValidationError, match=named):
        read_rope(parameters, **_THETA, max_position_embeddings=POSITIONS)


def test_ropes_of_equal_values_are_equal() -> None:
    """Layers that turn alike share their angles, and those that do not, do not."""
    one, same = (read_rope({"rope_theta": 5.0}, **_THETA, max_position_embeddings=8) for _ in range(2))

    assert {one, same} == {Rope(rope_theta=5.0)}
    assert one != read_rope({"type": "linear", "factor": 1.0, "rope_theta": 5.0}, **_THETA, max_position_embeddings=8)
