"""Norms, rotations, activations and writes in Triton do what the reference does, to the number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import kv_write, reference, rms_norm, rope, silu_mul
from tests.kernels.poison import agree, guarded, padded

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def _drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 123), (2, 257)])
def test_a_norm_of_rows(dtype: torch.dtype, rows: int, size: int) -> None:
    """Rows of odd lengths, inside a larger tensor that nothing else may be read of."""
    x, weight = padded(_drawn(rows, size, dtype=dtype)), _drawn(size, dtype=dtype, seed=1)

    agree(lambda: rms_norm.rms_norm(x, weight, 1e-6), lambda: reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_norm_of_heads_has_a_weight_for_each(dtype: torch.dtype) -> None:
    """Queries and keys share a call and not a weight; they are a part of a wider tensor."""
    x, weight = padded(_drawn(5, 3, 80, dtype=dtype)), _drawn(3, 80, dtype=dtype, seed=1)

    agree(lambda: rms_norm.rms_norm(x, weight, 1e-5), lambda: reference.rms_norm(x, weight, 1e-5))


def test_a_norm_with_a_wide_weight() -> None:
    """Gemma's weights are float32 whatever the rest is."""
    x, weight = _drawn(2, 33, dtype=torch.float16), _drawn(33, dtype=torch.float32, seed=1)

    agree(lambda: rms_norm.rms_norm(x, weight, 1e-6), lambda: reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("rows", [(3,), (2, 3)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_adding_to_the_residual_stream_keeps_the_rounded_sum(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    """The next layer adds to what was stored, which lies elsewhere; the norm must be of that."""
    x, residual = padded(_drawn(*rows, 129, dtype=dtype)), padded(_drawn(*rows, 129, dtype=dtype, seed=2), by=5)
    weight = _drawn(129, dtype=dtype, seed=1)

    agree(
        lambda: rms_norm.add_rms_norm(x, residual, weight, 1e-6),
        lambda: reference.add_rms_norm(x, residual, weight, 1e-6),
    )


def test_many_short_rows_share_a_program() -> None:
    """The last program of a norm over heads has fewer rows than the others."""
    x, weight = _drawn(37, 7, 32, dtype=torch.float32), _drawn(7, 32, dtype=torch.float32, seed=1)

    agree(lambda: rms_norm.rms_norm(x, weight, 1e-6), lambda: reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("heads", "size"), [(1, 2), (3, 80), (5, 64)])
def test_a_rotation_of_heads(dtype: torch.dtype, heads: int, size: int) -> None:
    """Both halves turn by their own angles, for every head and odd numbers of them."""
    x = padded(_drawn(3, heads, size, dtype=dtype))
    angles = _drawn(3, 1, size // 2, dtype=torch.float32, seed=4)
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)

    agree(lambda: rope.rotary_embedding(x, cos, sin), lambda: reference.rotary_embedding(x, cos, sin))


def test_a_rotation_of_more_heads_than_one_program_takes() -> None:
    """Forty heads of 256 are several programs a token; the last one is not full."""
    x = _drawn(1, 35, 256, dtype=torch.float32)
    angles = _drawn(1, 1, 128, dtype=torch.float32, seed=4)
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)

    agree(lambda: rope.rotary_embedding(x, cos, sin), lambda: reference.rotary_embedding(x, cos, sin))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 123, 1025])
def test_gated_activations(dtype: torch.dtype, size: int) -> None:
    """Gate and up lie side by side; the second program of a wide row begins where the first ends."""
    gate_up = padded(_drawn(2, 2 * size, dtype=dtype) * 4)

    agree(lambda: silu_mul.silu_mul(gate_up), lambda: reference.silu_mul(gate_up))
    agree(lambda: silu_mul.gelu_tanh_mul(gate_up), lambda: reference.gelu_tanh_mul(gate_up))


def _written(write: Callable[..., None], dtype: torch.dtype, *arguments: object, shape: tuple[int, int]) -> Tensor:
    """Both caches' bits after a write: seven blocks of sixteen slots, marks where nothing was written, nor around."""
    (keys, keys_stand), (values, values_stand) = (guarded((7, 16, *shape), dtype) for _ in range(2))
    key, value, *others = arguments
    write(key, value, keys, values, *others)
    assert keys_stand()
    assert values_stand()
    return torch.cat([cache.contiguous().view(torch.uint8).flatten() for cache in (keys, values)])


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, reference.FP8])
@pytest.mark.parametrize(("heads", "size"), [(1, 32), (3, 80)])
def test_a_write_lands_in_its_slot_and_nowhere_else(cache_dtype: torch.dtype, heads: int, size: int) -> None:
    """One number in another request's slot makes that request's answer wrong; float8 is stored to the bit."""
    dtype = torch.float32 if cache_dtype == reference.FP8 else cache_dtype
    key, value = (padded(_drawn(4, heads, size, dtype=dtype, seed=by) * 300, by=by) for by in (1, 2))
    slots = torch.tensor([111, 0, 16, 47])
    scales = (4.0, 0.5) if cache_dtype == reference.FP8 else (1.0, 1.0)
    ours, theirs = (
        _written(write, cache_dtype, key, value, slots, *scales, shape=(heads, size))
        for write in (kv_write.kv_write, reference.kv_write)
    )

    assert torch.equal(ours, theirs)


def test_a_padded_token_is_not_written() -> None:
    """A captured graph has a fixed number of tokens; those that no request has must leave the cache alone."""
    key, value = (_drawn(3, 2, 8, dtype=torch.float32, seed=seed) for seed in (1, 2))
    rest, slots = torch.tensor([0, 2]), torch.tensor([5, -1, 30])
    ours = _written(kv_write.kv_write, torch.float32, key, value, slots, shape=(2, 8))
    theirs = _written(reference.kv_write, torch.float32, key[rest], value[rest], slots[rest], shape=(2, 8))

    assert torch.equal(ours, theirs)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_float8_is_rounded_as_torch_does(numbers: list[float]) -> None:
    """Subnormals, ties, numbers beyond 448 and zeros of both signs: integer arithmetic gives torch's bits."""
    special = [0.0, -0.0, 448.0, 464.0, 1e30, -1e30, 2**-9, 2**-10, 3 * 2**-10, 2**-6, 0.0156, 17.0, 19.0, math.inf]
    row = torch.tensor([*numbers, *special], dtype=torch.float32).reshape(1, 1, -1)
    ours, theirs = (
        _written(write, reference.FP8, row, -row, torch.tensor([3]), shape=(1, row.shape[-1]))
        for write in (kv_write.kv_write, reference.kv_write)
    )

    assert torch.equal(ours, theirs)
