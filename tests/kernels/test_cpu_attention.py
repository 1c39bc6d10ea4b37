"""The CPU's paged attention against the reference, with NaN wherever nothing may be read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.device_memory import activation_peak_bytes
from kernels import cpu_attention as attention
from kernels.cpu_attention import Decodes, cpu_attention, plan_attention
from kernels.reference import FP8, paged_attention

BLOCK_SIZE = 4
HEAD_DIM = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step's attention: what `paged_attention` takes, caches poisoned outside every context."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    tables: Tensor
    lens: Tensor
    starts: Tensor

    def both(self, window: int | None, scales: tuple[float, float] = (1.0, 1.0)) -> tuple[Tensor, Tensor]:
        """What the CPU's and the reference's make of it."""
        steps = (self.tables, self.lens, self.starts)
        plan = plan_attention(*steps, key_cache=self.key_cache, num_heads=self.query.shape[1], window=window)
        caches = (self.key_cache, self.value_cache)
        ours = cpu_attention(self.query, *caches, 0.3, plan, *scales)
        return ours, paged_attention(self.query, *caches, *steps, 0.3, window, *scales)


def _case(
    requests: list[tuple[int, int]], *, heads: tuple[int, int] = (6, 2), dtype: torch.dtype = torch.float32
) -> Case:
    """`requests` are (new tokens, context); each context fills its blocks in a shuffled order."""
    query_dtype = torch.float32 if dtype == FP8 else dtype
    generator = torch.Generator().manual_seed(len(requests))
    lens, contexts = zip(*requests, strict=True)
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    shuffled = torch.randperm(sum(counts) + 3, generator=generator).int()
    tables = torch.full((len(lens), max(counts)), int(shuffled[-1]), dtype=torch.int32)
    shape = (len(shuffled), BLOCK_SIZE, heads[1], HEAD_DIM)
    key_cache, value_cache = (torch.full(shape, math.nan) for _ in range(2))
    first = 0
    for index, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        tables[index, :count] = shuffled[first : first + count]
        first += count
        positions = torch.arange(context)
        slots = tables[index][positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        for cache in (key_cache, value_cache):
            cache.flatten(0, 1)[slots] = torch.randn(context, *shape[2:], generator=generator)
    return Case(
        query=torch.randn(sum(lens), heads[0], HEAD_DIM, generator=generator).to(query_dtype),
        key_cache=key_cache.to(dtype),
        value_cache=value_cache.to(dtype),
        tables=tables,
        lens=torch.tensor(contexts).int(),
        starts=torch.tensor([0, *lens]).cumsum(0).int(),
    )


REQUESTS = st.tuples(st.integers(1, 9) | st.just(1), st.integers(0, 40)).map(lambda pair: (pair[0], sum(pair)))


@settings(max_examples=60)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=7),
    window=st.none() | st.integers(1, 50),
    heads=st.sampled_from([(4, 4), (6, 2), (8, 1)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, FP8]),
    scales=st.sampled_from([(1.0, 1.0), (0.25, 2.0)]),
    group=st.integers(1, 100),
    kept=st.integers(0, 1000),
    tile=st.integers(1, 5),
    scores=st.integers(1, 2000),
)
def test_it_computes_what_the_reference_does(
    requests: list[tuple[int, int]],
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    scales: tuple[float, float],
    group: int,
    kept: int,
    tile: int,
    scores: int,
) -> None:
    """A user on a CPU gets the model's own tokens, however a step mixes requests and whatever the cache's dtype."""
    case = _case(requests, heads=heads, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "GROUP_TOKENS", group)
        patch.setattr(attention, "PADDING_TOKENS", group // 4)
        patch.setattr(attention, "KEPT_CELLS", kept)
        patch.setattr(attention, "TILE_QUERIES", tile)
        patch.setattr(attention, "TILE_SCORES", scores)
        ours, expected = case.both(window, scales)

    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    assert ours.dtype == case.query.dtype
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


def test_a_long_context_is_computed_in_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of a long prompt's chunk stay within bounds, so that they take no memory from KV blocks."""
    case = _case([(9, 40)])
    sizes = []
    monkeypatch.setattr(torch, "bmm", lambda a, b, bmm=torch.bmm: sizes.append((*a.shape[:2], b.shape[2])) or bmm(a, b))
    for most, tile in ((6 * 40 * 9, (2, 27, 40)), (6 * 40 * 5, (1, 27, 40)), (3 * 40 * 3, (1, 9, 40))):
        monkeypatch.setattr(attention, "TILE_SCORES", most)
        monkeypatch.setattr(attention, "TILE_QUERIES", 9)
        sizes.clear()
        ours, expected = case.both(None)

        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        assert max(sizes[::2]) == tile


