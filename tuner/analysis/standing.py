"""How a study stands while it runs: what was measured, what failed and how, which point is best so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.analysis.fence import ladder_knee
from tuner.analysis.graph_grid import stages_to_stand_on
from tuner.analysis.slo import complies, derive_slo, operating_point
from tuner.answer import Slo
from tuner.records import FailureKind, StageRecord, TrialRecord, TrialRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A study's trials so far, in figures."""

    num_measured: int
    num_refused: int
    """Settings known not to work, not launched."""

    failures: dict[FailureKind, int]
    """Launches that gave no figures, by kind, the most frequent first."""

    best: tuple[TrialRecord, StageRecord] | None
    """The operating point of highest throughput inside the limits, not yet re-measured."""


def standing(trials: Sequence[TrialRecord], slo: Slo | None) -> Standing:
    """How `trials` stand.

    Args:
        slo: the limits; None derives them from the first ladder, and without one nothing is best.
    """
    measured = [trial for trial in trials if trial.outcome.outcome == "measured"]
    slo = slo or next(filter(None, map(_derived, measured)), None)
    kinds = Counter(trial.outcome.kind for trial in trials if trial.outcome.outcome == "failed" and trial.launched)
    points = [] if slo is None else [(trial, _point(trial, slo)) for trial in measured if trial.role is TrialRole.STUDY]
    inside = [(trial, stage) for trial, stage in points if stage is not None]
    return Standing(
        num_measured=len(measured),
        num_refused=sum(not trial.launched for trial in trials),
        failures=dict(kinds.most_common()),
        best=max(inside, key=lambda pair: pair[1].output_throughput.value, default=None),
    )


def _derived(trial: TrialRecord) -> Slo | None:
    return derive_slo(trial.outcome.stages) if trial.outcome.outcome == "measured" else None


def _point(trial: TrialRecord, slo: Slo) -> StageRecord | None:
    """The trial's operating point, if it meets every limit."""
    if trial.outcome.outcome != "measured":
        return None
    stages = trial.outcome.stages
    stage = operating_point(
        stages_to_stand_on(trial.outcome), ladder_knee(stages, fence=trial.config.fence, num_bootstrap=0), slo
    )
    return stage if stage is not None and complies(stage, slo) else None
