"""vLLM's own description of its configuration, as `/server_info` and the probe show it, in the tuner's names. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.engine_config import EngineConfig, Setting

_PARTS = ("model_config", "cache_config", "parallel_config", "scheduler_config")


def parameters(config: Mapping[str, Any]) -> dict[str, Setting]:
    """The engine parameters in force, by the names of `EngineConfig`; one that is left unset is not there."""
    told: dict[str, Any] = {}
    for part in _PARTS:
        told |= _part(config, part)
    told |= {"kv_cache_dtype": told.get("cache_dtype"), "dtype": str(told.get("dtype")).removeprefix("torch.")}
    return {
        name: told[name]
        for name in EngineConfig.model_fields
        if isinstance(told.get(name), Setting) and told[name] != "None"
    }


def device_of(config: Mapping[str, Any]) -> str:
    """What it computes on: `cpu`, `cuda`."""
    device = str(_part(config, "device_config").get("device") or _part(config, "device_config").get("device_type"))
    return device.partition(":")[0]


def captures_graphs(config: Mapping[str, Any]) -> bool | None:
    """Whether decode steps run from captured graphs; None where the config does not say."""
    if device_of(config) == "cpu" or _part(config, "model_config").get("enforce_eager") is True:
        return False
    mode = _part(config, "compilation_config").get("cudagraph_mode")
    return None if mode is None else mode not in (0, "0", "NONE", "CUDAGraphMode.NONE")


def _part(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = config.get(name)
    return part if isinstance(part, dict) else {}
