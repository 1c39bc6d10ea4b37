"""The seam between model and kernels: where a step's tokens are written and what they attend to."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from engine.kv_cache import LayerKv
from kernels.cpu_attention import AttentionPlan, cpu_attention, plan_attention
from kernels.dispatch import kv_write, paged_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """What every layer's attention needs to know of one step; T tokens, R requests, M columns."""

    slots: Tensor
    """(T,) int64: where each token's key and value go, `block x block_size + offset`."""

    block_tables: Tensor
    """(R, M) int32."""

    context_lens: Tensor
    """(R,) int32: tokens computed before this step plus those of this step."""

    query_starts: Tensor
    """(R + 1,) int32: request r's tokens are rows [query_starts[r], query_starts[r + 1])."""

    cpu_plans: dict[int | None, AttentionPlan] = field(default_factory=dict)
    """By window: what the first layer of that window planned on a CPU, for the layers after it."""

    def cpu_plan(self, key_cache: Tensor, *, num_heads: int, window: int | None) -> AttentionPlan:
        """How layers of this window compute the step; all have caches of equal shape."""
        plan = self.cpu_plans.get(window)
        if plan is None:
            plan = plan_attention(
                self.block_tables,
                self.context_lens,
                self.query_starts,
                key_cache=key_cache,
                num_heads=num_heads,
                window=window,
            )
            self.cpu_plans[window] = plan
        return plan


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv: LayerKv,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Write the step's keys and values into one layer's cache, then attend over what is stored there.

    Args:
        query: (T, query heads, head size); `key` and `value` (T, key/value heads, head size).
        window: how many positions back a token sees, itself included; None is all.

    Returns:
        Shaped like `query`.
    """
    scales = kv.scales
    kv_write(key, value, kv.keys, kv.values, inputs.slots, scales.key, scales.value)
    if query.is_cpu:
        plan = inputs.cpu_plan(kv.keys, num_heads=query.shape[1], window=window)
        return cpu_attention(query, kv.keys, kv.values, scale, plan, scales.key, scales.value)
    tables, lens, starts = inputs.block_tables, inputs.context_lens, inputs.query_starts
    return paged_attention(query, kv.keys, kv.values, tables, lens, starts, scale, window, scales.key, scales.value)
