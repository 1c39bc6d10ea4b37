"""Causal attention over a paged cache, chunks of prompts and decodes in one launch.

    out = softmax(q k^T scale) v, with a running maximum m and sum l of each row's exponentials, so that keys are read
    once and no row of scores is ever stored (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691)

A program takes some queries of one request with all query heads of one key/value head as the rows of its tile, so that
keys and values are read once for all of them. Tiles are numbered through all requests: request r's begin at
`query_starts[r] // QUERIES + r`, which leaves a tile or none unused behind it, and needs nothing of the device on the
host. Long contexts of few requests are cut into splits, each a program with a result of its own, which a second kernel
adds up (Dao et al. 2023, Flash-Decoding).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import num_sms
from kernels.float8 import from_float8
from kernels.reference import FP8
from kernels.tiles import MOST_SPLITS, AttentionTile, attention_tile, next_power_of_2, num_splits
from kernels.variants import FLOATS, HEAD_SIZES, Variant, pointer

_LOG2_E = math.log2(math.e)


@triton.jit
def _request_of(tile, query_starts_ptr, num_requests, QUERIES: tl.constexpr):
    """The last request whose tiles begin at or before `tile`."""
    low, high = 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts_ptr + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _load_cache(ptr, offsets, there, IS_FP8: tl.constexpr, dtype: tl.constexpr):
    stored = tl.load(ptr + offsets, mask=there, other=0)
    return from_float8(stored).to(dtype) if IS_FP8 else stored.to(dtype)


# Batches of every size come: one of 1 or of a multiple of 16 would each be compiled anew, while others wait.
@triton.jit(do_not_specialize=["num_requests", "splits"])
def _attention_kernel(
    query_ptr,  # (tokens, query heads, head_size)
    key_cache_ptr,  # (blocks, block_size, kv heads, head_size)
    value_cache_ptr,  # likewise
    block_tables_ptr,  # (requests, columns) int32
    context_lens_ptr,  # (requests,) int32
    query_starts_ptr,  # (requests + 1,) int32
    out_ptr,  # (tokens, query heads, head_size), or with splits (tokens, query heads, splits, head_size) float32
    maxima_ptr,  # with splits (tokens, query heads, splits) float32
    sums_ptr,  # likewise
    query_token_stride,
    query_head_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    table_stride,
    num_requests,
    splits,
    num_heads,
    block_size,
    head_size,
    window,
    scale_log2,
    value_scale,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_FP8: tl.constexpr,
    DTYPE: tl.constexpr,  # of what is multiplied
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = _request_of(tile, query_starts_ptr, num_requests, QUERIES)
    first_token = tl.load(query_starts_ptr + request)
    num_queries = tl.load(query_starts_ptr + request + 1) - first_token
    first_query = (tile - first_token // QUERIES - request) * QUERIES
    if first_query >= num_queries:
        return
    context = tl.load(context_lens_ptr + request)

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_query = (rows < QUERIES * GROUP) & (queries < num_queries)
    in_head = columns < head_size
    tokens = (first_token + queries).to(tl.int64)
    query_offsets = (tokens * query_token_stride + heads.to(tl.int64) * query_head_stride)[:, None] + columns[None, :]
    query = tl.load(query_ptr + query_offsets, mask=is_query[:, None] & in_head[None, :], other=0.0).to(DTYPE)
    positions = context - num_queries + queries

    # Keys that some query of the tile sees; every split takes a share of them in whole tiles.
    end = context - num_queries + tl.minimum(first_query + QUERIES, num_queries)
    begin = tl.maximum(0, context - num_queries + first_query - window + 1) // KEYS * KEYS if HAS_WINDOW else 0
    if IS_SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, KEYS), splits) * KEYS
        begin += split * share
        end = tl.minimum(end, begin + share)

    maxima = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    table = block_tables_ptr + request.to(tl.int64) * table_stride
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < end
        blocks = tl.load(table + keys // block_size, mask=is_key, other=0).to(tl.int64)
        places = blocks * cache_block_stride + (keys % block_size).to(tl.int64) * cache_slot_stride
        places += kv_head.to(tl.int64) * cache_head_stride
        there = is_key[:, None] & in_head[None, :]
        offsets = places[:, None] + columns[None, :]
        key = _load_cache(key_cache_ptr, offsets, there, IS_FP8, DTYPE)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        age = positions[:, None] - keys[None, :]
        seen = is_key[None, :] & (age >= 0)
        if HAS_WINDOW:
            seen = seen & (age < window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(maxima, tl.max(scores, axis=1))
        # A row that has seen no key yet has a maximum of -inf, and -inf less itself is not a number.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        decay = tl.exp2(maxima - safe)
        value = _load_cache(value_cache_ptr, offsets, there, IS_FP8, DTYPE)
        out = out * decay[:, None] + tl.dot(weights.to(DTYPE), value, input_precision="ieee")
        sums = sums * decay + tl.sum(weights, axis=1)
        maxima = higher

    results = tokens * num_heads + heads
    stored = is_query[:, None] & in_head[None, :]
    if not IS_SPLIT:
        out = out / tl.where(is_query, sums, 1.0)[:, None] * value_scale
        out_offsets = results[:, None] * head_size + columns[None, :]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        parts = results * splits + split
        tl.store(maxima_ptr + parts, maxima, mask=is_query)
        tl.store(sums_ptr + parts, sums, mask=is_query)
        tl.store(out_ptr + parts[:, None] * head_size + columns[None, :], out, mask=stored)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    parts_ptr,  # (tokens, query heads, splits, head_size) float32, contiguous
    maxima_ptr,  # (tokens, query heads, splits) float32
    sums_ptr,  # likewise
    out_ptr,  # (tokens, query heads, head_size), contiguous
    splits,
    head_size,
    value_scale,
    MOST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    result = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MOST)
    there = split < splits
    columns = tl.arange(0, COLUMNS)
    in_head = columns < head_size
    maxima = tl.load(maxima_ptr + result * splits + split, mask=there, other=float("-inf"))
    weights = tl.exp2(maxima - tl.max(maxima, axis=0))
    sums = tl.load(sums_ptr + result * splits + split, mask=there, other=0.0)
    part_offsets = (result * splits + split)[:, None] * head_size + columns[None, :]
    parts = tl.load(parts_ptr + part_offsets, mask=there[:, None] & in_head[None, :], other=0.0)
    out = tl.sum(parts * weights[:, None], axis=0) / tl.sum(sums * weights, axis=0) * value_scale
    tl.store(out_ptr + result * head_size + columns, out.to(out_ptr.dtype.element_ty), mask=in_head)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    scale: float,
    window: int | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """As `reference.paged_attention`; both caches have the same strides, and numbers of a head lie in one piece."""
    num_tokens, num_heads, head_size = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if query.numel() == 0:
        return out
    if query.stride(-1) != 1:
        query = query.contiguous()
    is_fp8 = key_cache.dtype == FP8
    if is_fp8:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    num_requests, num_columns = block_tables.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    tile = attention_tile(
        head_size=head_size,
        group=group,
        itemsize=query.element_size(),
        is_decode=num_tokens == num_requests,
        is_fp8=is_fp8,
    )
    # As many as there can be, whatever the requests' lengths: those are known on the device only.
    num_tiles = num_tokens // tile.queries(group) + num_requests
    most_keys = min(window or num_columns * block_size, num_columns * block_size)
    splits = num_splits(num_tiles=num_tiles, num_kv_heads=num_kv_heads, most_keys=most_keys, num_sms=num_sms(query))
    parts, maxima, sums = _partial(query, splits)
    _attention_kernel[(num_tiles, num_kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        query_starts,
        out if splits == 1 else parts,
        maxima,
        sums,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_tables.stride(0),
        num_requests,
        splits,
        num_heads,
        block_size,
        head_size,
        window or 0,
        scale * key_scale * _LOG2_E,
        value_scale,
        GROUP=group,
        QUERIES=tile.queries(group),
        ROWS=tile.rows,
        KEYS=tile.keys,
        COLUMNS=tile.columns,
        IS_SPLIT=splits > 1,
        HAS_WINDOW=window is not None,
        IS_FP8=is_fp8,
        DTYPE=_multiplied(query.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        _combine_kernel[(num_tokens * num_heads,)](
            parts, maxima, sums, out, splits, head_size, value_scale, MOST=MOST_SPLITS, COLUMNS=tile.columns
        )
    return out


_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _multiplied(dtype: torch.dtype) -> tl.dtype:
    """The queries' own type. The interpreter computes with bfloat16's bits as if they were whole numbers."""
    return tl.float32 if triton.knobs.runtime.interpret and dtype == torch.bfloat16 else _TYPES[dtype]


def _partial(query: Tensor, splits: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Where splits leave their results: outputs not yet divided, maxima and sums; nothing where there is one."""
    if splits == 1:
        return None, None, None
    num_tokens, num_heads, head_size = query.shape
    shape = (num_tokens, num_heads, splits)
    maxima, sums = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    return torch.empty((*shape, head_size), dtype=torch.float32, device=query.device), maxima, sums


