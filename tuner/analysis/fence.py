"""A fence that nobody told of, recognised from what an engine says of its running and waiting requests. Pure.

At a fence the number that runs stands still, at the very limit, while everything beyond it waits: more load adds to the
queue alone. Requests that wait for KV blocks or for a step's tokens look alike from afar, but there what runs moves up
and down with the lengths of the requests, and a full KV cache or preemptions tell the former apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from tuner.analysis.diagnosis import FULL_KV_CACHE, WAITING_SHARE
from tuner.analysis.knee import find_knee, points_of
from tuner.answer import KneeFinding
from tuner.measure.past_fence import is_past_fence
from tuner.records import StageRecord

PINNED = 0.9
"""Mean over peak of the requests that run: at a fence a place is empty for a step or two after each request's end."""

SAME_FENCE = 0.03
"""The peaks of two stages at one fence may differ by this share: scrapes do not see every step."""

QUEUED = 0.5
"""Share of the requests that came in addition which must be found waiting: at a fence all of them."""

NUM_BOOTSTRAP = 500
"""Ladders that are resampled for the knee's interval."""


def recognised_fence(stages: Sequence[StageRecord]) -> int | None:
    """Most requests that run at once, where two stages of different load show it; None where they do not."""
    past = [stage for stage in stages if is_held_back(stage)]
    pairs = combinations(sorted(past, key=lambda stage: stage.load), 2)
    fences = [max(_peak(low), _peak(high)) for low, high in pairs if _only_the_queue_grows(low, high)]
    most = max((_peak(stage) for stage in stages), default=0)
    return most if any(most <= (1 + SAME_FENCE) * fence for fence in fences) else None


def is_held_back(stage: StageRecord) -> bool:
    """Whether a stage looks as if it were past a fence: a queue, and before it a number running that stands still.

    What is not known is not taken for a sign.
    """
    if stage.mean_running is None or stage.mean_waiting is None or stage.peak_running is None:
        return False
    if stage.is_unknown("num_preemptions") or stage.is_unknown("kv_cache_usage_peak"):
        return False
    short_of_blocks = (stage.num_preemptions or 0) > 0 or (stage.kv_cache_usage_peak or 0.0) >= FULL_KV_CACHE
    waits = stage.mean_waiting >= WAITING_SHARE * stage.mean_in_flight
    return waits and not short_of_blocks and stage.mean_running >= PINNED * stage.peak_running


def fenced_beyond(stages: Sequence[StageRecord], fence: int | None) -> list[StageRecord]:
    """The same stages, those past `fence` marked so; none is where no fence is known."""
    return [stage.model_copy(update={"fenced": fence is not None and is_past_fence(stage, fence)}) for stage in stages]


def ladder_knee(
    stages: Sequence[StageRecord], *, fence: int | None, seed: int = 0, num_bootstrap: int = NUM_BOOTSTRAP
) -> KneeFinding:
    """The knee of a ladder on an engine with that fence.

    Users who think are no requests: as many of them as the fence say nothing, and only a stage past it tells that it
    was met.
    """
    by_users = None if any(stage.thinks for stage in stages) else fence
    return find_knee(points_of(stages), fence=by_users, seed=seed, num_bootstrap=num_bootstrap)


def _only_the_queue_grows(low: StageRecord, high: StageRecord) -> bool:
    if high.mean_in_flight <= low.mean_in_flight or abs(_peak(high) - _peak(low)) > SAME_FENCE * _peak(high):
        return False
    return (high.mean_waiting or 0.0) - (low.mean_waiting or 0.0) >= QUEUED * (high.mean_in_flight - low.mean_in_flight)


def _peak(stage: StageRecord) -> int:
    return stage.peak_running or 0
