"""Paged attention on a CPU: what `reference.paged_attention` promises, planned once a step for all layers.

Decodes read keys and values where they lie. With a padded table of the cache rows that each query head sees,

    scores = sampled_addmm(table, q, keys^T)     dot products for the table's entries only
    out    = embedding_bag(values, table, softmax(scores))     a weighted sum of the same rows

so nothing is copied, while gathering first would write and read every key and value once more. Both ops want float32:
a cache of another dtype is gathered and widened in groups that stay in a core's cache.

A chunk gathers its context once for all its queries and computes tiles of them, each on no more keys than it sees: no
mask of chunk by context is ever made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from kernels.reference import FP8

GROUP_TOKENS = 8192
"""Most context tokens, padding included, that decodes compute at once: more would only fall out of cache."""

PADDING_TOKENS = 1024
"""Most padding in a group of decodes: more costs what one more group does."""

KEPT_CELLS = 2**22
"""Most cells of a plan that stay for the step's other layers, some 16 bytes each; what is beyond, every layer plans
again. A cell is a position that a query head of a decode sees, or one that a chunk sees."""

TILE_QUERIES = 64
"""Most queries of a chunk computed at once."""

TILE_SCORES = 2**20
"""Most scores of a tile, however long the context: fewer heads share it then, and fewer queries of one head at last."""

_CELL_BYTES = 16

with warnings.catch_warnings():
    # Once a process torch says that CSR tensors are in beta; what is used of them is tested against the reference.
    warnings.simplefilter("ignore", UserWarning)
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1), dtype=torch.float32, check_invariants=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decodes:
    """Requests with one query each; r of them, padded to L positions."""

    queries: slice
    """Their rows of the step's tokens."""

    slots: Tensor | None
    """(r L,) int64, for a cache that is gathered first; None for one that is read in place."""

    rows: Tensor
    """(r Q L,): for each query head, rows of the cache (or of what was gathered) seen as (slots K, D)."""

    starts: Tensor
    """(r Q,): where each query head's rows begin."""

    pattern: Tensor
    """The same as a sparse matrix, (r Q, slots K); its values are overwritten by each layer's scores."""

    added: Tensor
    """(r Q L,): added to the scores, 0 or, for padding, -inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One request's queries, several of them."""

    queries: slice
    slots: Tensor
    """(L,) int64: what any of them sees, in order; the last are the queries' own."""


_Part: TypeAlias = Decodes | Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """How a step's attention is computed; the same for all layers of one window. Valid as long as the block tables."""

    parts: tuple[_Part | Callable[[], _Part], ...]
    """In the order of the step's tokens; one that is not kept is planned when it is called."""

    spare: Tensor | None
    """Beside parts that are not kept, room for the cells that could have been, never touched: what a step takes depends
    on its longest context, not on how its contexts divide `KEPT_CELLS`, and none takes more than the largest step."""

    window: int | None


def plan_attention(
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    *,
    key_cache: Tensor,
    num_heads: int,
    window: int | None,
) -> AttentionPlan:
    """Cut a step into parts that are computed at once.

    Arguments are those of `reference.paged_attention`; of the cache only shape and dtype matter. Decodes that follow
    each other share a part where that pads little: it is cheapest where they come sorted by context.
    """
    starts: list[int] = query_starts.tolist()
    contexts: list[int] = context_lens.tolist()
    visible = contexts if window is None else [min(window, context) for context in contexts]
    parts: list[_Part | Callable[[], _Part]] = []
    first = num_kept = 0
    while first < len(contexts):
        is_chunk = starts[first + 1] - starts[first] > 1
        last = first + 1 if is_chunk else _group_end(first, starts, visible)
        queries = slice(starts[first], starts[last])
        make: Callable[[], _Part]
        if is_chunk:
            num_cells = contexts[first]
            make = partial(_plan_chunk, block_tables[first], num_cells, queries, key_cache.shape[1], window)
        else:
            longest = max(visible[first:last])
            num_cells = (last - first) * num_heads * longest
            tables, lens = block_tables[first:last], context_lens[first:last]
            make = partial(_plan_decodes, tables, lens, queries, longest, key_cache, num_heads, window)
        is_kept = num_kept + num_cells <= KEPT_CELLS
        num_kept += num_cells if is_kept else 0
        parts.append(make() if is_kept else make)
        first = last
    spare = None
    if any(callable(part) for part in parts):
        spare = torch.empty((KEPT_CELLS - num_kept) * _CELL_BYTES, dtype=torch.uint8)
    return AttentionPlan(parts=tuple(parts), spare=spare, window=window)


