"""What only single requests tell: how many were inside the SLO, how long they were. Reads a run's directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.analysis.capacity import Attainment, attainment
from tuner.analysis.explanation import Requests
from tuner.analysis.mix import mix_of
from tuner.analysis.profiles import ProductionChoice
from tuner.answer import Slo
from tuner.records import CLIMB_KINDS, StageKind, StageRecord, TrialRecord
from tuner.store import RunStore, read_requests

CONFIRMING_KINDS = frozenset({StageKind.OPERATING, StageKind.DOUBLE})
"""What launches of a choice measure under users who wait, at its fence and past it."""


def requests_of(
    store: RunStore, choice: ProductionChoice | None, trials: Sequence[TrialRecord], slo: Slo | None
) -> Requests:
    """What single requests tell of a choice, under the fence that a deployment of it has.

    By load: its own launches from its fence on, where its trial's, higher fence would show other figures, and below
    it the trial's climb: the same schedule under both. By rate: its own launches.

    They are counted here, and not as they are measured, because limits may be derived from the first ladder.
    """
    if choice is None or slo is None:
        return Requests()
    own = [(trial, stage) for trial in trials if trial.config == choice.config for stage in _valid_stages(trial)]
    below = [(choice.trial, stage) for stage in _valid_stages(choice.trial) if stage.load < choice.config.fence]
    climbed = [(trial, stage) for trial, stage in below if stage.kind in CLIMB_KINDS]
    confirmed = [(trial, stage) for trial, stage in own if stage.kind in CONFIRMING_KINDS]
    chosen = read_requests(store.trial_directory(choice.trial.number), choice.stage)
    return Requests(
        closed=tuple(_attained(store, [*climbed, *confirmed], slo)),
        open=tuple(_attained(store, [(trial, stage) for trial, stage in own if stage.kind is StageKind.RATE], slo)),
        mix=mix_of(chosen),
    )


def _valid_stages(trial: TrialRecord) -> list[StageRecord]:
    return [stage for stage in trial.outcome.stages if stage.valid] if trial.outcome.outcome == "measured" else []


def _attained(store: RunStore, stages: Sequence[tuple[TrialRecord, StageRecord]], slo: Slo) -> Iterator[Attainment]:
    for trial, stage in stages:
        requests = read_requests(store.trial_directory(trial.number), stage)
        yield attainment(stage.load, requests, slo, oversaturated=stage.ended_by == "oversaturated")
