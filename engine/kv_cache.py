"""The KV cache as the model sees it: blocks of every layer in one tensor, and what its numbers are to be multiplied by.

With `kv_cache_dtype="fp8"` keys and values are stored as float8 e4m3 (3 bits of mantissa, ±448): a quarter of float32.
Each layer has a scale for its keys and one for its values, found at start from what the model makes of random tokens.
A fixed 1.0, vLLM's default, cuts off the keys of models whose projections have large biases (Qwen 2); and as floating
point is as fine for large numbers as for small ones, the room left above what was seen costs nothing. Scales are powers
of two, which add no rounding of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import FP8, FP8_MAX

FP8_HEADROOM = 8.0
"""How many times the largest number seen at start is still stored as it is; beyond, it is cut off."""


@dataclass(frozen=True, slots=True)
class KvScales:
    """What one layer's stored numbers are multiplied by when they are read."""

    key: float = 1.0
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's cache."""

    keys: Tensor
    """(blocks, block size, key/value heads, head size)"""

    values: Tensor
    """Like `keys`."""

    scales: KvScales


@dataclass(frozen=True, slots=True)
class KvCache:
    """All layers' caches."""

    data: Tensor
    """(layers, 2, blocks, block size, key/value heads, head size): keys, values."""

    scales: tuple[KvScales, ...]
    """For each layer; ones unless `data` is float8."""

    def layers(self) -> Iterator[LayerKv]:
        """One after the other."""
        for layer, scales in zip(self.data.unbind(), self.scales, strict=True):
            yield LayerKv(keys=layer[0], values=layer[1], scales=scales)

    def scales_for_fp8(self) -> tuple[KvScales, ...]:
        """Scales under which float8 holds what is in this cache, and `FP8_HEADROOM` times that."""
        largest: list[list[float]] = self.data.abs().amax((2, 3, 4, 5)).tolist()
        return tuple(KvScales(*(_scale(number) for number in layer)) for layer in largest)


def new_kv_cache(shape: tuple[int, ...], scales: tuple[KvScales, ...], dtype: torch.dtype, like: Tensor) -> KvCache:
    """A cache on the device of `like`, every page of it touched."""
    bits = torch.zeros(shape, dtype=torch.uint8 if dtype == FP8 else dtype, device=like.device)
    return KvCache(bits.view(dtype), scales)


def _scale(largest: float) -> float:
    if not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** math.ceil(math.log2(largest * FP8_HEADROOM / FP8_MAX))
