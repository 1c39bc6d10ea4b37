"""A server that went away, or hung, while it was measured: in which stage, and what a client saw of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from tuner.records import StageRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """From when on a server answered nothing any more."""

    stage: StageRecord
    """The one in which that began."""

    after_s: float
    """Load that it had been under by the end of that stage. Unit: seconds."""

    @property
    def where(self) -> str:
        """The load in words."""
        return f"{self.stage.load:g} requests/s" if self.stage.loop == "open" else f"load {self.stage.load}"

    @property
    def sentence(self) -> str:
        """When, at which load, and with which words."""
        said = "" if self.stage.first_error is None else f": {self.stage.first_error}"
        return (
            f"the server stopped answering at {self.where} (stage {self.stage.index + 1}, after about "
            f"{self.after_s:.0f} s of load), for good{said}"
        )


def outage(stages: Sequence[StageRecord]) -> Outage | None:
    """What came of a server that answered nothing by the last of these stages; None where it did, or was not asked."""
    ordered = sorted(stages, key=lambda stage: stage.index)
    if not ordered or _is_answered(ordered[-1]):
        return None
    dead = list(takewhile(lambda stage: stage.ended_by in ("failures", "stalled"), reversed(ordered)))
    began = dead[-1] if dead else ordered[-1]
    return Outage(stage=began, after_s=sum(stage.wall_s for stage in ordered if stage.index <= began.index))


def _is_answered(stage: StageRecord) -> bool:
    return stage.ended_by != "stalled" and (stage.num_completed > 0 or stage.num_failed == 0)
