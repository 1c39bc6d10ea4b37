"""The built-in engine: vLLM V1 semantics on torch, behind an OpenAI-compatible server or, as `LLM`, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> object:
    """Import `LLM` when it is asked for: who reads only the engine's policy files waits for nothing else."""
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
