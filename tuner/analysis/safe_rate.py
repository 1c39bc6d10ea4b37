"""The safe rate: the highest open-loop rate whose p95s stay inside the SLO, and which rate to try next. Pure.

What a stage tells of its rate is one of four things, and only two of them are evidence:

- *safe*: no queue that grows, and the upper bounds of both p95s are inside the limits; where these are far away, the
  far bounds, which speak for the whole rate that was sent.
- *over*: a p95 as seen is above its limit. A higher rate is then never called safe, however lucky its stage.
- *open*: neither. The search goes below it, but a higher rate that was shown to be safe stands: p95s rise with the
  rate, so that what is shown above holds below.
- *nothing*: the stage is invalid. That is no word on the rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tuner.answer import Slo
from tuner.records import Estimate

FIRST_SHARE = 0.8
"""Of the closed loop's throughput: a closed loop at its fence is critical load in an open one."""

RELATIVE_STEP = 0.05
"""A safe rate and one that is not, closer than this, are close enough."""

MOST_STAGES = 6
"""Stages spent on one search."""

_BELOW = 0.5


class Told(StrEnum):
    """What a stage says of the rate that was offered."""

    SAFE = "safe"
    OVER = "over"
    OPEN = "open"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateStage:
    """One rate of arrivals, measured."""

    rate_rps: float
    """As it was offered."""

    shown_rps: float
    """The rate its figures speak for: never above what was offered, nor what was sent (`StageRecord.shown_rps`)."""

    sent_rps: float
    """The lower of the rates that were offered and sent."""

    ttft_p95_ms: Estimate
    itl_p95_ms: Estimate
    oversaturated: bool
    """Whether requests in flight kept growing: its p95s would be worse the longer it went on."""

    ttft_p95_far_ms: float | None = None
    itl_p95_far_ms: float | None = None
    """Upper bounds at the rate that was sent, for limits far away; None: too little was seen for one."""

    valid: bool = True
    given_up: bool = False
    """Whether it was tried often enough: without a word on it, the search goes below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeRate:
    """What the stages so far say."""

    stage: RateStage | None
    """The one that shows the most; None where no rate was shown to be safe."""

    rate_rps: float | None
    """The highest rate shown to be safe."""

    not_shown_rps: float | None
    """The lowest rate offered above it that was not shown to be safe; None where there is none."""

    next_rps: float | None
    """Where one more stage says most; None where the search is over."""


def told(stage: RateStage, slo: Slo) -> Told:
    """What one stage says of its rate."""
    if not (stage.valid and math.isfinite(stage.rate_rps) and stage.rate_rps > 0):
        return Told.NOTHING
    pairs = ((stage.ttft_p95_ms, slo.ttft_p95_ms), (stage.itl_p95_ms, slo.itl_p95_ms))
    if stage.oversaturated or any(figure.value > limit for figure, limit in pairs):
        return Told.OVER
    return Told.SAFE if _shown_rps(stage, slo) > 0 else Told.OPEN


def _shown_rps(stage: RateStage, slo: Slo) -> float:
    """The rate that a stage inside the limits shows to be safe; 0 where it shows none."""
    far = ((stage.ttft_p95_far_ms, slo.ttft_p95_ms), (stage.itl_p95_far_ms, slo.itl_p95_ms))
    if all(bound is not None and bound <= limit for bound, limit in far):
        return stage.sent_rps
    near = ((stage.ttft_p95_ms.high, slo.ttft_p95_ms), (stage.itl_p95_ms.high, slo.itl_p95_ms))
    return stage.shown_rps if all(bound is not None and bound <= limit for bound, limit in near) else 0.0


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

    The first rate is 0.8 of the ceiling; from there on the gap between the highest that was safe and the lowest that
    was not, or was given up, is halved on a relative scale, until it is within `relative_step`. Every stage counts to
    those spent.

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
    found = highest_safe(stages, slo)
    if len(stages) >= most_stages:
        return found
    safe_rps = max((stage.rate_rps for stage in _safe(stages, slo)), default=None)
    given_up = [stage.rate_rps for stage in stages if stage.given_up and stage.rate_rps > (safe_rps or 0.0)]
    above = min([*given_up, *([] if found.not_shown_rps is None else [found.not_shown_rps])], default=None)
    next_rps = _next(safe_rps, above, (floor_rps, ceiling_rps), relative_step)
    return replace(found, next_rps=next_rps)


def highest_safe(stages: Sequence[RateStage], slo: Slo) -> SafeRate:
    """The stage that shows the highest safe rate, without a word on what to try next."""
    safe = _safe(stages, slo)
    highest = max((stage.rate_rps for stage in safe), default=0.0)
    tried = [stage.rate_rps for stage in stages if told(stage, slo) in (Told.OVER, Told.OPEN)]
    best = max(safe, key=lambda stage: _shown_rps(stage, slo), default=None)
    return SafeRate(
        stage=best,
        rate_rps=None if best is None else _shown_rps(best, slo),
        not_shown_rps=min((rate for rate in tried if rate > highest), default=None),
        next_rps=None,
    )


def _safe(stages: Sequence[RateStage], slo: Slo) -> list[RateStage]:
    """Those that are safe, below every rate that was seen to be over a limit."""
    over = min((stage.rate_rps for stage in stages if told(stage, slo) is Told.OVER), default=math.inf)
    return [stage for stage in stages if stage.rate_rps < over and told(stage, slo) is Told.SAFE]


def _next(safe: float | None, above: float | None, limits: tuple[float, float], step: float) -> float | None:
    floor, ceiling = limits
    if safe is None and above is None:
        return max(floor, FIRST_SHARE * ceiling)
    top = ceiling if above is None else above
    if safe is None and floor == 0:
        return _BELOW * top
    below = floor if safe is None else safe
    if top <= (1 + step) * below:
        return floor if safe is None and floor < top else None
    return math.sqrt(below * top)