def _group_end(first: int, starts: Sequence[int], visible: Sequence[int]) -> int:
    """The end of the run of decodes from `first` on that one part takes."""
    longest = total = 0
    for index in range(first, len(visible)):
        longest, total = max(longest, visible[index]), total + visible[index]
        padded = longest * (index + 1 - first)
        is_decode = starts[index + 1] - starts[index] == 1
        if index > first and (not is_decode or padded > GROUP_TOKENS or padded - total > PADDING_TOKENS):
            return index
    return len(visible)


def _plan_decodes(
    tables: Tensor,
    lens: Tensor,
    queries: slice,
    longest: int,
    key_cache: Tensor,
    num_heads: int,
    window: int | None,
) -> Decodes:
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    num_slots = num_blocks * block_size
    if longest > num_slots:
        # torch does not check it, and a sparse row with more entries than columns corrupts memory.
        raise ValueError(f"a context of {longest} tokens does not fit a cache of {num_slots} slots")
    ends = lens.long().unsqueeze(1)
    begins = torch.zeros_like(ends) if window is None else (ends - window).clamp_(min=0)
    offsets = torch.arange(longest)
    # Past its end a request repeats its last position: read again from cache, and weighted 0.
    positions = torch.minimum(begins + offsets, ends - 1)
    slots = _slots_of_blocks(tables, block_size).gather(1, positions)
    gathered = None
    if not _is_read_in_place(key_cache):
        gathered, num_slots = slots.flatten().long(), slots.numel()
        slots = torch.arange(num_slots).view_as(slots)
    index = torch.int32 if num_slots * kv_heads <= torch.iinfo(torch.int32).max else torch.int64
    heads = torch.arange(num_heads, dtype=index) // (num_heads // kv_heads)
    rows = (slots.to(index).unsqueeze(1) * kv_heads + heads.unsqueeze(1)).flatten()
    shape = (len(tables), num_heads, longest)
    padding = (offsets >= ends - begins).unsqueeze(1)
    added = torch.zeros(shape).masked_fill_(padding, float("-inf")).flatten()
    starts = torch.arange(0, rows.numel() + 1, longest, dtype=index)
    size = (len(starts) - 1, num_slots * kv_heads)
    pattern = torch.sparse_csr_tensor(starts, rows, torch.empty_like(added), size, check_invariants=False)
    return Decodes(queries=queries, slots=gathered, rows=rows, starts=starts[:-1], pattern=pattern, added=added)


def _slots_of_blocks(tables: Tensor, block_size: int) -> Tensor:
    """(…, M) blocks to the (…, M S) slots they consist of."""
    return (tables.unsqueeze(-1) * block_size + torch.arange(block_size, dtype=tables.dtype)).flatten(-2)


def _is_read_in_place(cache: Tensor) -> bool:
    return cache.dtype == torch.float32


def _plan_chunk(table: Tensor, context: int, queries: slice, block_size: int, window: int | None) -> Chunk:
    start = context - (queries.stop - queries.start)
    first = 0 if window is None else max(0, start - window + 1)
    return Chunk(queries=queries, slots=_slots_of_blocks(table, block_size)[first:context].long())


def cpu_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    plan: AttentionPlan,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """What `reference.paged_attention` returns, by a plan for its other arguments."""
    scale *= key_scale * _unit(key_cache)
    # Made before the parts' large tensors: small ones left between those would keep their memory from being used again.
    out = torch.empty_like(query, dtype=torch.float32)
    for part in plan.parts:
        _attend_part(query, key_cache, value_cache, scale, part, plan.window, out)
    value_scale *= _unit(value_cache)
    return (out if value_scale == 1.0 else out.mul_(value_scale)).to(query.dtype)


