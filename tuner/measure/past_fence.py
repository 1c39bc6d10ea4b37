"""Whether a stage was past the fence, so that requests waited by that limit alone. Pure."""

from __future__ import annotations

from tuner.records import StageRecord

AT_FENCE = 0.9
"""Running over the fence: at it, a place is empty for a step or two after each request's end."""

QUEUES = 0.1
"""Share of the requests in flight that must be seen waiting before waiting means anything."""


def is_past_fence(stage: StageRecord, fence: int) -> bool:
    """Whether more than `fence` requests wanted to run.

    Users who do not pause are as many requests. Of users who think only some have one in flight: past the fence they
    are where as many run as it lets in and others wait; where the engine does not tell, where more are in flight on
    average (Little's law).
    """
    if stage.loop == "open":
        return False
    if not stage.thinks:
        return stage.load > fence
    running, waiting = stage.mean_running, stage.mean_waiting
    if running is None or waiting is None:
        return stage.mean_in_flight > fence
    return running >= AT_FENCE * fence and waiting >= QUEUES * stage.mean_in_flight
