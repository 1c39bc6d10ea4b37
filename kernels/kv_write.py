"""Store a step's keys and values in the paged cache: `cache[slot // S, slot % S] = row`.

A program writes some heads of one token, key and value. A token with a negative slot is padding and is not written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.float8 import to_float8
from kernels.reference import FP8
from kernels.tiles import head_tile
from kernels.variants import FLOATS, HEAD_SIZES, Variant, pointer


@triton.jit
def _kv_write_kernel(
    key_ptr,  # (tokens, heads, head_size)
    value_ptr,  # (tokens, heads, head_size)
    key_cache_ptr,  # (blocks, block_size, heads, head_size)
    value_cache_ptr,  # likewise
    slots_ptr,  # (tokens,) int64
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    block_size,
    num_heads,
    head_size,
    key_scale,
    value_scale,
    IS_FP8: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    there = (heads < num_heads) & (columns < head_size)
    key_offsets = token * key_token_stride + heads * key_head_stride + columns
    value_offsets = token * value_token_stride + heads * value_head_stride + columns
    key = tl.load(key_ptr + key_offsets, mask=there, other=0.0)
    value = tl.load(value_ptr + value_offsets, mask=there, other=0.0)
    if IS_FP8:
        key = to_float8(key.to(tl.float32) / key_scale)
        value = to_float8(value.to(tl.float32) / value_scale)
    place = (slot // block_size) * cache_block_stride + (slot % block_size) * cache_slot_stride
    cache_offsets = place + heads * cache_head_stride + columns
    tl.store(key_cache_ptr + cache_offsets, key, mask=there)
    tl.store(value_cache_ptr + cache_offsets, value, mask=there)


def kv_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """As `reference.kv_write`; both caches have the same strides, and numbers of a head lie in one piece."""
    num_tokens, num_heads, head_size = key.shape
    if key.numel() == 0:
        return
    key, value = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (key, value))
    is_fp8 = key_cache.dtype == FP8
    if is_fp8:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    tile = head_tile(num_heads=num_heads, columns=head_size)
    _kv_write_kernel[(num_tokens, triton.cdiv(num_heads, tile.heads))](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        key_cache.shape[1],
        num_heads,
        head_size,
        key_scale,
        value_scale,
        IS_FP8=is_fp8,
        HEADS=tile.heads,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
    )


def shipped() -> Iterator[Variant]:
    """Every head size, into a cache of the same dtype and of float8."""
    strides = (
        *("key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride"),
        *("cache_block_stride", "cache_slot_stride", "cache_head_stride"),
    )
    for dtype in FLOATS:
        for head_size in HEAD_SIZES:
            for is_fp8 in (False, True):
                stored = torch.uint8 if is_fp8 else dtype
                tile = head_tile(num_heads=8, columns=head_size)
                yield Variant(
                    name=f"kv_write {str(dtype).removeprefix('torch.')}{' to fp8' if is_fp8 else ''} head {head_size}",
                    kernel=_kv_write_kernel,
                    signature={
                        **dict.fromkeys(("key_ptr", "value_ptr"), pointer(dtype)),
                        **dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), pointer(stored)),
                        "slots_ptr": pointer(torch.int64),
                        **dict.fromkeys(strides, "i64"),
                        **dict.fromkeys(("block_size", "num_heads", "head_size"), "i32"),
                        **dict.fromkeys(("key_scale", "value_scale"), "fp32"),
                    },
                    constants={"IS_FP8": is_fp8, "HEADS": tile.heads, "COLUMNS": tile.columns},
                    num_warps=tile.num_warps,
                )
