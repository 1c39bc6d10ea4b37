"""Projections, `y = x W^T + b`, whose weights are laid out once for the matrix product that runs.

torch multiplies float32 on a CPU with MKL, which takes a slow path on processors that are not Intel's: half the speed
of oneDNN on an AMD EPYC with AVX-512, at any number of rows above three. oneDNN wants the weight in blocks of its own.
The ops for it are the ones that Inductor emits, and not public: where a torch has them not, or they compute something
else, everything goes through `F.linear`.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

_PACKED_FOR_ROWS = 32
"""What oneDNN is told to expect; it blocks weights alike for all numbers of rows but one, and runs them with any."""


class Linear:
    """A projection; holds its weight in one form only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack a weight (outputs, inputs); it is not kept. `bias` is (outputs,)."""
        self.bias = bias
        self._is_packed = is_packed(weight.dtype, weight.device)
        self._weight = _pack(weight) if self._is_packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, inputs) to (rows, outputs)."""
        if self._is_packed:
            return _packed_product(x, self._weight, self.bias)
        return F.linear(x, self._weight, self.bias)

    @property
    def weight(self) -> Tensor:
        """(outputs, inputs): the weight itself where it is not packed, else a plain copy."""
        return self._weight.to_dense() if self._is_packed else self._weight

    def holds(self, weight: Tensor) -> bool:
        """Whether this very tensor is what it multiplies with."""
        return self._weight is weight

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias; what oneDNN pads odd shapes with is not counted."""
        return self._weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def is_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this kind are packed."""
    return device.type == "cpu" and dtype == torch.float32 and has_packed_product()


@functools.cache
def has_packed_product() -> bool:
    """Whether this torch multiplies with packed weights, and rightly."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x, bias = torch.eye(3, 2), torch.tensor([[2.0, 3.0]]), torch.ones(3)
    try:
        product = _packed_product(x, _pack(weight), bias)
    except (AttributeError, RuntimeError):  # no such op here, or one that takes other arguments
        return False
    return product.tolist() == [[3.0, 4.0, 1.0]]


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)  # noqa: SLF001
    return packed


def _packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
    return product
