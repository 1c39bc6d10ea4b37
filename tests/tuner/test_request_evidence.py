"""Capacity is counted on the single requests that a run kept."""

from __future__ import annotations

from pathlib import Path

from tests.fakes import records
from tests.tuner.measure.helpers import record
from tuner.analysis.profiles import ProductionChoice
from tuner.engine_config import EngineConfig
from tuner.job import load_job
from tuner.measure.stage import MeasuredStage
from tuner.records import Measured, StageKind, StageRecord, TrialRecord
from tuner.request_evidence import requests_of
from tuner.store import RunStore, keep_stage


def _kept(store: RunStore, trial: TrialRecord, stage: StageRecord, ttfts_s: list[float]) -> None:
    sent = tuple(record(index=i, times_s=(ttft, ttft + 0.01)) for i, ttft in enumerate(ttfts_s))
    keep_stage(store.trial_directory(trial.number), MeasuredStage(record=stage, requests=sent, samples=()))


def _measured(config: EngineConfig, number: int, *stages: StageRecord) -> TrialRecord:
    return records.trial(number, config, outcome=Measured(facts=records.facts(config), stages=stages))


def test_loads_and_rates_are_counted_under_the_fence_that_will_be_deployed(tmp_path: Path) -> None:
    """At 32 users a trial of fence 64 serves all at once, where production, of fence 20, lets twelve wait."""
    store = RunStore.create(tmp_path, load_job("embedded"), records.provenance())
    below = records.stage(records.CHOSEN, 16)
    spoilt = below.model_copy(update={"index": 1, "load": 8, "valid": False})
    chosen = records.stage(records.CHOSEN, 20, index=2)
    above = records.stage(records.CHOSEN, 32, index=3)
    studied = _measured(records.CHOSEN, 0, below, spoilt, chosen, above)
    again = records.stage(records.PRODUCTION, 20, kind=StageKind.OPERATING)
    double = records.stage(records.PRODUCTION, 40, index=1, kind=StageKind.DOUBLE)
    burst = records.stage(records.PRODUCTION, 40, index=2, kind=StageKind.BURST)
    rate = records.rate_stage(records.PRODUCTION, 2.5, index=3)
    grew = records.rate_stage(records.PRODUCTION, 3.5, index=4).model_copy(update={"ended_by": "oversaturated"})
    deployed = _measured(records.PRODUCTION, 1, again, double, burst, rate, grew)
    for trial in (studied, deployed):
        assert isinstance(trial.outcome, Measured)
        for stage in trial.outcome.stages:
            _kept(store, trial, stage, [0.1, 0.2, 2.0])
    choice = ProductionChoice(
        trial=studied, knee=records.knee_finding(), stage=chosen, config=records.PRODUCTION, evidence=()
    )

    seen = requests_of(store, choice, [studied, deployed], records.SLO)

    assert [(each.load, each.num_inside, each.num_requests) for each in seen.closed] == [
        (16, 2, 3),
        (20, 2, 3),
        (40, 2, 3),
    ]
    assert [(each.load, each.oversaturated) for each in seen.open] == [(2.5, False), (3.5, True)]
    assert seen.mix is not None
    assert seen.mix.mean_prompt == 10
    assert requests_of(store, None, [studied], records.SLO).mix is None