def _attend_part(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    part: _Part | Callable[[], _Part],
    window: int | None,
    out: Tensor,
) -> None:
    """Write a part's rows of `out`; one that is not kept is gone afterwards, before the next is planned."""
    planned = part() if callable(part) else part
    rows, out = query[planned.queries].float(), out[planned.queries]
    if isinstance(planned, Decodes):
        out.copy_(_attend_decodes(rows, key_cache, value_cache, scale, planned))
    else:
        keys, values = _gather(key_cache, planned.slots), _gather(value_cache, planned.slots)
        _attend_chunk(rows, keys, values, scale, window, out)


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """(slots, K, D) float32, in multiples of `_unit`.

    torch widens float8 one number after the other. Its bits, one place lower in a float16, are the same number divided
    by 256, which takes a sixteenth of the time; a NaN becomes 480 on the way.
    """
    rows = cache.flatten(0, 1).index_select(0, slots)
    if rows.dtype == FP8:
        # Widening repeats the sign bit; the first bit of a float16's exponent is not used here.
        bits = (rows.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~0x4000)
        return bits.view(torch.float16).float()
    return rows.float()


def _unit(cache: Tensor) -> float:
    return 256.0 if cache.dtype == FP8 else 1.0


def _attend_decodes(query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, decodes: Decodes) -> Tensor:
    """One query a request: (r, Q, D) to the same."""
    head_dim = query.shape[-1]
    if decodes.slots is not None:
        key_cache, value_cache = _gather(key_cache, decodes.slots), _gather(value_cache, decodes.slots)
    keys, values = key_cache.view(-1, head_dim), value_cache.view(-1, head_dim)
    queries = query.reshape(-1, head_dim)
    # In place: a new pattern would be copied for every layer, its indices too.
    scores = decodes.pattern.values().copy_(decodes.added)
    torch.sparse.sampled_addmm(decodes.pattern, queries, keys.t(), alpha=scale, out=decodes.pattern)
    weights = scores.view(len(queries), -1).softmax(-1).flatten()
    out = F.embedding_bag(decodes.rows, values, decodes.starts, mode="sum", per_sample_weights=weights)
    return out.view_as(query)


def _attend_chunk(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, out: Tensor) -> None:
    """One request's queries (n, Q, D) over what they see, (L, K, D), written to `out`, (n, Q, D)."""
    num_queries, num_heads, head_dim = query.shape
    num_keys, kv_heads, _ = keys.shape
    past = num_keys - num_queries
    # The heads that share a key are further queries of it.
    grouped, out = (each.view(num_queries, kv_heads, -1, head_dim).permute(1, 2, 0, 3) for each in (query * scale, out))
    keys, values = keys.permute(1, 2, 0), values.transpose(0, 1)
    # Keys are read once a tile: rather few heads of many queries than all heads of few.
    query_scores = num_heads // kv_heads * num_keys
    num_heads_at_once = min(kv_heads, max(1, TILE_SCORES // (TILE_QUERIES * query_scores)))
    step = max(1, min(TILE_QUERIES, TILE_SCORES // (num_heads_at_once * query_scores)))
    future = torch.full((step, step), float("-inf")).triu_(1)
    for head, first in product(range(0, kv_heads, num_heads_at_once), range(0, num_queries, step)):
        heads = slice(head, head + num_heads_at_once)
        tile = grouped[heads, :, first : first + step]
        num_tiled, size = len(tile), tile.shape[2]
        stop = past + first + size
        start = 0 if window is None else max(0, stop - size - window + 1)
        scores = torch.bmm(tile.reshape(num_tiled, -1, head_dim), keys[heads, :, start:stop])
        scores = scores.view(*tile.shape[:3], stop - start)
        scores[..., -size:].add_(future[:size, :size])
        if window is not None and stop - start > window:
            positions = torch.arange(start, stop)
            own = positions[-size:].unsqueeze(1)
            scores.masked_fill_(positions <= own - window, float("-inf"))
        weights = scores.softmax(-1).view(num_tiled, -1, stop - start)
        weighted = torch.bmm(weights, values[heads, start:stop])
        out[heads, :, first : first + size].copy_(weighted.view(*tile.shape))
