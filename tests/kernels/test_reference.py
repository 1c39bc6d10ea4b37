"""The oracle against the formulas written out, with NaN wherever nothing may be read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.reference import (
    add_rms_norm,
    gelu_tanh_mul,
    kv_write,
    paged_attention,
    rms_norm,
    rotary_embedding,
    silu_mul,
)

BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 123, 257])
def test_rms_norm_divides_by_the_root_mean_square(size: int, dtype: torch.dtype) -> None:
    """Every layer normalises as the checkpoint was trained to, in any dtype."""
    x, weight = _normal(5, size).to(dtype), _normal(size, seed=1).to(dtype)
    wide = x.double()

    expected = wide / (wide.square().sum(-1, keepdim=True) / size + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-6).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_rms_norm_rounds_once_with_a_weight_in_float32() -> None:
    """Gemma's norms, whose weights lie close to 1, lose nothing to bfloat16 but the last rounding."""
    x, weight = _normal(5, 257).bfloat16(), 1 + _normal(257, seed=1) / 100
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()

    out = rms_norm(x, weight, 1e-6)

    assert out.dtype == torch.bfloat16
    assert (out == exact.bfloat16()).float().mean() > 0.99


def test_rms_norm_takes_a_weight_per_head() -> None:
    """Queries and keys packed together still get their own norms."""
    x, weight = _normal(3, 6, 8), _normal(6, 8, seed=1)
    by_head = [rms_norm(x[:, head], weight[head], 1e-6) for head in range(6)]

    torch.testing.assert_close(rms_norm(x, weight, 1e-6), torch.stack(by_head, dim=1))


def test_add_rms_norm_returns_the_sum_it_normed() -> None:
    """The residual stream loses nothing on its way through a norm."""
    x, residual, weight = _normal(7, 123), _normal(7, 123, seed=1), _normal(123, seed=2)

    normed, total = add_rms_norm(x, residual, weight, 1e-6)

    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("tokens", [1, 123])
def test_rotary_embedding_turns_pairs_as_complex_numbers(tokens: int) -> None:
    """Positions reach attention as rotations: (a + ib) times e^(i angle)."""
    x, angles = _normal(tokens, 3, 10), _normal(tokens, 1, 5, seed=1)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.complex(x[..., :5], x[..., 5:]) * torch.polar(torch.ones_like(angles), angles)

    out = rotary_embedding(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))

    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1))


@pytest.mark.parametrize("size", [1, 123, 257])
def test_silu_mul_gates_the_second_half_by_the_first(size: int) -> None:
    """Gate and up are not swapped."""
    gate, up = _normal(4, size), _normal(4, size, seed=1)

    torch.testing.assert_close(silu_mul(torch.cat((gate, up), -1)), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("size", [1, 123, 257])
def test_gelu_tanh_mul_gates_the_second_half_by_the_first(size: int) -> None:
    """Gate and up are not swapped, and the curve is tanh's, as Gemma was trained."""
    gate, up = _normal(4, size), _normal(4, size, seed=1)
    curve = 0.5 * gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh())

    torch.testing.assert_close(gelu_tanh_mul(torch.cat((gate, up), -1)), curve * up)


def test_kv_write_touches_its_slots_only() -> None:
    """One request's tokens never overwrite another's."""
    key_cache, value_cache = (torch.full((4, BLOCK_SIZE, 2, 8), math.nan) for _ in range(2))
    slots = torch.tensor([3, 17, 63])
    key, value = _normal(3, 2, 8), _normal(3, 2, 8, seed=1)

    kv_write(key, value, key_cache, value_cache, slots)

    for cache, rows in ((key_cache, key), (value_cache, value)):
        flat = cache.flatten(0, 1)
        torch.testing.assert_close(flat[slots], rows)
        others = torch.ones(len(flat), dtype=torch.bool)
        others[slots] = False
        assert flat[others].isnan().all()


def _attention_by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """One request: query (n, Q, D) at the end of key and value (context, K, D), one head and row at a time."""
    n, heads, _ = query.shape
    context, kv_heads, _ = key.shape
    out = torch.empty_like(query)
    for i in range(n):
        stop = context - n + i + 1
        seen = slice(0 if window is None else max(0, stop - window), stop)
        for head in range(heads):
            source = head // (heads // kv_heads)
            weights = (key[seen, source] @ query[i, head] * scale).softmax(0)
            out[i, head] = weights @ value[seen, source]
    return out


CHUNKS = {
    "one decode": [(1, 1)],
    "decodes of like length": [(1, 33)] * 3,
    "decodes of all lengths": [(1, 257), (1, 1), (1, 16), (1, 17), (1, 123)],
    "whole prompts": [(123, 123), (16, 16)],
    "chunks of longer prompts": [(17, 123), (2, 257)],
    "mixed": [(1, 16), (15, 15), (1, 123), (1, 1), (33, 257), (1, 257)],
}


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize(("heads", "window"), [((4, 4), None), ((6, 2), 20), ((8, 1), 1)])
def test_paged_attention_reads_exactly_each_requests_context(
    name: str, heads: tuple[int, int], window: int | None
) -> None:
    """Whatever is batched together, each token attends to its own request's past and to nothing else.

    Unused slots, foreign blocks and unused table columns hold NaN.
    """
    num_heads, kv_heads = heads
    lens, contexts = zip(*CHUNKS[name], strict=True)
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    shuffled = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(0)).int()
    tables = torch.full((len(lens), max(counts)), int(shuffled[-1]), dtype=torch.int32)
    key_cache, value_cache = (torch.full((len(shuffled), BLOCK_SIZE, kv_heads, 8), math.nan) for _ in range(2))
    query = _normal(sum(lens), num_heads, 8)
    expected = []
    for index, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        tables[index, :count] = shuffled[sum(counts[:index]) :][:count]
        key, value = _normal(context, kv_heads, 8, seed=index), _normal(context, kv_heads, 8, seed=index + 100)
        positions = torch.arange(context)
        slots = tables[index][positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        kv_write(key, value, key_cache, value_cache, slots.long())
        expected.append(_attention_by_hand(query[sum(lens[:index]) :][: lens[index]], key, value, 0.3, window))
    starts = torch.tensor([0, *lens]).cumsum(0).int()

    out = paged_attention(query, key_cache, value_cache, tables, torch.tensor(contexts).int(), starts, 0.3, window)

    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-4)
