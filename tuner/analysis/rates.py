"""The safe rate told from stages: which rate a climb tries next, and what it found in the end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tuner.analysis.safe_rate import MOST_STAGES, RELATIVE_STEP, RateStage, SafeRate, is_safe, safe_rate
from tuner.answer import Slo
from tuner.frozen import Record
from tuner.records import Estimate, StageKind, StageRecord

UNSTEADY_TRIES = 2
"""A rate that could not be measured so often is taken not to be safe: something about it does not hold still."""


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
    """What the stages under a rate say of these limits; those of another kind say nothing."""
    rated = [stage for stage in stages if stage.kind is StageKind.RATE]
    failures = Counter(stage.load for stage in rated if not _tells(stage, slo))
    given_up = {load for load, count in failures.items() if count >= UNSTEADY_TRIES}
    return [
        RateStage(
            rate_rps=stage.load,
            ttft_p95_ms=stage.ttft_p95_ms,
            itl_p95_ms=stage.itl_p95_ms,
            oversaturated=stage.ended_by == "oversaturated" or stage.load in given_up,
            valid=_tells(stage, slo) or stage.load in given_up,
        )
        for stage in rated
    ]


def _tells(stage: StageRecord, slo: Slo) -> bool:
    """Whether a stage was measured well enough to call its rate safe or not.

    Requests in flight also rise by chance, and TTFT with them: a stage that was ended for it while both p95s were
    inside the limits gets a second chance.
    """
    is_proven = stage.ttft_p95_ms.has_interval and stage.itl_p95_ms.has_interval
    if stage.ended_by == "oversaturated":
        return stage.valid and (stage.ttft_p95_ms.value > slo.ttft_p95_ms or stage.itl_p95_ms.value > slo.itl_p95_ms)
    return stage.valid and is_proven


SHORT_STAGES = (
    "the safe rate rests on short stages that begin with an idle engine: near capacity waits depend on each other and "
    "p95 TTFT may be well above what was seen, so treat it as an upper estimate and stay clearly below it"
)
"""Said wherever a safe rate is: the interval of a TTFT takes its samples for independent, which in an open loop they
are not."""


def safe_rate_found(stages: Sequence[StageRecord], slo: Slo) -> Estimate | None:
    """The highest rate shown to be safe, in requests per second; None where none was.

    Its lower end is itself, its upper end the lowest rate that was tried above it and not shown to be safe, None where
    all that were tried are safe. Samples are the requests that ended under it.
    """
    told = [each for each in rate_stages(stages, slo) if each.valid]
    unsafe = min((each.rate_rps for each in told if not is_safe(each, slo)), default=None)
    safe = [each.rate_rps for each in told if is_safe(each, slo) and (unsafe is None or each.rate_rps < unsafe)]
    if not safe:
        return None
    rate_rps = max(safe)
    completed = sum(stage.num_completed for stage in stages if stage.kind is StageKind.RATE and stage.load == rate_rps)
    return Estimate(value=rate_rps, low=rate_rps, high=unsafe, num_samples=completed)
