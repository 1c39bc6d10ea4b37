"""Tensors that give a kernel away which reads what it must not, or leaves something unwritten."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative to the larger of 1 and the number: one rounding more than the reference makes."""


GUARD = 4096
"""Numbers before and behind whatever a kernel writes to."""

MARK = 0x5A
"""What every byte holds that a kernel may not write; unlike a NaN it is told from one."""


def guarded(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Callable[[], bool]]:
    """A tensor of marks between guards, and whether the guards still stand."""
    count = math.prod(shape)
    room = torch.full(((count + 2 * GUARD) * dtype.itemsize,), MARK, dtype=torch.uint8)
    inner = room.view(dtype)[GUARD : GUARD + count].view(*shape)
    edge = GUARD * dtype.itemsize
    return inner, lambda: bool((room[:edge] == MARK).all() and (room[-edge:] == MARK).all())


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """What launchers allocate holds NaN (or the largest integer) until the kernel writes it, and nothing around it."""
    stand: list[Callable[[], bool]] = []

    def filled(shape: int | Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device.type == "cpu"
        inner, stands = guarded([shape] if isinstance(shape, int) else shape, dtype)
        stand.append(stands)
        return inner.fill_(math.nan if dtype.is_floating_point else torch.iinfo(dtype).max)

    with mock.patch.object(torch, "empty", filled):
        yield
    assert all(stands() for stands in stand), "written beyond an output"


def agree(
    kernel: Callable[[], Tensor | tuple[Tensor, ...]], reference: Callable[[], Tensor | tuple[Tensor, ...]]
) -> None:
    """Both give the same numbers within the dtype's tolerance, and nothing is left unwritten."""
    # A sigmoid's exp may overflow, which makes it 0 as it should be; only numpy, which interprets it, minds.
    with poisoned_outputs(), np.errstate(over="ignore"):
        found = kernel()
    expected = reference()
    pairs = zip(_all(found), _all(expected), strict=True)
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        tolerance = TOLERANCE[ours.dtype]
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


def _all(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def padded(tensor: Tensor, *, by: int = 3) -> Tensor:
    """The same numbers as a view into a larger tensor of NaN: whoever ignores strides or a mask meets them."""
    shape = [size + by for size in tensor.shape]
    around = torch.full(shape, math.nan, dtype=tensor.dtype)
    inner = around[tuple(slice(size) for size in tensor.shape)]
    inner.copy_(tensor)
    return inner
