"""The sizes that graphs are captured for: fences off them are slower than anything that was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.executor.graph_sizes import graph_sizes
from tuner.analysis.graph_grid import COARSEST_STEP, grid_floor, is_on_grid


@pytest.mark.parametrize(
    ("load", "size"),
    [
        *((1, 1), (3, 2), (7, 4), (8, 8), (15, 8), (97, 96), (98.8, 96), (100, 96), (104, 104)),
        *((255, 248), (256, 256), (271, 256), (272, 272), (1023, 1008)),
    ],
)
def test_the_grid_is_1_2_4_then_eights_to_256_then_sixteens(load: float, size: int) -> None:
    """A fence is lowered to the next size that has a graph, and no further."""
    assert grid_floor(load) == size


@given(st.integers(1, 512))
def test_it_is_what_the_engine_captures(load: int) -> None:
    """The tuner and the device that is rehearsed agree on which sizes are fast."""
    assert grid_floor(load) == max(graph_sizes(load))
    assert is_on_grid(load) == (load in graph_sizes(512))


@given(st.integers(1, 10**15))
def test_a_size_with_a_graph_is_never_far(load: int) -> None:
    """Rounding down costs less than a step of the grid, and rounding twice nothing."""
    assert load - COARSEST_STEP < grid_floor(load) <= load
    assert is_on_grid(grid_floor(load))


def test_no_requests_have_no_size() -> None:
    """A load below one is a bug of the caller."""
    assert not is_on_grid(0.5)
    with pytest.raises(ValueError, match=r"0\.5 requests"):
        grid_floor(0.5)
