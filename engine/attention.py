"""The seam between model and kernels: where a step's tokens are written and what they attend to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kernels.reference import Gather, kv_write, paged_attention


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

    gathers: Mapping[int | None, tuple[Gather, ...]]
    """The reference kernels' plan for those tables and lengths, by the window of the layers it is for."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Write the step's keys and values into one layer's cache, then attend over it.

    Args:
        query: (T, query heads, head size); `key` and `value` (T, key/value heads, head size).
        kv_cache: (2, blocks, block size, key/value heads, head size): keys, values.
        window: how many positions back a token sees, itself included; None is all.

    Returns:
        Shaped like `query`.
    """
    key_cache, value_cache = kv_cache.unbind()
    kv_write(key, value, key_cache, value_cache, inputs.slots)
    return paged_attention(
        query,
        key_cache,
        value_cache,
        inputs.block_tables,
        inputs.context_lens,
        inputs.query_starts,
        scale,
        window,
        inputs.gathers[window],
    )
