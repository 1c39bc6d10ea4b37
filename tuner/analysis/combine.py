"""Several measurements of one point, taken by launches of their own, as one figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from tuner.answer import OperatingPoint
from tuner.records import Estimate, StageRecord

_Number = TypeVar("_Number", int, float)


def combined(estimates: Sequence[Estimate]) -> Estimate:
    """One figure from several launches: the mean, between the lowest lower and the highest upper end.

    The envelope covers what launches differ by without pretending that two of them tell a variance.
    An end that one launch could not give is unknown for all.
    """
    values = [estimate.value for estimate in estimates if not math.isnan(estimate.value)]
    lows = [estimate.low for estimate in estimates if estimate.low is not None]
    highs = [estimate.high for estimate in estimates if estimate.high is not None]
    complete = len(lows) == len(highs) == len(estimates)
    return Estimate(
        value=sum(values) / len(values) if values else math.nan,
        low=min(lows) if complete else None,
        high=max(highs) if complete else None,
        num_samples=sum(estimate.num_samples for estimate in estimates),
    )


def ratio(numerators: Sequence[Estimate], denominators: Sequence[Estimate]) -> Estimate | None:
    """How much larger the first are than the second: geometric mean over launches, between the extremes of the ends.

    None where there is nothing to compare.
    """
    pairs = [(above, below) for above, below in zip(numerators, denominators, strict=False) if below.value > 0]
    if not pairs or any(math.isnan(above.value) or above.value <= 0 for above, _ in pairs):
        return None
    above, below = combined([pair[0] for pair in pairs]), combined([pair[1] for pair in pairs])
    low = high = None
    if above.low is not None and above.high is not None and below.low and below.high:
        low, high = above.low / below.high, above.high / below.low
    mean_log = sum(math.log(top.value / bottom.value) for top, bottom in pairs) / len(pairs)
    return Estimate(value=math.exp(mean_log), low=low, high=high, num_samples=above.num_samples + below.num_samples)


def operating_point_of(stages: Sequence[StageRecord]) -> OperatingPoint:
    """One operating point from the stages that measured it: figures combined, counts added, peaks at their worst.

    Raises:
        ValueError: for no stages, or stages of different loads.
    """
    loads = {stage.load for stage in stages}
    if len(loads) != 1:
        raise ValueError(f"an operating point is one load, these stages have {sorted(loads)}")
    return OperatingPoint(
        load=loads.pop(),
        output_throughput=combined([stage.output_throughput for stage in stages]),
        ttft_p95_ms=combined([stage.ttft_p95_ms for stage in stages]),
        itl_p95_ms=combined([stage.itl_p95_ms for stage in stages]),
        num_preemptions=_sum_known([stage.num_preemptions for stage in stages]),
        kv_cache_usage_peak=_most_known([stage.kv_cache_usage_peak for stage in stages]),
        peak_memory_bytes=_most_known([stage.memory.in_use_peak_bytes for stage in stages]),
        reserved_memory_bytes=_most_known([stage.memory.reserved_bytes for stage in stages]),
    )


def _sum_known(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _most_known(values: Sequence[_Number | None]) -> _Number | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
