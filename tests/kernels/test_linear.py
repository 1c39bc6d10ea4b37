"""Projections: the same product whether the weight is packed or not, and one copy of it in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from kernels import linear
from kernels.linear import Linear, has_packed_product

SHAPES = [(1, 1), (123, 257), (64, 48)]


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def is_packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways a torch may offer; the packed one only where this torch has it."""
    packed = bool(request.param)
    if packed and not has_packed_product():
        pytest.skip("this torch multiplies with no packed weights")
    monkeypatch.setattr(linear, "has_packed_product", lambda: packed)
    return packed


@pytest.mark.usefixtures("is_packed")
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 33, 257])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_projection_is_the_product_with_its_weight(outputs: int, inputs: int, rows: int, *, with_bias: bool) -> None:
    """A model answers the same on every build of torch."""
    weight, x = _normal(outputs, inputs), _normal(rows, inputs, seed=1)
    bias = _normal(outputs, seed=2) if with_bias else None

    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(Linear(weight, bias)(x).double(), expected, atol=1e-4, rtol=1e-4)


def test_a_weight_comes_back_as_it_was(is_packed: bool) -> None:  # noqa: FBT001 - a fixture
    """Packing loses nothing, and only a packed weight is a copy."""
    weight = _normal(123, 257)
    projection = Linear(weight, None)

    assert torch.equal(projection.weight, weight)
    assert projection.holds(weight) == (not is_packed)


@pytest.mark.usefixtures("is_packed")
def test_a_projection_counts_its_weight_once() -> None:
    """The memory budget charges what is there: the packed weight or the plain one, and the bias."""
    assert Linear(_normal(64, 48), _normal(64)).nbytes == 4 * (64 * 48 + 64)


def test_half_precision_is_not_packed() -> None:
    """What oneDNN would compute in another dtype goes the plain way."""
    weight = _normal(64, 48).bfloat16()

    assert Linear(weight, None).holds(weight)


def test_a_torch_whose_ops_have_changed_is_used_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops are not public: an engine still starts where they are gone or take other arguments."""

    def gone(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mkldnn::_reorder_linear_weight() takes 3 positional arguments")

    monkeypatch.setattr(linear, "_pack", gone)

    assert not has_packed_product.__wrapped__()