def test_decodes_are_grouped_where_that_pads_little() -> None:
    """One long context among short ones does not make the short ones read as much as it does."""
    case = _case([(1, 30)] * 100 + [(1, 2000)])
    plan = plan_attention(case.tables, case.lens, case.starts, key_cache=case.key_cache, num_heads=6, window=None)

    lengths = [len(part.rows) for part in plan.parts if isinstance(part, Decodes)]
    assert lengths == [100 * 6 * 30, 6 * 2000]


def test_a_window_bounds_what_a_decode_reads() -> None:
    """A sliding window saves the time that full attention to a long context would take."""
    case = _case([(1, 500)])
    (part,) = plan_attention(
        case.tables, case.lens, case.starts, key_cache=case.key_cache, num_heads=6, window=16
    ).parts

    assert isinstance(part, Decodes)
    assert len(part.rows) == 6 * 16


def test_a_context_that_no_cache_holds_is_refused() -> None:
    """A broken block table is an error, not damaged memory."""
    case = _case([(1, 8)])
    with pytest.raises(ValueError, match="a context of 8 tokens does not fit a cache of 4 slots"):
        plan_attention(case.tables, case.lens, case.starts, key_cache=case.key_cache[:1], num_heads=6, window=None)


def _peak_bytes(case: Case, *, num_layers: int, window: int | None = None) -> int:
    """What so many layers of a step hold at once."""

    def run() -> None:
        steps = (case.tables, case.lens, case.starts)
        plan = plan_attention(*steps, key_cache=case.key_cache, num_heads=6, window=window)
        for _ in range(num_layers):
            cpu_attention(case.query, case.key_cache, case.value_cache, 0.3, plan)

    return activation_peak_bytes(run, torch.device("cpu"))


def test_plans_of_many_long_contexts_stay_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long `max_model_len` takes no gigabytes from KV blocks, however many sequences there may be."""
    cells = 6 * 400
    monkeypatch.setattr(attention, "GROUP_TOKENS", 400)
    monkeypatch.setattr(attention, "KEPT_CELLS", 3 * cells + 7)
    few, many = (_peak_bytes(_case([(1, 400)] * number), num_layers=2) for number in (5, 40))

    # A request's own query and result, its block table and the like.
    assert many - few < 35 * 4 * cells
    assert many < (3 * 16 + 40) * cells + 40 * 1000


@settings(max_examples=30)
@given(contexts=st.lists(st.integers(1, 400), min_size=1, max_size=8).map(sorted), kept=st.integers(0, 20_000))
@example(contexts=[200, 400, 400], kept=2 * 6 * 400 - 1)
def test_no_step_takes_more_than_the_one_with_the_longest_contexts(contexts: list[int], kept: int) -> None:
    """What is measured at a start holds for every step after it, however its contexts divide what is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "KEPT_CELLS", kept)
        patch.setattr(attention, "GROUP_TOKENS", 400)
        ours = _peak_bytes(_case([(1, context) for context in contexts]), num_layers=2)
        largest = _peak_bytes(_case([(1, 400)] * len(contexts)), num_layers=2)

    # Short contexts that are computed at once have their few queries and results at once.
    assert ours <= largest + len(contexts) * 600
