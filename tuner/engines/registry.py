"""The engines there are, by name."""

from __future__ import annotations

from tuner.engines.adapter import EngineAdapter
from tuner.engines.builtin import BUILTIN
from tuner.engines.command import CommandEngine
from tuner.engines.vllm import VLLM
from tuner.job import EngineSpec

_ADAPTERS: dict[str, EngineAdapter] = {BUILTIN.name: BUILTIN, VLLM.name: VLLM}


def adapter_of(spec: EngineSpec) -> EngineAdapter:
    """How to launch and to read the engine that a job names, by its own code or by its definition."""
    if spec.definition is not None:
        return CommandEngine(definition=spec.definition, device=spec.device)
    return _ADAPTERS[spec.name]
