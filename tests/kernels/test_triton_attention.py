"""Paged attention in Triton does what the reference does, and reads nothing that is not a request's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from kernels import paged_attention as kernel
from kernels import reference, tiles
from tests.kernels.poison import TOLERANCE, padded, poisoned_outputs

OUTSIDE = 10**8
"""A block that does not exist: whoever reads an unused column of a block table reads far outside the cache."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What attention of one step takes."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    tables: Tensor
    lens: Tensor
    starts: Tensor

    def agrees(self, *, window: int | None = None, scales: tuple[float, float] = (1.0, 1.0)) -> None:
        """The kernel's numbers are the reference's."""
        caches, steps = (self.key_cache, self.value_cache), (self.tables, self.lens, self.starts)
        with poisoned_outputs():
            ours = kernel.paged_attention(self.query, *caches, *steps, 0.3, window, *scales)
        theirs = reference.paged_attention(self.query, *caches, *steps, 0.3, window, *scales)
        tolerance = 2 * TOLERANCE[self.query.dtype]
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


def _step(
    requests: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Step:
    """`requests` are (new tokens, context). Blocks lie shuffled; all slots outside a context hold NaN."""
    generator = torch.Generator().manual_seed(sum(context for _, context in requests))
    num_queries, contexts = zip(*requests, strict=True)
    counts = [-(-context // block_size) for context in contexts]
    shuffled = torch.randperm(sum(counts) + 1, generator=generator).int()
    tables = torch.full((len(requests), max(counts) + 1), OUTSIDE, dtype=torch.int32)
    shape = (len(shuffled), block_size, heads[1], size)
    cache_dtype = cache_dtype or dtype
    caches = []
    for _ in range(2):
        numbers = torch.randn(shape, generator=generator)
        used, first = torch.zeros(shape[:2], dtype=torch.bool), 0
        for index, (count, context) in enumerate(zip(counts, contexts, strict=True)):
            tables[index, :count] = shuffled[first : first + count]
            first += count
            positions = torch.arange(context)
            used[tables[index].long()[positions // block_size], positions % block_size] = True
        numbers[~used] = math.nan
        caches.append(numbers.to(cache_dtype))
    query = torch.randn((sum(num_queries), heads[0], size), generator=generator).to(dtype)
    starts = torch.tensor([0, *num_queries]).cumsum(0).int()
    lens = torch.tensor(contexts, dtype=torch.int32)
    return Step(
        query=padded(query), key_cache=caches[0], value_cache=caches[1], tables=tables, lens=lens, starts=starts
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_decodes_of_ragged_contexts(dtype: torch.dtype) -> None:
    """A first token, full blocks, one more than full, and a long one, each on its own keys alone."""
    _step([(1, 1), (1, 16), (1, 17), (1, 131)], dtype=dtype).agrees()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_chunks_and_decodes_in_one_step(dtype: torch.dtype) -> None:
    """Whole prompts, chunks that go on with a context, and decodes between them."""
    _step([(5, 5), (1, 40), (37, 90), (1, 1), (3, 35)], dtype=dtype).agrees()


@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (7, 1), (14, 2), (20, 1)])
def test_query_heads_share_keys(heads: tuple[int, int]) -> None:
    """Any number of query heads a key/value head, also where they do not fill a tile's rows, or need more."""
    _step([(1, 21), (9, 30)], heads=heads).agrees()


@pytest.mark.parametrize("size", [32, 80, 96, 128, 256])
def test_head_sizes(size: int) -> None:
    """Phi's 80 is no power of two, Gemma's 256 takes other tiles."""
    _step([(1, 50), (6, 33)], heads=(2, 1), size=size).agrees()


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(block_size: int) -> None:
    """A tile of keys spans several blocks, or a part of one."""
    _step([(1, 129), (20, 70)], heads=(2, 1), block_size=block_size).agrees()


@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_a_window_hides_what_is_older(window: int) -> None:
    """Layers of Gemma and Mistral see so many positions, themselves included; decodes and chunks alike."""
    _step([(1, 100), (25, 90), (3, 3)], heads=(2, 1)).agrees(window=window)


def test_a_float8_cache_is_read_with_its_scales() -> None:
    """Keys and values were divided when they were stored."""
    _step([(1, 40), (5, 21)], cache_dtype=reference.FP8).agrees(scales=(0.5, 4.0))


@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("window", [None, 40])
def test_splits_of_a_context_add_up(splits: int, window: int | None) -> None:
    """Few requests with long contexts are cut; some splits of the short ones are empty."""
    with mock.patch.object(kernel, "num_splits", return_value=splits):
        _step([(1, 300), (1, 2), (4, 65)], heads=(4, 2)).agrees(window=window)


def test_splits_of_an_odd_head_keep_to_their_columns() -> None:
    """Heads of 80 lie side by side in tiles of 128: a column too many is the next head's first."""
    with mock.patch.object(kernel, "num_splits", return_value=2):
        _step([(1, 70), (2, 40)], heads=(2, 1), size=80).agrees()


def test_adding_up_reads_its_own_splits_alone() -> None:
    """Fewer splits than a tile holds: behind the last result's lies memory of somebody else's, or none."""
    results, splits, size = 3, 3, 8
    room = [torch.full((results * splits * width + 999,), math.nan) for width in (size, 1, 1)]
    parts, maxima, sums = (
        torch.randn(results * splits * width, generator=torch.Generator().manual_seed(width)).abs_() + 1
        for width in (size, 1, 1)
    )
    for around, inner in zip(room, (parts, maxima, sums), strict=True):
        around[: len(inner)] = inner
    out = torch.full((results, size), math.nan)
    kernel._combine_kernel[(results,)](*room, out, splits, size, 2.0, MOST=tiles.MOST_SPLITS, COLUMNS=size)
    weights = torch.exp2(maxima.view(results, splits) - maxima.view(results, splits).amax(1, keepdim=True))
    total = (sums.view(results, splits) * weights).sum(1, keepdim=True)
    expected = (parts.view(results, splits, size) * weights.unsqueeze(2)).sum(1) / total * 2.0
    torch.testing.assert_close(out, expected)


def test_offsets_beyond_two_thousand_million() -> None:
    """A cache of a large GPU has more numbers than an int32 counts; here its blocks lie far apart and overlap."""
    step = _step([(1, 33), (2, 18)], heads=(2, 1), size=32)
    far = 2**31 // 4 + 64
    num_blocks = step.key_cache.shape[0]
    room = torch.empty(far * (num_blocks - 1) + step.key_cache[0].numel(), dtype=torch.float16)
    caches = []
    for cache in (step.key_cache, step.value_cache):
        spread = room.as_strided(cache.shape, (far, *cache.stride()[1:]))
        caches.append((spread, cache.half()))
    spread, half = caches[0]
    spread.copy_(half)
    wide = Step(
        query=step.query.half(),
        key_cache=spread,
        value_cache=spread,
        tables=step.tables,
        lens=step.lens,
        starts=step.starts,
    )
    wide.agrees()


def test_few_long_contexts_are_split_and_many_are_not() -> None:
    """Sixty-four decodes fill a chip without; one of 32k tokens would use eight of its 132 SMs."""
    alone = tiles.num_splits(num_tiles=2, num_kv_heads=8, most_keys=32768, num_sms=132)
    many = tiles.num_splits(num_tiles=128, num_kv_heads=8, most_keys=4096, num_sms=132)
    short = tiles.num_splits(num_tiles=2, num_kv_heads=8, most_keys=256, num_sms=132)

    assert (alone, many, short) == (32, 1, 1)
