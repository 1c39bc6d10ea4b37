"""The batch sizes that an engine captures graphs for, and so the fences it serves well. Pure.

The largest batches that a fence off this grid admits have no graph of their own size, and each of their steps is slower
by up to several times (vLLM: `_set_cudagraph_sizes` of `vllm/config/vllm.py`). A load that was measured under a larger
fence does not show it: there the batch was padded to the next size up.
"""

from __future__ import annotations

from tuner.records import Measured, StageRecord

COARSEST_STEP = 16
"""Between two neighbours of the grid there are no more requests than that."""

_SMALLEST = (4, 2, 1)
_FINE_STEP, _FINE_TO = 8, 256


def grid_floor(load: float) -> int:
    """The largest of 1, 2, 4, multiples of 8 up to 256 and of 16 above that is not above `load`.

    Raises:
        ValueError: below 1, where there is none.
    """
    if load < 1:
        raise ValueError(f"no graph is captured for {load} requests")
    if load < _FINE_STEP:
        return next(size for size in _SMALLEST if size <= load)
    step = _FINE_STEP if load < _FINE_TO else COARSEST_STEP
    return int(load) // step * step


def is_on_grid(load: float) -> bool:
    """Whether a batch of so many requests has a graph of its own size."""
    return load >= 1 and grid_floor(load) == load


def stages_to_stand_on(outcome: Measured) -> list[StageRecord]:
    """The stages whose load may become a fence: those on the grid, or all where the engine captures no graphs."""
    return [stage for stage in outcome.stages if not outcome.facts.may_capture_graphs or is_on_grid(stage.load)]
