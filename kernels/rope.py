"""Rotary embedding of every head of a token (Su et al. 2021, arXiv:2104.09864), halves paired as Llama does.

    (a, b) -> (a cos - b sin, b cos + a sin)

`cos` and `sin` come as the model makes them: D wide, `sin` with its first half negated.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import head_tile
from kernels.variants import FLOATS, HEAD_SIZES, Variant, pointer


@triton.jit
def _rope_kernel(
    x_ptr,  # (tokens, heads, 2 half)
    cos_ptr,  # (tokens, 1, 2 half), contiguous
    sin_ptr,  # (tokens, 1, 2 half), contiguous
    out_ptr,  # (tokens, heads, 2 half), contiguous
    x_token_stride,
    x_head_stride,
    num_heads,
    half,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, COLUMNS)
    in_half = columns < half
    there = (heads < num_heads)[:, None] & in_half[None, :]
    x_offsets = token * x_token_stride + heads.to(tl.int64)[:, None] * x_head_stride + columns[None, :]
    first = tl.load(x_ptr + x_offsets, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + x_offsets + half, mask=there, other=0.0).to(tl.float32)
    angles = token * 2 * half + columns
    first_cos = tl.load(cos_ptr + angles, mask=in_half, other=0.0)[None, :]
    second_cos = tl.load(cos_ptr + angles + half, mask=in_half, other=0.0)[None, :]
    first_sin = tl.load(sin_ptr + angles, mask=in_half, other=0.0)[None, :]
    second_sin = tl.load(sin_ptr + angles + half, mask=in_half, other=0.0)[None, :]
    out_offsets = (token * num_heads + heads[:, None]) * 2 * half + columns[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + out_offsets, (first * first_cos + second * first_sin).to(dtype), mask=there)
    tl.store(out_ptr + out_offsets + half, (second * second_cos + first * second_sin).to(dtype), mask=there)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `reference.rotary_embedding`."""
    num_tokens, num_heads, head_size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    if x.stride(-1) != 1:
        x = x.contiguous()
    tile = head_tile(num_heads=num_heads, columns=head_size // 2)
    _rope_kernel[(num_tokens, triton.cdiv(num_heads, tile.heads))](
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        x.stride(0),
        x.stride(1),
        num_heads,
        head_size // 2,
        HEADS=tile.heads,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
    )
    return out


def shipped() -> Iterator[Variant]:
    """Every head size, for many heads."""
    for dtype in FLOATS:
        for head_size in HEAD_SIZES:
            tile = head_tile(num_heads=40, columns=head_size // 2)
            yield Variant(
                name=f"rotary_embedding {str(dtype).removeprefix('torch.')} head {head_size}",
                kernel=_rope_kernel,
                signature={
                    "x_ptr": pointer(dtype),
                    "cos_ptr": pointer(torch.float32),
                    "sin_ptr": pointer(torch.float32),
                    "out_ptr": pointer(dtype),
                    "x_token_stride": "i64",
                    "x_head_stride": "i64",
                    "num_heads": "i32",
                    "half": "i32",
                },
                constants={"HEADS": tile.heads, "COLUMNS": tile.columns},
                num_warps=tile.num_warps,
            )
