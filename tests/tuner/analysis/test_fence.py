"""A fence nobody told of: recognised where there is one, and never made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.records import stage
from tuner.analysis.fence import fenced_beyond, recognised_fence
from tuner.engine_config import EngineConfig
from tuner.records import StageRecord


def _at_fence(fence: int, load: int, **seen: object) -> StageRecord:
    """What a server with that `max_num_seqs` shows at `load`, KV blocks free."""
    config = EngineConfig(max_num_seqs=fence, max_num_batched_tokens=4096, gpu_memory_utilization=0.9)
    made = stage(config, load).model_copy(update={"num_preemptions": 0, "kv_cache_usage_peak": 0.3})
    return made.model_copy(update=seen)


@given(fence=st.integers(1, 500), factors=st.tuples(st.floats(1.2, 3.0), st.floats(3.5, 9.0)))
def test_running_stands_still_while_waiting_grows(fence: int, factors: tuple[float, float]) -> None:
    """Whoever benches a server that hides its limits learns that the bend is a limit and not the engine."""
    below = [_at_fence(fence, load) for load in {1, fence}]
    loads = {fence + max(1, round((factor - 1) * fence)) for factor in factors}
    past = [_at_fence(fence, load) for load in sorted(loads | {max(loads) + fence})]
    assert recognised_fence([*below, *past]) == fence
    marked = fenced_beyond([*below, *past], fence)
    assert [each.fenced for each in marked] == [each.load > fence for each in marked]


@pytest.mark.parametrize(
    "seen",
    [
        {"kv_cache_usage_peak": 0.99},
        {"num_preemptions": 12},
        {"kv_cache_usage_peak": None},
        {"num_preemptions": None},
        {"mean_waiting": None},
        {"mean_running": None},
        {"peak_running": None},
        {"mean_running": 20.0},
        {"mean_waiting": 1.0},
    ],
)
def test_a_queue_with_another_cause_or_an_unknown_one_is_no_fence(seen: dict[str, object]) -> None:
    """Waiting for KV blocks or for tokens is saturation: calling it a fence would send the user to raise a limit."""
    assert recognised_fence([_at_fence(32, 32), _at_fence(32, 64, **seen), _at_fence(32, 128, **seen)]) is None


def test_one_stage_with_a_queue_is_not_enough() -> None:
    """A single look cannot tell a limit from an engine that happens to run as many."""
    assert recognised_fence([_at_fence(32, 16), _at_fence(32, 64)]) is None
    assert recognised_fence([_at_fence(32, 16), _at_fence(32, 64), _at_fence(32, 64)]) is None


def test_a_number_that_rises_with_load_is_no_fence() -> None:
    """More ran later, so the first limit was none."""
    assert recognised_fence([_at_fence(32, 64), _at_fence(32, 128), _at_fence(64, 256)]) is None


def test_an_engine_without_preemptions_still_has_a_fence() -> None:
    """llama.cpp's slots are its fence: what it has no figure of must not hide that."""
    none = {"num_preemptions": None, "kv_cache_usage_peak": None}
    without = {**none, "not_applicable": ("num_preemptions", "kv_cache_usage_peak")}
    past = [_at_fence(8, load, mean_waiting=load - 8.0, **without) for load in (16, 32)]
    assert recognised_fence([_at_fence(8, 8, **without), *past]) == 8
    assert recognised_fence([stage.model_copy(update={"not_applicable": ()}) for stage in past]) is None
