"""The safe rate told from stages: which rate a climb tries next, and what it found in the end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tuner.analysis.safe_rate import (
    MOST_STAGES,
    RELATIVE_STEP,
    RateStage,
    SafeRate,
    highest_safe,
    safe_rate,
)
from tuner.answer import SafeRateFigure, Slo
from tuner.frozen import Record
from tuner.records import StageKind, StageRecord

UNSTEADY_TRIES = 2
"""So often a rate is tried that could not be measured, or whose queue grew while its p95s were inside the limits."""


class RateSearch(Record):
    """Look for the highest rate of arrivals that is inside the limits."""

    slo: Slo
    ceiling_rps: float
    """What users who wait for their answers got out of the same engine under the same fence."""

    request_s: float = 0.0
    """How long a request took there: a rate's stage may fill for some such times before it is measured. 0: unknown."""

    most_stages: int = MOST_STAGES
    relative_step: float = RELATIVE_STEP

    def so_far(self, stages: Sequence[StageRecord]) -> SafeRate:
        """The safe rate these stages show, and the next rate to try."""
        return safe_rate(
            rate_stages(stages, self.slo),
            self.slo,
            ceiling_rps=self.ceiling_rps,
            most_stages=self.most_stages,
            relative_step=self.relative_step,
        )


def rate_stages(stages: Sequence[StageRecord], slo: Slo) -> list[RateStage]:
    """What the stages under a rate say of these limits; those of another kind say nothing.

    A queue also grows by chance. Once, with both p95s inside the limits, that says nothing; twice at one rate it is no
    chance.
    """
    rated = [stage for stage in stages if stage.kind is StageKind.RATE]
    grew = Counter(stage.load for stage in rated if _grew_inside(stage, slo))
    silent = Counter(stage.load for stage in rated if not stage.valid or _grew_inside(stage, slo))
    return [
        RateStage(
            rate_rps=stage.load,
            shown_rps=stage.load if stage.shown_rps is None else stage.shown_rps,
            sent_rps=stage.load if stage.sent_rps is None else min(stage.load, stage.sent_rps),
            ttft_p95_far_ms=stage.ttft_p95_far_ms,
            itl_p95_far_ms=stage.itl_p95_far_ms,
            ttft_p95_ms=stage.ttft_p95_ms,
            itl_p95_ms=stage.itl_p95_ms,
            oversaturated=stage.ended_by == "oversaturated",
            valid=stage.valid and not (_grew_inside(stage, slo) and grew[stage.load] < UNSTEADY_TRIES),
            given_up=silent[stage.load] >= UNSTEADY_TRIES,
        )
        for stage in rated
    ]


def _grew_inside(stage: StageRecord, slo: Slo) -> bool:
    """Whether a valid stage was ended for its growing queue while both p95s were inside the limits."""
    inside = stage.ttft_p95_ms.value <= slo.ttft_p95_ms and stage.itl_p95_ms.value <= slo.itl_p95_ms
    return stage.valid and stage.ended_by == "oversaturated" and inside


def safe_rate_found(stages: Sequence[StageRecord], slo: Slo) -> SafeRateFigure | None:
    """The highest rate shown to be safe, in requests per second; None where none was.

    Its lower end is itself, as for the launch that was seen; its upper end the lowest rate that was offered above it
    and not shown to be safe, None where there is none. Samples are the requests that ended in the stage that shows it.
    """
    rated = [stage for stage in stages if stage.kind is StageKind.RATE]
    each = rate_stages(rated, slo)
    found = highest_safe(each, slo)
    if found.stage is None or found.rate_rps is None:
        return None
    of = rated[next(index for index, stage in enumerate(each) if stage is found.stage)]
    return SafeRateFigure(
        value=found.rate_rps,
        low=found.rate_rps,
        high=found.not_shown_rps,
        num_samples=of.num_completed,
        offered_rps=of.load,
        sent_rps=of.sent_rps,
    )
