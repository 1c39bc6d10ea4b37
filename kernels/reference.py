"""The torch oracle: every op the engine computes with, in plain torch, on any device.

A kernel of the same name and signature must agree with these. Sums and norms are taken in float32
whatever the inputs' dtype; results come back in the inputs' dtype. Shapes use these letters:

    T tokens of the step        R requests of the step      H hidden size       D head size
    Q query heads               K key/value heads           N KV blocks         S tokens a block holds
    M columns of a block table  V vocabulary
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

DECODE_GROUP_TOKENS = 4096
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
        cos: (T, 1, D / 2) float32, of `position x inverse_frequency`.
        sin: (T, 1, D / 2) float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


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


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of every request's new tokens over its whole context, chunked prefill and decode mixed.

    Request r's queries are rows [query_starts[r], query_starts[r + 1]) and stand at the end of its context, so
    that query i of n sees positions [0, context - n + i]:  `softmax(q k^T scale) v`, query head h reading
    key/value head `h // (Q / K)`. Only slots inside a request's context are read: what lies in unused slots, and
    in unused columns of a block table, is never touched.

    Args:
        query: (T, Q, D).
        key_cache: (N, S, K, D), the step's own keys already written; `value_cache` alike.
        block_tables: (R, M) int32; position p of request r lives in block `block_tables[r, p // S]`.
        context_lens: (R,) int32, tokens computed before plus those of this step; none is 0.
        query_starts: (R + 1,) int32.
        scale: usually `D ** -0.5`.

    Returns:
        (T, Q, D).
    """
    out = torch.empty_like(query)
    starts: list[int] = query_starts.tolist()
    contexts: list[int] = context_lens.tolist()
    decodes: list[int] = []
    for request, (start, stop, context) in enumerate(zip(starts, starts[1:], contexts, strict=False)):
        if stop - start == 1:
            decodes.append(request)
            continue
        slots = _slots(block_tables[request : request + 1], context_lens[request : request + 1], context, key_cache)
        key, value = _gather(key_cache, slots), _gather(value_cache, slots)
        out[start:stop] = _attend_chunk(query[start:stop], key, value, scale)
    for group in _groups_of_like_length(decodes, contexts):
        rows = torch.tensor(group, device=query.device)
        tokens = query_starts.index_select(0, rows)
        lens = context_lens.index_select(0, rows)
        longest = contexts[group[0]]
        slots = _slots(block_tables.index_select(0, rows), lens, longest, key_cache)
        key, value = _gather(key_cache, slots), _gather(value_cache, slots)
        out[tokens] = _attend_decodes(query.index_select(0, tokens), key, value, lens, scale)
    return out


def _groups_of_like_length(requests: list[int], contexts: list[int]) -> list[list[int]]:
    """Longest first, cut into groups that pad to at most `DECODE_GROUP_TOKENS`, one request at the least."""
    ordered = sorted(requests, key=contexts.__getitem__, reverse=True)
    groups = []
    while ordered:
        size = max(1, DECODE_GROUP_TOKENS // contexts[ordered[0]])
        groups.append(ordered[:size])
        ordered = ordered[size:]
    return groups


def _slots(block_tables: Tensor, context_lens: Tensor, longest: int, cache: Tensor) -> Tensor:
    """Slot of each position, (R, longest) int64; past its context a request repeats its last position."""
    block_size = cache.shape[1]
    positions = torch.arange(longest, device=cache.device)
    positions = torch.minimum(positions, context_lens.unsqueeze(1) - 1)
    blocks = block_tables.gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """The cache's rows at `slots` (R, L): (R, K, L, D)."""
    rows = cache.flatten(0, 1).flatten(1).index_select(0, slots.flatten())
    return rows.view(*slots.shape, *cache.shape[2:]).transpose(1, 2)


def _attend_chunk(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One request's chunk: query (n, Q, D) over key and value (1, K, context, D)."""
    length, context = query.shape[0], key.shape[2]
    causal = context == length
    mask = None
    if not causal:
        mask = torch.ones(length, context, dtype=torch.bool, device=query.device).tril_(context - length)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0), key, value, mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)


def _attend_decodes(query: Tensor, key: Tensor, value: Tensor, context_lens: Tensor, scale: float) -> Tensor:
    """One query a request, (R, Q, D), over padded key and value (R, K, L, D); heads of a group share one read."""
    requests, _, head_dim = query.shape
    grouped = query.view(requests, key.shape[1], -1, head_dim)
    inside = torch.arange(key.shape[2], device=query.device) < context_lens.unsqueeze(1)
    out = F.scaled_dot_product_attention(grouped, key, value, inside[:, None, None, :], scale=scale)
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
    drawn = torch.searchsorted(cumulated, targets, right=True).squeeze(1)
    return torch.where(greedy, logits.argmax(-1), drawn)
