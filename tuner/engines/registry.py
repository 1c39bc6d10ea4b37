"""The engines there are, by name."""

from __future__ import annotations

from tuner.engines.adapter import EngineAdapter
from tuner.engines.builtin import BUILTIN
from tuner.engines.vllm import VLLM
from tuner.job import EngineSpec

_ADAPTERS: dict[str, EngineAdapter] = {BUILTIN.name: BUILTIN, VLLM.name: VLLM}


def adapter_of(spec: EngineSpec) -> EngineAdapter:
    """How to launch and to read the engine that a job names."""
    return _ADAPTERS[spec.name]
