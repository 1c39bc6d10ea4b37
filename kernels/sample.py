"""Drawing a token a row: temperature, min-p, top-k and top-p, without sorting the vocabulary.

    s = logits / temperature,  w = exp(s - max s)
    keep w >= min_p;  of those the k largest;  of those the largest that add up to p of what is left;  ties are kept
    draw: the first token whose cumulated weight passes u of the total

Top-k and top-p are thresholds on s: the highest at which enough tokens, or enough weight, are left. Floats have the
order of their bits, so 32 halvings of an integer find each, and every halving is one pass over a row that the cache
holds. A program takes a row and no other: a draw is the same however many rows there are.

Block sums are float32 and add up in float64, where the reference cumulates in float64 throughout: the two may differ
in draws whose uniform lies within some 1e-6 of the boundary between two tokens, and in cuts as close.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.variants import Variant, pointer

_COLUMNS = 4096
_NUM_WARPS = 16


@triton.jit
def _ordered(scores):
    """Bits whose order as integers is the numbers' own; NaN lies above all."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _scores(row_ptr, start, size, temperature, COLUMNS: tl.constexpr):
    columns = start + tl.arange(0, COLUMNS)
    return tl.load(row_ptr + columns, mask=columns < size, other=float("-inf")) / temperature


@triton.jit
def _left(row_ptr, size, temperature, highest, floor, COLUMNS: tl.constexpr):
    """How many tokens of at least that order are left, and their weight."""
    count = tl.zeros((), tl.int32)
    weight = tl.zeros((), tl.float64)
    for start in range(0, size, COLUMNS):
        scores = _scores(row_ptr, start, size, temperature, COLUMNS)
        kept = (_ordered(scores) >= floor) & (scores > float("-inf"))
        count += tl.sum(kept.to(tl.int32), axis=0)
        weight += tl.sum(tl.where(kept, tl.exp(scores - highest), 0.0), axis=0).to(tl.float64)
    return count, weight


@triton.jit
def _sample_kernel(
    logits_ptr,  # (rows, size) float32
    temperatures_ptr,  # (rows,) float32
    uniforms_ptr,  # (rows,) float64
    top_ks_ptr,  # (rows,) int64, or not read
    top_ps_ptr,  # (rows,) float64, or not read
    min_ps_ptr,  # (rows,) float32, or not read
    drawn_ptr,  # (rows,) int64
    row_stride,
    size,
    IS_LIKELY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperatures_ptr + row)
    highest = tl.full((), float("-inf"), tl.float32)
    for start in range(0, size, COLUMNS):
        highest = tl.maximum(highest, tl.max(_scores(row_ptr, start, size, temperature, COLUMNS), axis=0))

    floor = tl.full((), -2147483648, tl.int32)
    if IS_LIKELY:
        min_p = tl.load(min_ps_ptr + row)
        # Its own order, not that of a logarithm: the weight itself is compared, as in the reference.
        for start in range(0, size, COLUMNS):
            scores = _scores(row_ptr, start, size, temperature, COLUMNS)
            below = tl.where(tl.exp(scores - highest) < min_p, _ordered(scores), -2147483648)
            floor = tl.maximum(floor, tl.max(below, axis=0) + (tl.max(below, axis=0) > -2147483648).to(tl.int32))
        top_k = tl.load(top_ks_ptr + row)
        if top_k > 0:
            low, high = floor.to(tl.int64), _ordered(highest).to(tl.int64) + 1
            while high - low > 1:
                middle = (low + high) // 2
                count, _ = _left(row_ptr, size, temperature, highest, middle.to(tl.int32), COLUMNS)
                enough = count >= top_k
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            floor = low.to(tl.int32)
        top_p = tl.load(top_ps_ptr + row)
        if top_p < 1:
            _, weight = _left(row_ptr, size, temperature, highest, floor, COLUMNS)
            low, high = floor.to(tl.int64), _ordered(highest).to(tl.int64) + 1
            while high - low > 1:
                middle = (low + high) // 2
                _, above = _left(row_ptr, size, temperature, highest, middle.to(tl.int32), COLUMNS)
                enough = above >= top_p * weight
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            floor = low.to(tl.int32)

    _, total = _left(row_ptr, size, temperature, highest, floor, COLUMNS)
    target = tl.load(uniforms_ptr + row) * total
    before = tl.zeros((), tl.float64)
    drawn = tl.full((), -1, tl.int32)
    last = tl.zeros((), tl.int32)
    for start in range(0, size, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        scores = _scores(row_ptr, start, size, temperature, COLUMNS)
        kept = (_ordered(scores) >= floor) & (scores > float("-inf"))
        weights = tl.where(kept, tl.exp(scores - highest), 0.0)
        cumulated = before + tl.cumsum(weights.to(tl.float64), axis=0)
        passing = tl.where((cumulated > target) & (weights > 0), columns, size)
        first = tl.min(passing, axis=0)
        drawn = tl.where((drawn < 0) & (first < size), first, drawn)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, columns, 0), axis=0))
        before += tl.sum(weights, axis=0).to(tl.float64)
    # A uniform just below 1 may pass no sum, for rounding, and a row of NaN passes none: a token it must be.
    tl.store(drawn_ptr + row, tl.where(drawn < 0, last, drawn).to(tl.int64))


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """As `reference.sample`."""
    return _launch(logits, temperatures, uniforms, None)


def sample_likely(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, *, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """As `reference.sample_likely`."""
    return _launch(logits, temperatures, uniforms, (top_ks, top_ps, min_ps))


def _launch(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, likely: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    num_rows, size = logits.shape
    drawn = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return drawn
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    _sample_kernel[(num_rows,)](
        logits,
        temperatures,
        uniforms,
        *((None, None, None) if likely is None else likely),
        drawn,
        logits.stride(0),
        size,
        IS_LIKELY=likely is not None,
        COLUMNS=_COLUMNS,
        num_warps=_NUM_WARPS,
    )
    return drawn


def shipped() -> Iterator[Variant]:
    """With the cuts and without."""
    for is_likely in (False, True):
        cuts = {"top_ks_ptr": torch.int64, "top_ps_ptr": torch.float64, "min_ps_ptr": torch.float32}
        yield Variant(
            name=f"sample{'_likely' if is_likely else ''} float32 {_COLUMNS}",
            kernel=_sample_kernel,
            signature={
                "logits_ptr": pointer(torch.float32),
                "temperatures_ptr": pointer(torch.float32),
                "uniforms_ptr": pointer(torch.float64),
                "drawn_ptr": pointer(torch.int64),
                **({name: pointer(dtype) for name, dtype in cuts.items()} if is_likely else {}),
                "row_stride": "i64",
                "size": "i32",
            },
            constants={
                "IS_LIKELY": is_likely,
                "COLUMNS": _COLUMNS,
                **({} if is_likely else dict.fromkeys(cuts)),
            },
            num_warps=_NUM_WARPS,
        )
