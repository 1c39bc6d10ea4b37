"""Several measurements of one point, taken by launches of their own, as one figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from tuner.analysis.noise import relative_half_width
from tuner.answer import LaunchNoise, OperatingPoint
from tuner.records import Estimate, StageRecord

_Number = TypeVar("_Number", int, float)


def combined(estimates: Sequence[Estimate], noise: LaunchNoise | None = None) -> Estimate:
    """One figure from several launches: their mean, with an interval for what launches differ by.

    Where `noise` says by how much they do, the interval is that of the mean. Without it, it reaches from the lowest
    lower to the highest upper end: an envelope does not pretend that two launches tell a variance.
    An end that one launch could not give is unknown for all.
    """
    values = [estimate.value for estimate in estimates if not math.isnan(estimate.value)]
    lows = [estimate.low for estimate in estimates if estimate.low is not None]
    highs = [estimate.high for estimate in estimates if estimate.high is not None]
    complete = len(lows) == len(highs) == len(estimates)
    value = sum(values) / len(values) if values else math.nan
    half = None if noise is None else relative_half_width(estimates, noise)
    if half is not None:
        lows, highs = [value * max(0.0, 1 - half)], [value * (1 + half)]
    return Estimate(
        value=value,
        low=min(lows) if complete else None,
        high=max(highs) if complete else None,
        num_samples=sum(estimate.num_samples for estimate in estimates),
    )


def ratio(
    numerators: Sequence[Estimate], denominators: Sequence[Estimate], noise: LaunchNoise | None = None
) -> Estimate | None:
    """How much larger the first are than the second: geometric mean over launches taken in turn.

    Its interval is that of a ratio of two means where `noise` tells how launches differ, else it lies between the
    extreme ratios of the ends. None where there is nothing to compare.
    """
    pairs = [(above, below) for above, below in zip(numerators, denominators, strict=False) if below.value > 0]
    if not pairs or any(math.isnan(above.value) or above.value <= 0 for above, _ in pairs):
        return None
    tops, bottoms = [top for top, _ in pairs], [bottom for _, bottom in pairs]
    above, below = combined(tops), combined(bottoms)
    value = math.exp(sum(math.log(top.value / bottom.value) for top, bottom in pairs) / len(pairs))
    low = high = None
    if above.low is not None and above.high is not None and below.low and below.high:
        low, high = above.low / below.high, above.high / below.low
    if noise is not None and low is not None:
        half = math.hypot(relative_half_width(tops, noise) or 0.0, relative_half_width(bottoms, noise) or 0.0)
        low, high = value * math.exp(-half), value * math.exp(half)
    return Estimate(value=value, low=low, high=high, num_samples=above.num_samples + below.num_samples)


def operating_point_of(stages: Sequence[StageRecord], noise: LaunchNoise | None = None) -> OperatingPoint:
    """One operating point from the stages that measured it: figures combined, counts added, peaks at their worst.

    Args:
        stages: one of each launch.
        noise: what launches differ by in throughput, where it is known.

    Raises:
        ValueError: for no stages, or stages of different loads.
    """
    loads = {stage.load for stage in stages}
    if len(loads) != 1:
        raise ValueError(f"an operating point is one load, these stages have {sorted(loads)}")
    return OperatingPoint(
        load=loads.pop(),
        output_throughput=combined([stage.output_throughput for stage in stages], noise),
        ttft_p95_ms=combined([stage.ttft_p95_ms for stage in stages]),
        itl_p95_ms=combined([stage.itl_p95_ms for stage in stages]),
        num_preemptions=_sum_known([stage.num_preemptions for stage in stages]),
        kv_cache_usage_peak=_most_known([stage.kv_cache_usage_peak for stage in stages]),
        not_applicable=stages[0].not_applicable,
        peak_memory_bytes=_most_known([stage.memory.in_use_peak_bytes for stage in stages]),
        reserved_memory_bytes=_most_known([stage.memory.reserved_bytes for stage in stages]),
    )


def _sum_known(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _most_known(values: Sequence[_Number | None]) -> _Number | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
