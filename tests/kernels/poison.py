"""Tensors that give a kernel away which reads what it must not, or leaves something unwritten."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative to the larger of 1 and the number: one rounding more than the reference makes."""


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """What launchers allocate holds NaN (or the largest integer) until the kernel writes it."""
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> Tensor:
        tensor: Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(math.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max)

    with mock.patch.object(torch, "empty", filled):
        yield


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
