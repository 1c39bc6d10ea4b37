"""The one place that asks what a tensor lies on: Triton's kernels on CUDA, the reference elsewhere.

Triton is only imported where there is a GPU: it takes a moment, and nothing on a CPU needs it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace

from torch import Tensor

from kernels import reference

_FILES = {
    "rms_norm": ("rms_norm", "add_rms_norm"),
    "rope": ("rotary_embedding",),
    "silu_mul": ("silu_mul", "gelu_tanh_mul"),
    "kv_write": ("kv_write",),
    "paged_attention": ("paged_attention",),
    "sample": ("sample", "sample_likely"),
}
"""Which kernel's file has which op."""


@cache
def _triton() -> SimpleNamespace:
    found: dict[str, object] = {}
    for file, names in _FILES.items():
        module = import_module(f"kernels.{file}")
        found |= {name: getattr(module, name) for name in names}
    return SimpleNamespace(**found)


def _ops(tensor: Tensor) -> SimpleNamespace | ModuleType:
    return _triton() if tensor.is_cuda else reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    return _ops(x).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    return _ops(x).add_rms_norm(x, residual, weight, eps)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `reference.rotary_embedding`."""
    return _ops(x).rotary_embedding(x, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    return _ops(gate_up).silu_mul(gate_up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """See `reference.gelu_tanh_mul`."""
    return _ops(gate_up).gelu_tanh_mul(gate_up)


def kv_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """See `reference.kv_write`."""
    _ops(key).kv_write(key, value, key_cache, value_cache, slots, key_scale, value_scale)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    scale: float,
    window: int | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """See `reference.paged_attention`."""
    steps = (block_tables, context_lens, query_starts)
    return _ops(query).paged_attention(query, key_cache, value_cache, *steps, scale, window, key_scale, value_scale)


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """See `reference.sample`."""
    return _ops(logits).sample(logits, temperatures, uniforms)


def sample_likely(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, *, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """See `reference.sample_likely`."""
    return _ops(logits).sample_likely(logits, temperatures, uniforms, top_ks=top_ks, top_ps=top_ps, min_ps=min_ps)
