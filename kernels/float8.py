"""Float8 e4m3 in integer arithmetic, the same bits on every chip: Ampere has no instruction for it.

A number is sign, four bits of exponent with bias 7, three of mantissa; the largest is 448, the only NaN all ones
(Micikevicius et al. 2022, arXiv:2209.05433).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_float8(x):
    """Bits (uint8) of float32 numbers, rounded to the nearest, ties to even; beyond ±448 cut off; NaN stays."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)  # 448
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 a step is 2^-9: adding 2^14 leaves whole steps in the last bits of a float32.
    shifted = size.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)  # 2^-6
    return (sign | tl.where(is_nan, 0x7F, code)).to(tl.uint8)


@triton.jit
def from_float8(code):
    """Float32 numbers of bits (uint8): as a float16, whose exponent has a bias of 15, each is 2^-8 of itself."""
    wide = code.to(tl.int16)
    halves = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), halves.to(tl.float32) * 256.0)
