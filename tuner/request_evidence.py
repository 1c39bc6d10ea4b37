"""What only single requests tell: how many were inside the SLO, how long they were. Reads a run's directory."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.analysis.capacity import Attainment, attainment
from tuner.analysis.mix import Mix, mix_of
from tuner.answer import Slo
from tuner.records import CLIMB_KINDS, StageRecord, TrialRecord
from tuner.store import RunStore, read_requests


def attained(store: RunStore, trial: TrialRecord, slo: Slo) -> tuple[Attainment, ...]:
    """Each valid stage of the trial's climb; the SLO may have been derived after they were measured."""
    if trial.outcome.outcome != "measured":
        return ()
    stages = [stage for stage in trial.outcome.stages if stage.valid and stage.kind in CLIMB_KINDS]
    return tuple(
        attainment(stage.load, read_requests(store.trial_directory(trial.number), stage), slo) for stage in stages
    )


def measured_mix(store: RunStore, trial: TrialRecord, stages: Sequence[StageRecord]) -> Mix | None:
    """The lengths of what was really sent and generated in these stages of a trial."""
    directory = store.trial_directory(trial.number)
    return mix_of([request for stage in stages for request in read_requests(directory, stage)])
