"""Gated activations of a gate and an up projection that lie side by side, (T, 2 I) = gate | up.

silu(g) u = g sigmoid(g) u                                   (Shazeer 2020, arXiv:2002.05202)
gelu(g) u = g sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3)) u   (tanh's approximation, as a sigmoid)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import element_tile
from kernels.variants import FLOATS, Variant, pointer


@triton.jit
def _gated_kernel(
    gate_up_ptr,  # (tokens, 2 size)
    out_ptr,  # (tokens, size), contiguous
    token_stride,
    size,
    IS_GELU: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < size
    row = gate_up_ptr + token * token_stride
    gate = tl.load(row + columns, mask=there, other=0.0).to(tl.float32)
    up = tl.load(row + size + columns, mask=there, other=0.0).to(tl.float32)
    bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    gated = gate * tl.sigmoid(bent) * up
    tl.store(out_ptr + token * size + columns, gated.to(out_ptr.dtype.element_ty), mask=there)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `reference.silu_mul`."""
    return _launch(gate_up, is_gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """As `reference.gelu_tanh_mul`."""
    return _launch(gate_up, is_gelu=True)


def _launch(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    tile = element_tile(size)
    _gated_kernel[(num_tokens, triton.cdiv(size, tile.columns))](
        gate_up,
        out,
        gate_up.stride(0),
        size,
        IS_GELU=is_gelu,
        COLUMNS=tile.columns,
        num_warps=tile.num_warps,
    )
    return out


def shipped() -> Iterator[Variant]:
    """Both activations, at the one tile of wide rows."""
    tile = element_tile(14336)
    for dtype in FLOATS:
        for is_gelu, name in ((False, "silu_mul"), (True, "gelu_tanh_mul")):
            yield Variant(
                name=f"{name} {str(dtype).removeprefix('torch.')} {tile.columns}",
                kernel=_gated_kernel,
                signature={
                    "gate_up_ptr": pointer(dtype),
                    "out_ptr": pointer(dtype),
                    "token_stride": "i64",
                    "size": "i32",
                },
                constants={"IS_GELU": is_gelu, "COLUMNS": tile.columns},
                num_warps=tile.num_warps,
            )
