"""The torch oracle: every op the engine computes with, in plain torch, on any device.

A kernel of the same name and signature must agree with these. Sums and norms are taken in float32
whatever the inputs' dtype; results come back in the inputs' dtype. Shapes use these letters:

    T tokens of the step        R requests of the step      H hidden size       D head size
    Q query heads               K key/value heads           N KV blocks         S tokens a block holds
    M columns of a block table  V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

DECODE_GROUP_TOKENS = 1024
"""Most context tokens gathered at once for decodes: larger copies fall out of a core's cache. Unit: tokens."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last axis: `x / sqrt(mean(x^2) + eps) * weight`.

    Args:
        x: (..., H) or, for the heads of queries and keys, (T, Q + K, D).
        weight: anything that broadcasts to `x`: (H,), or (Q + K, D) for a weight per head.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, then norm: returns `(rms_norm(x + residual), x + residual)`, each (T, H)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's halves (a, b) by the token's angles: `(a cos - b sin, b cos + a sin)`.

    Args:
        x: (T, heads, D), queries and keys alike.
        cos: (T, 1, D) float32, of `position x inverse_frequency`, the D / 2 values twice.
        sin: (T, 1, D) float32, likewise, the first half negated.
    """
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Gated activation: `silu(gate) * up` of (T, 2 I) = gate | up; returns (T, I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store each token's key and value at its slot: `cache[slot // S, slot % S] = row`.

    Args:
        key: (T, K, D); `value` alike.
        key_cache: (N, S, K, D), written in place; `value_cache` alike.
        slots: (T,) int64, distinct.
    """
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """A part of a step's attention that is computed at once: one request's chunk, or a run of decodes."""

    queries: slice
    """The part's rows of the step's T tokens."""

    slots: Tensor
    """(requests, L) int64: where each position's key and value are; past its context a request repeats its last."""

    mask: Tensor | None
    """Added to the scores: 0 or -inf. (n, L) for a chunk of n tokens, (requests, 1, 1, L) for decodes.

    None where plain causal masking (chunk) or no masking (decodes) is right."""

    is_chunk: bool


def plan_gathers(
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    *,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
) -> tuple[Gather, ...]:
    """Cut a step into gathers; layers of one window use the same.

    Arguments are those of `paged_attention`; `dtype` is the query's.

    Decodes that follow each other share a gather while it pads to at most `DECODE_GROUP_TOKENS`: it is cheapest
    where they come sorted by context length.
    """
    starts: list[int] = query_starts.tolist()
    contexts: list[int] = context_lens.tolist()
    gathers = []
    first = 0
    while first < len(contexts):
        is_chunk = starts[first + 1] - starts[first] > 1
        last, longest = first + 1, contexts[first]
        while not is_chunk and last < len(contexts) and starts[last + 1] - starts[last] == 1:
            padded = max(longest, contexts[last])
            if padded * (last + 1 - first) > DECODE_GROUP_TOKENS:
                break
            last, longest = last + 1, padded
        lens = context_lens[first:last].unsqueeze(1)
        positions = torch.arange(longest, device=lens.device)
        inside = torch.minimum(positions, lens - 1)
        blocks = block_tables[first:last].gather(1, inside // block_size)
        queries = slice(starts[first], starts[last])
        num_queries = queries.stop - queries.start
        mask = None
        is_narrow = window is not None and longest > window
        if is_chunk and (longest > num_queries or is_narrow):
            seen = torch.ones(num_queries, longest, dtype=torch.bool, device=lens.device).tril_(longest - num_queries)
            if window is not None:
                seen = seen.triu_(longest - num_queries - window + 1)
            mask = _additive(seen, dtype)
        elif not is_chunk and (min(contexts[first:last]) < longest or is_narrow):
            visible = positions < lens
            if window is not None:
                visible &= positions >= lens - window
            mask = _additive(visible[:, None, None, :], dtype)
        slots = blocks * block_size + inside % block_size
        gathers.append(Gather(queries=queries, slots=slots, mask=mask, is_chunk=is_chunk))
        first = last
    return tuple(gathers)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    scale: float,
    window: int | None = None,
    gathers: tuple[Gather, ...] | None = None,
) -> Tensor:
    """Causal attention of every request's new tokens over its whole context, chunked prefill and decode mixed.

    Request r's queries are rows [query_starts[r], query_starts[r + 1]) and stand at the end of its context, so
    that query i of n sees positions [0, context - n + i]:  `softmax(q k^T scale) v`, query head h reading
    key/value head `h // (Q / K)`. With a window, a query does not see positions at or before its own less `window`.
    Only slots inside a request's context are read: what lies in unused slots, and in unused columns of a block table,
    is never touched.

    Args:
        query: (T, Q, D).
        key_cache: (N, S, K, D), the step's own keys already written; `value_cache` alike.
        block_tables: (R, M) int32; position p of request r lives in block `block_tables[r, p // S]`.
        context_lens: (R,) int32, tokens computed before plus those of this step; none is 0.
        query_starts: (R + 1,) int32.
        scale: usually `D ** -0.5`.
        window: positions a token sees, itself included; None is all.
        gathers: `plan_gathers` of the three before, where the caller keeps it for all layers.

    Returns:
        (T, Q, D).
    """
    if gathers is None:
        block_size = key_cache.shape[1]
        gathers = plan_gathers(
            block_tables, context_lens, query_starts, block_size=block_size, dtype=query.dtype, window=window
        )
    parts = []
    for gather in gathers:
        key, value = _gather(key_cache, gather.slots), _gather(value_cache, gather.slots)
        attend = _attend_chunk if gather.is_chunk else _attend_decodes
        parts.append(attend(query[gather.queries], key, value, gather.mask, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """The cache's rows at `slots` (R, L): (R, K, L, D)."""
    rows = cache.flatten(0, 1).flatten(1).index_select(0, slots.flatten())
    return rows.view(*slots.shape, *cache.shape[2:]).transpose(1, 2)


def _attend_chunk(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One request's chunk: query (n, Q, D) over key and value (1, K, L, D)."""
    query = query.transpose(0, 1).unsqueeze(0)
    out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def _attend_decodes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One query a request, (R, Q, D), over key and value (R, K, L, D); the heads that share a key are its queries."""
    requests, _, head_dim = query.shape
    grouped = query.reshape(requests, key.shape[1], -1, head_dim)
    out = F.scaled_dot_product_attention(grouped, key, value, mask, scale=scale)
    return out.reshape(requests, -1, head_dim)


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token a row by inverting the distribution: the first token whose cumulated probability passes `uniform`.

    A row's draw depends on its own logits, temperature and uniform only.

    Args:
        logits: (R, V) float32.
        temperatures: (R,) float32; 0 takes the most likely token.
        uniforms: (R,) float64 in [0, 1).

    Returns:
        (R,) int64.
    """
    greedy = temperatures == 0
    scaled = logits / temperatures.masked_fill(greedy, 1.0).unsqueeze(1)
    cumulated = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
    targets = uniforms.unsqueeze(1) * cumulated[:, -1:]
    # A uniform one step below 1 can round up to the total, which no entry passes.
    drawn = torch.searchsorted(cumulated, targets, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    return torch.where(greedy, logits.argmax(-1), drawn)
