"""Whether other programs worked on the machine while the answer's own launches were measured. Pure.

A hump in the middle of four launches in turn and back meets one setting and not the other: going back and forth takes
out what drifts, not that. It is not repaired here, only said, beside the figures it may have spoilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tuner import wording
from tuner.records import StageRecord, TrialRecord

FEWEST_CORES = 0.1
"""What others use that counts for something: a quiet machine's own services, and Ray's, use less. Unit: cores."""

SHARE_OF_IDLE = 0.5
"""Others that use no more than that of what is left would have found room beside the engine."""


def is_disturbed(stage: StageRecord) -> bool:
    """Whether others took what the engine or the load generator may have wanted; unknown is no."""
    other, idle = stage.other_cpu_cores, stage.idle_cpu_cores
    return other is not None and idle is not None and other > max(FEWEST_CORES, SHARE_OF_IDLE * idle)


def other_work_warning(trials: Iterable[TrialRecord]) -> str | None:
    """Which launches met other work, how much of it, and what to do; None where none did.

    Args:
        trials: those that the answer's figures come from.
    """
    met = [(trial.number, stages) for trial in trials if (stages := _disturbed_stages(trial))]
    if not met:
        return None
    most = max(stage.other_cpu_cores or 0.0 for _, stages in met for stage in stages)
    numbers = ", ".join(str(number) for number, _ in met)
    return (
        f"other work took up to {wording.number(most)} cores of this machine in trial{'s' if len(met) > 1 else ''} "
        f"{numbers}: figures of those may be too low, and a comparison with them off; see `kneetune doctor` for what "
        "runs, and tune again when it is quiet"
    )


def _disturbed_stages(trial: TrialRecord) -> Sequence[StageRecord]:
    stages = trial.outcome.stages if trial.outcome.outcome == "measured" else ()
    return [stage for stage in stages if stage.valid and is_disturbed(stage)]
