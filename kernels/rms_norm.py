"""Root mean square norm, alone or after adding to the residual stream.

    y = x / sqrt(mean(x^2) + eps) * weight          (Zhang and Sennrich 2019, arXiv:1910.07467)

A program reduces a few whole rows. A weight may be one row for all, or one for each head of a token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import num_sms
from kernels.tiles import RowTile, row_tile
from kernels.variants import FLOATS, Variant, pointer


# However many rows a step has: one of 1 or of a multiple of 16 would each be compiled anew, while others wait.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,  # (outer, inner, row_size)
    residual_ptr,  # (outer, inner, row_size), or not read
    weight_ptr,  # (weight_rows, row_size), contiguous
    out_ptr,  # (outer * inner, row_size), contiguous
    total_ptr,  # like out: x + residual, or not written
    x_outer_stride,
    x_inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    num_rows,
    inner,
    weight_rows,
    row_size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    there = (rows < num_rows)[:, None] & (columns < row_size)[None, :]
    outer, within = rows // inner, rows % inner
    x_offsets = (outer * x_outer_stride + within * x_inner_stride)[:, None] + columns[None, :]
    x = tl.load(x_ptr + x_offsets, mask=there, other=0.0).to(tl.float32)
    out_offsets = (rows * row_size)[:, None] + columns[None, :]
    if HAS_RESIDUAL:
        residual_offsets = (outer * residual_outer_stride + within * residual_inner_stride)[:, None] + columns[None, :]
        x += tl.load(residual_ptr + residual_offsets, mask=there, other=0.0).to(tl.float32)
        # Later layers add to what is stored: the norm is of the rounded sum.
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + out_offsets, rounded, mask=there)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / row_size + eps)
    weight_offsets = ((rows % weight_rows) * row_size)[:, None] + columns[None, :]
    weight = tl.load(weight_ptr + weight_offsets, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_offsets, (x * scale[:, None] * weight).to(out_ptr.dtype.element_ty), mask=there)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, eps, out, total)
    return out, total


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, total: Tensor | None) -> None:
    if x.numel() == 0:
        return
    rows, added = _as_rows(x), None if residual is None else _as_rows(residual)
    outer, inner, row_size = rows.shape
    tile = row_tile(num_rows=outer * inner, row_size=row_size, num_sms=num_sms(x))
    _rms_norm_kernel[(triton.cdiv(outer * inner, tile.rows),)](
        rows,
        added,
        weight.contiguous(),
        out,
        total,
        rows.stride(0),
        rows.stride(1),
        0 if added is None else added.stride(0),
        0 if added is None else added.stride(1),
        outer * inner,
        inner,
        weight.numel() // row_size,
        row_size,
        eps,
        HAS_RESIDUAL=added is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
    )


def _as_rows(x: Tensor) -> Tensor:
    """(outer, inner, row size) with rows in one piece; copied only where rows are not."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])


def shipped() -> Iterator[Variant]:
    """Hidden sizes of small and large models, and heads of one."""
    for dtype in FLOATS:
        for num_rows, row_size in ((4096, 128), (4096, 1024), (4096, 4096), (4096, 8192)):
            for has_residual in (False, True):
                tile = row_tile(num_rows=num_rows, row_size=row_size, num_sms=132)
                yield _variant(dtype, tile, has_residual=has_residual)


def _variant(dtype: torch.dtype, tile: RowTile, *, has_residual: bool) -> Variant:
    tensors = ["x_ptr", "weight_ptr", "out_ptr", *(("residual_ptr", "total_ptr") if has_residual else ())]
    wide = ("x_outer_stride", "x_inner_stride", "residual_outer_stride", "residual_inner_stride")
    signature = dict.fromkeys(tensors, pointer(dtype)) | dict.fromkeys(wide, "i64")
    signature |= dict.fromkeys(("num_rows", "inner", "weight_rows", "row_size"), "i32") | {"eps": "fp32"}
    constants = {"HAS_RESIDUAL": has_residual, "ROWS": tile.rows, "COLUMNS": tile.columns}
    absent = {} if has_residual else {"residual_ptr": None, "total_ptr": None}
    kind = "add_rms_norm" if has_residual else "rms_norm"
    name = f"{kind} {str(dtype).removeprefix('torch.')} {tile.rows}x{tile.columns}"
    return Variant(
        name=name,
        kernel=_rms_norm_kernel,
        signature=signature,
        constants=constants | absent,
        num_warps=tile.num_warps,
    )
