"""Capacity is counted on the single requests that a run kept."""

from __future__ import annotations

from pathlib import Path

from tests.fakes import records
from tests.tuner.measure.helpers import record
from tuner.analysis.profiles import ProductionChoice
from tuner.job import load_job
from tuner.measure.stage import MeasuredStage
from tuner.records import Measured, StageKind, StageRecord, TrialRecord
from tuner.request_evidence import requests_of
from tuner.store import RunStore, keep_stage


def _kept(store: RunStore, trial: TrialRecord, stage: StageRecord, ttfts_s: list[float]) -> None:
    sent = tuple(record(index=i, times_s=(ttft, ttft + 0.01)) for i, ttft in enumerate(ttfts_s))
    keep_stage(store.trial_directory(trial.number), MeasuredStage(record=stage, requests=sent, samples=()))


def test_loads_are_counted_on_the_ladder_and_rates_on_every_launch_of_production(tmp_path: Path) -> None:
    """A rate measured under the chosen fence answers for it, and the ladder of the knee's trial for the loads."""
    store = RunStore.create(tmp_path, load_job("embedded"), records.provenance())
    climbed = records.stage(records.CHOSEN, 16)
    spoilt = climbed.model_copy(update={"index": 1, "load": 32, "valid": False})
    studied = records.trial(
        0, records.CHOSEN, outcome=Measured(facts=records.facts(records.CHOSEN), stages=(climbed, spoilt))
    )
    rate = climbed.model_copy(update={"index": 0, "kind": StageKind.RATE, "loop": "open", "load": 2.5})
    rated = records.trial(
        1, records.PRODUCTION, outcome=Measured(facts=records.facts(records.PRODUCTION), stages=(rate,))
    )
    _kept(store, studied, climbed, [0.1, 0.2, 2.0])
    _kept(store, rated, rate, [0.1, 0.2])
    choice = ProductionChoice(
        trial=studied, knee=records.knee_finding(), stage=climbed, config=records.PRODUCTION, evidence=()
    )

    seen = requests_of(store, choice, [studied, rated], records.SLO)

    assert [(each.load, each.num_inside, each.num_requests) for each in seen.closed] == [(16, 2, 3)]
    assert [(each.load, each.num_inside, each.num_requests) for each in seen.open] == [(2.5, 2, 2)]
    assert seen.mix is not None
    assert seen.mix.mean_prompt == 10
    assert requests_of(store, None, [studied], records.SLO).mix is None
