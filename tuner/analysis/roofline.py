"""What a step's time goes into at a load: computing tokens, or reading weights and keys and values.

The roofline model (Williams, Waterman, Patterson 2009): a step takes at least its arithmetic over the device's peak and
at least its bytes over the memory's bandwidth. A prefill has many tokens for each weight that is read, so it stands
under the first roof; decoding at load 1 reads all weights for one token and stands under the second. Both roofs are
therefore measured on the unloaded engine, without a data sheet:

- a prompt of P tokens takes TTFT. Computing one token then takes between (TTFT - ITL) / P, as if a decode step's whole
  time were spent beside the arithmetic, and TTFT / P, as if none of it were;
- a decode step takes ITL. Reading all weights takes at most that, and reading keys and values besides as much more as
  they have bytes more;
- what a step takes longer than the unloaded one is computing or reading: the weights and the launch do not grow. What
  computing does not account for at the most is the least that reading takes.

So the shares of a loaded step have bounds at both ends, whether computing and reading overlap or follow each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tuner.records import EngineFacts, Estimate, StageRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShares:
    """Bounds on what a loaded step's time goes into, as shares of it; an upper one can be above 1."""

    compute_low: float
    compute_high: float
    reading_low: float
    reading_high: float | None
    """None where the engine does not say how large weights and KV blocks are."""

    kv_bytes_share: float | None
    """Share of the bytes read that are keys and values, at the peak."""


def step_ms(stage: StageRecord) -> float | None:
    """Time from one step to the next. By the engine's count of steps, else the median ITL: a step is a token."""
    if stage.steps is not None and stage.steps.per_s > 0:
        return 1000 / stage.steps.per_s
    return stage.itl_p50_ms.value if _known(stage.itl_p50_ms) else None


def tokens_per_ms(stage: StageRecord) -> float | None:
    """Tokens computed, prefill and decode together; without the engine's count, by what was sent and generated."""
    if stage.steps is not None:
        return stage.steps.mean_tokens * stage.steps.per_s / 1000
    rate = stage.output_throughput.value * (1 + stage.mean_prompt_tokens / stage.mean_output_tokens) / 1000
    return rate if math.isfinite(rate) and rate > 0 else None


def step_shares(unloaded: StageRecord, loaded: StageRecord, facts: EngineFacts | None) -> StepShares | None:
    """Bounds on the shares of a step at `loaded`; None where a figure they rest on is missing.

    Args:
        unloaded: the stage at load 1 of the same engine.
        facts: how large weights and KV blocks are, where the engine says.
    """
    rate, step = tokens_per_ms(loaded), step_ms(loaded)
    figures = (unloaded.ttft_p50_ms, unloaded.itl_p50_ms)
    if rate is None or step is None or not all(map(_known, figures)) or not unloaded.mean_prompt_tokens > 0:
        return None
    ttft, itl = (figure.value for figure in figures)
    reading, kv_share = _reading(itl, step, loaded, facts)
    compute_high = ttft / unloaded.mean_prompt_tokens * rate
    return StepShares(
        compute_low=max(0.0, ttft - itl) / unloaded.mean_prompt_tokens * rate,
        compute_high=compute_high,
        reading_low=max(0.0, 1 - itl / step - compute_high),
        reading_high=reading,
        kv_bytes_share=kv_share,
    )


def _reading(
    itl_ms: float, step_ms: float, loaded: StageRecord, facts: EngineFacts | None
) -> tuple[float | None, float | None]:
    """The upper bound of the reading share, and the share of keys and values in the bytes."""
    if facts is None or not facts.weights_bytes or facts.num_gpu_blocks is None or facts.kv_block_bytes is None:
        return None, None
    if loaded.kv_cache_usage_peak is None:
        return None, None
    kv_bytes = loaded.kv_cache_usage_peak * facts.num_gpu_blocks * facts.kv_block_bytes
    all_bytes = facts.weights_bytes + kv_bytes
    return all_bytes / facts.weights_bytes * itl_ms / step_ms, kv_bytes / all_bytes


def _known(estimate: Estimate) -> bool:
    return math.isfinite(estimate.value) and estimate.value > 0
