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

FP8 = torch.float8_e4m3fn
"""What a float8 cache holds."""

FP8_MAX = torch.finfo(FP8).max
"""448, the largest number it does."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last axis: `x / sqrt(mean(x^2) + eps) * weight`.

    Args:
        x: (..., H) or, for the heads of queries and keys, (T, Q + K, D).
        weight: anything that broadcasts to `x`: (H,), or (Q + K, D) for a weight per head. The product is taken in
            its dtype: that of `x`, or float32 (Gemma).
    """
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], eps=eps).mul_(weight).to(x.dtype)


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
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Gated activation: `gelu(gate) * up` of (T, 2 I) = gate | up, with tanh's approximation; returns (T, I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def kv_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Store each token's key and value at its slot: `cache[slot // S, slot % S] = row`.

    A float8 cache holds `row / scale`, cut off at ±`FP8_MAX`.

    Args:
        key: (T, K, D); `value` alike.
        key_cache: (N, S, K, D), written in place; `value_cache` alike.
        slots: (T,) int64, distinct.
        key_scale: of a float8 cache, as `value_scale`; others are written as they are.
    """
    for rows, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        slot_rows = cache.flatten(0, 1)
        if cache.dtype == FP8:
            stored = (rows.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
            slot_rows.view(torch.uint8).index_copy_(0, slots, stored.view(torch.uint8))
        else:
            slot_rows.index_copy_(0, slots, rows)


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
        key_scale: what stored keys are multiplied by, and `value_scale` values.

    Returns:
        (T, Q, D).
    """
    block_size = key_cache.shape[1]
    starts: list[int] = query_starts.tolist()
    outs = []
    for request, context in enumerate(context_lens.tolist()):
        queries = query[starts[request] : starts[request + 1]]
        positions = torch.arange(context, device=query.device)
        slots = block_tables[request, positions // block_size] * block_size + positions % block_size
        key, value = (cache.flatten(0, 1).index_select(0, slots) for cache in (key_cache, value_cache))
        key, value = (key.to(query.dtype) * key_scale, value.to(query.dtype) * value_scale)
        age = positions[-len(queries) :].unsqueeze(1) - positions
        seen = age >= 0 if window is None else (age >= 0) & (age < window)
        outs.append(_attend(queries, key, value, seen, scale))
    return torch.cat(outs)


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Query (n, Q, D) over key and value (L, K, D), where `seen` (n, L) allows."""
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


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
    # A model that overflows gives NaN, which every entry fails to pass: the token must still be one.
    return torch.searchsorted(cumulated, targets, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
