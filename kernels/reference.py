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
        weight: anything that broadcasts to `x`: (H,), or (Q + K, D) for a weight per head. The product is taken in
            its dtype: that of `x`, or float32 (Gemma).
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)


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


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Gated activation: `gelu(gate) * up` of (T, 2 I) = gate | up, with tanh's approximation; returns (T, I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


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


def penalise(
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
    counts: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Lower the scores of tokens that were seen before, in place.

    `score > 0 ? score / repetition : score * repetition` (Keskar et al. 2019, arXiv:1909.05858), then
    `score - frequency * count - presence * [count > 0]` (OpenAI's API). Only the N entries named are touched.

    Args:
        logits: (R, V) float32; overwritten.
        rows: (N,) int64, the row of each entry.
        tokens: (N,) int64, its token: one of the row's prompt or outputs. A pair comes once.
        counts: (N,) float32, how often the row has generated it; 0 for a token of the prompt only.
        repetition: (R,) float32, above 0.
        presence: (R,) float32.
        frequency: (R,) float32.
    """
    scores = logits[rows, tokens]
    factors = repetition[rows]
    scores = torch.where(scores > 0, scores / factors, scores * factors)
    scores -= frequency[rows] * counts
    scores -= presence[rows] * (counts > 0)
    logits[rows, tokens] = scores


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token a row: a row's draw depends on its own logits, temperature and uniform only.

    Args:
        logits: (R, V) float32.
        temperatures: (R,) float32, above 0.
        uniforms: (R,) float64 in [0, 1).

    Returns:
        (R,) int64.
    """
    return _invert(_probabilities(logits, temperatures), uniforms)


def sample_likely(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, *, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """Draw one token a row, as `sample` does, from the tokens that `keep_likely` keeps."""
    probs = _probabilities(logits, temperatures)
    return _invert(keep_likely(probs, top_ks=top_ks, top_ps=top_ps, min_ps=min_ps), uniforms)


def keep_likely(probs: Tensor, *, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """Set the probabilities of unlikely tokens to 0; what is left is not scaled up.

    In vLLM's order, each on what the one before left: min-p (Nguyen et al. 2024, arXiv:2407.01082), top-k, top-p
    (Holtzman et al. 2019, arXiv:1904.09751). Tokens exactly as likely as the last one kept are kept too, so that a cut
    is a property of the probabilities and not of how a sort breaks ties.

    Args:
        probs: (R, V) float32, rows that add up to 1.
        top_ks: (R,) int64; 0 is all.
        top_ps: (R,) float64 in (0, 1]; 1 is all.
        min_ps: (R,) float32 in [0, 1]; 0 is all.

    Returns:
        (R, V) float32.
    """
    probs = probs * (probs >= min_ps.unsqueeze(1) * probs.amax(-1, keepdim=True))
    # By cumsum, whose order of additions does not change with the number of rows.
    totals = probs.cumsum(-1, dtype=torch.float64)[:, -1]
    narrow = probs.topk(min(_NARROW, probs.shape[1])).values
    floors, settled = _floors(narrow, totals, top_ks=top_ks, top_ps=top_ps)
    if narrow.shape[1] < probs.shape[1] and not settled.all():
        rest = (~settled).nonzero().squeeze(1)
        wide = probs[rest].sort(descending=True).values
        floors[rest], _ = _floors(wide, totals[rest], top_ks=top_ks[rest], top_ps=top_ps[rest])
    return probs.mul_(probs >= floors.unsqueeze(1))


_NARROW = 1024
"""Likeliest tokens looked at first. Most cuts fall among them, and finding them costs a twentieth of a sort."""


def _floors(likeliest: Tensor, totals: Tensor, *, top_ks: Tensor, top_ps: Tensor) -> tuple[Tensor, Tensor]:
    """The least probability that top-k and top-p keep, and whether the W likeliest tokens were enough to know it.

    Args:
        likeliest: (R, W), each row's highest probabilities in falling order.
        totals: (R,) float64, what each row's probabilities add up to.
        top_ks: (R,).
        top_ps: (R,).

    Returns:
        (R,) and (R,) bool.
    """
    width = likeliest.shape[1]
    cumulated = likeliest.cumsum(-1, dtype=torch.float64)
    limited = top_ks > 0
    within = limited & (top_ks <= width)
    last = torch.where(within, top_ks, width) - 1
    mass = torch.where(within, cumulated.gather(1, last.unsqueeze(1)).squeeze(1), totals)
    needed = top_ps * mass
    index = torch.minimum((cumulated < needed.unsqueeze(1)).sum(-1), last)
    everything = ~limited & (top_ps >= 1)
    floors = likeliest.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(everything, 0)
    return floors, torch.where(limited, within, everything | (cumulated[:, -1] >= needed))


def _probabilities(logits: Tensor, temperatures: Tensor) -> Tensor:
    return (logits / temperatures.unsqueeze(1)).softmax(-1)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token of each row whose cumulated weight passes that share of the total; never one of weight 0."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    totals = cumulated[:, -1:]
    # A uniform one step below 1 can round up to the total, which no entry passes.
    targets = torch.minimum(uniforms.unsqueeze(1) * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    return torch.searchsorted(cumulated, targets, right=True).squeeze(1)
