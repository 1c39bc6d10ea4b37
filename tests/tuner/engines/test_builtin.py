"""What the tuner states of the built-in engine without asking it."""

from __future__ import annotations

from engine.config import EngineConfig
from tuner.engines import builtin


def test_the_defaults_are_those_of_the_engine() -> None:
    """A recommendation is compared with what a user gets unasked; a stale default would misstate the gain."""
    asked = EngineConfig(model="m")
    stated = builtin.DEFAULTS
    assert (stated.max_num_seqs, stated.max_num_batched_tokens, stated.gpu_memory_utilization) == (
        asked.max_num_seqs,
        asked.max_num_batched_tokens,
        asked.gpu_memory_utilization,
    )