def shipped() -> Iterator[Variant]:
    """Every head size, decodes and prompts, one split and several, caches of the same dtype and of float8."""
    for dtype, head_size in product(FLOATS, HEAD_SIZES):
        for is_decode, is_fp8 in product((True, False), (False, True)):
            tile = attention_tile(
                head_size=head_size, group=4, itemsize=dtype.itemsize, is_decode=is_decode, is_fp8=is_fp8
            )
            yield _variant(dtype, head_size, tile, is_split=is_decode, is_fp8=is_fp8)
        yield _combined(dtype, head_size)


def _variant(dtype: torch.dtype, head_size: int, tile: AttentionTile, *, is_split: bool, is_fp8: bool) -> Variant:
    stored = torch.uint8 if is_fp8 else dtype
    integers = ("num_requests", "splits", "num_heads", "block_size", "head_size", "window")
    strides = (
        *("query_token_stride", "query_head_stride", "cache_block_stride", "cache_slot_stride"),
        *("cache_head_stride", "table_stride"),
    )
    partial = dict.fromkeys(("maxima_ptr", "sums_ptr"), pointer(torch.float32)) if is_split else {}
    absent = {} if is_split else {"maxima_ptr": None, "sums_ptr": None}
    said = f"{tile.rows}x{tile.keys}{', in splits' if is_split else ''}{', fp8 cache' if is_fp8 else ''}"
    return Variant(
        name=f"paged_attention {str(dtype).removeprefix('torch.')} head {head_size} {said}",
        kernel=_attention_kernel,
        signature={
            "query_ptr": pointer(dtype),
            **dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), pointer(stored)),
            **dict.fromkeys(("block_tables_ptr", "context_lens_ptr", "query_starts_ptr"), pointer(torch.int32)),
            "out_ptr": pointer(torch.float32 if is_split else dtype),
            **partial,
            **dict.fromkeys(strides, "i64"),
            **dict.fromkeys(integers, "i32"),
            **dict.fromkeys(("scale_log2", "value_scale"), "fp32"),
        },
        constants={
            "GROUP": 4,
            "QUERIES": tile.queries(4),
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "COLUMNS": tile.columns,
            "IS_SPLIT": is_split,
            "HAS_WINDOW": True,
            "IS_FP8": is_fp8,
            "DTYPE": _TYPES[dtype],
            **absent,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _combined(dtype: torch.dtype, head_size: int) -> Variant:
    return Variant(
        name=f"adding up splits, {str(dtype).removeprefix('torch.')} head {head_size}",
        kernel=_combine_kernel,
        signature={
            **dict.fromkeys(("parts_ptr", "maxima_ptr", "sums_ptr"), pointer(torch.float32)),
            "out_ptr": pointer(dtype),
            **dict.fromkeys(("splits", "head_size"), "i32"),
            "value_scale": "fp32",
        },
        constants={"MOST": MOST_SPLITS, "COLUMNS": next_power_of_2(head_size)},
        num_warps=4,
    )
