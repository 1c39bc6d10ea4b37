"""What only single requests tell: how many were inside the SLO, how long they were. Reads a run's directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.analysis.capacity import Attainment, attainment
from tuner.analysis.explanation import Requests
from tuner.analysis.mix import mix_of
from tuner.analysis.profiles import ProductionChoice
from tuner.answer import Slo
from tuner.records import CLIMB_KINDS, StageKind, TrialRecord
from tuner.store import RunStore, read_requests


def requests_of(
    store: RunStore, choice: ProductionChoice | None, trials: Sequence[TrialRecord], slo: Slo | None
) -> Requests:
    """What single requests tell of a choice: by load on its trial's climb, by rate on every launch of its config.

    They are counted here, and not as they are measured, because limits may be derived from the first ladder.
    """
    if choice is None or slo is None:
        return Requests()
    rated = [trial for trial in trials if trial.config == choice.config]
    chosen = read_requests(store.trial_directory(choice.trial.number), choice.stage)
    return Requests(
        closed=tuple(_attained(store, [choice.trial], CLIMB_KINDS, slo)),
        open=tuple(_attained(store, rated, frozenset({StageKind.RATE}), slo)),
        mix=mix_of(chosen),
    )


def _attained(
    store: RunStore, trials: Sequence[TrialRecord], kinds: frozenset[StageKind], slo: Slo
) -> Iterator[Attainment]:
    """Each valid stage of these kinds."""
    for trial in trials:
        for stage in trial.outcome.stages if trial.outcome.outcome == "measured" else ():
            if stage.valid and stage.kind in kinds:
                yield attainment(stage.load, read_requests(store.trial_directory(trial.number), stage), slo)
