"""The safe rate: the highest open-loop rate whose p95s stay inside the SLO, and which rate to try next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.answer import Slo
from tuner.records import Estimate

FIRST_SHARE = 0.8
"""Of the closed loop's throughput: a closed loop at its fence is critical load in an open one."""

RELATIVE_STEP = 0.05
"""A safe and an unsafe rate closer than this are close enough."""

MOST_STAGES = 6
"""Stages spent on one search."""

_BELOW = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RateStage:
    """One rate of Poisson arrivals, measured."""

    rate_rps: float
    ttft_p95_ms: Estimate
    itl_p95_ms: Estimate
    oversaturated: bool
    """Whether requests in flight kept growing: its p95s would be worse the longer it went on."""

    valid: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeRate:
    """What the stages so far say."""

    rate_rps: float | None
    """The highest rate shown to be safe; None where none is."""

    next_rps: float | None
    """Where one more stage says most; None where the search is over."""


def is_safe(stage: RateStage, slo: Slo) -> bool:
    """Whether it was not oversaturated and both p95s' upper bounds are inside; without bounds nothing is shown."""
    if stage.oversaturated or not stage.valid:
        return False
    pairs = ((stage.ttft_p95_ms, slo.ttft_p95_ms), (stage.itl_p95_ms, slo.itl_p95_ms))
    return all(figure.high is not None and figure.high <= limit for figure, limit in pairs)


def safe_rate(
    stages: Sequence[RateStage],
    slo: Slo,
    *,
    ceiling_rps: float,
    floor_rps: float = 0.0,
    most_stages: int = MOST_STAGES,
    relative_step: float = RELATIVE_STEP,
) -> SafeRate:
    """The safe rate so far, and the next rate.

    A rate above one that was not safe is never safe, however lucky its own stage was. An invalid stage says nothing; it
    counts to the stages spent. The first rate is 0.8 of the ceiling; from there on the gap between the highest safe and
    the lowest other rate is halved on a relative scale, until it is within `relative_step`.

    Args:
        stages: measured so far, in any order.
        slo: the limits.
        ceiling_rps: requests per second of the closed loop under the same fence; nothing above it is tried.
        floor_rps: what one request at a time brings; nothing below it is tried. 0 is no floor.
        most_stages: how many stages may be spent.
        relative_step: how close is close enough.

    Raises:
        ValueError: for a ceiling that is not above 0, or below the floor.
    """
    if not (math.isfinite(ceiling_rps) and 0 <= floor_rps <= ceiling_rps > 0):
        raise ValueError(f"ceiling_rps is {ceiling_rps:g}: it must be above 0 and the floor, {floor_rps:g}")
    told = [stage for stage in stages if stage.valid and math.isfinite(stage.rate_rps) and stage.rate_rps > 0]
    unsafe = min((stage.rate_rps for stage in told if not is_safe(stage, slo)), default=None)
    below = [s.rate_rps for s in told if is_safe(s, slo) and (unsafe is None or s.rate_rps < unsafe)]
    safe = max(below, default=None)
    spent = len(stages) >= most_stages
    return SafeRate(
        rate_rps=safe, next_rps=None if spent else _next(safe, unsafe, (floor_rps, ceiling_rps), relative_step)
    )


def _next(safe: float | None, unsafe: float | None, limits: tuple[float, float], step: float) -> float | None:
    floor, ceiling = limits
    if safe is None and unsafe is None:
        return max(floor, FIRST_SHARE * ceiling)
    above = ceiling if unsafe is None else unsafe
    if safe is None and floor == 0:
        return _BELOW * above
    below = floor if safe is None else safe
    if above <= (1 + step) * below:
        return floor if safe is None and floor < above else None
    return math.sqrt(below * above)
