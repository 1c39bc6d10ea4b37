"""A tuning job from end to end: search, choose, confirm, answer."""

from __future__ import annotations

import math
import time

from tuner.analysis.profiles import ProductionChoice, choose_production, choose_protective, run_verdict
from tuner.analysis.recommendation import ConfirmedProtective, recommend
from tuner.confirm import confirm_production, confirm_protective
from tuner.job import TuningJob
from tuner.launches import Launches
from tuner.planning import default_values
from tuner.progress import Watcher
from tuner.records import EngineConfig, Provenance, Recommendation, RunVerdict, Slo
from tuner.search import search
from tuner.store import RunStore
from tuner.study import Study
from tuner.trial import TrialRunner

BURST_FACTOR = 2
"""The burst's load, in knees."""


def run_tuning(
    job: TuningJob, store: RunStore, provenance: Provenance, workers: TrialRunner, watcher: Watcher
) -> Recommendation:
    """Run `job` on `workers` and write everything it measures and decides into `store`.

    Returns:
        The answer, also where it is that there is none: the verdict says why.
    """
    begun_s = time.perf_counter()
    defaults = job.config(default_values(job))
    launches = Launches(job, store, workers, watcher, begun_s=begun_s)
    slo = search(job, Study(job.search_space, store.path / "study.journal", seed=job.seed), launches)
    if slo is not None:
        store.write_slo(slo)
    recommendation = _decide(job, store, launches, slo, defaults, provenance)
    store.write_tables(launches.trials)
    store.write_recommendation(recommendation)
    return recommendation


def _decide(
    job: TuningJob,
    store: RunStore,
    launches: Launches,
    slo: Slo | None,
    defaults: EngineConfig,
    provenance: Provenance,
) -> Recommendation:
    """Choose from what the search measured, confirm it with launches of its own, and put the answer together."""
    choice = None if slo is None else choose_production(launches.trials, slo)
    finding = run_verdict(launches.trials, choice, slo)
    launches.note(f"{finding.verdict.value}: {finding.reason}")
    resolved = choice if finding.verdict is RunVerdict.RESOLVED else None
    pair = None if resolved is None else confirm_production(resolved, defaults, launches)
    ceiling = defaults if resolved is None else resolved.config
    protective = None if slo is None else _protect(job, store, launches, slo, ceiling, resolved)
    return recommend(
        finding=finding,
        slo=slo,
        choice=resolved,
        pair=pair,
        protective=protective,
        trials=launches.trials,
        defaults=defaults,
        time=launches.time_split(),
        provenance=provenance,
    )


def _protect(
    job: TuningJob,
    store: RunStore,
    launches: Launches,
    slo: Slo,
    ceiling: EngineConfig,
    choice: ProductionChoice | None,
) -> ConfirmedProtective | None:
    """Try protective candidates with long prompts at twice the knee; without a knee, at twice their own fence."""
    candidates = choose_protective(ceiling, launches.trials, slo, burst_tokens=job.burst.longest_request_tokens)
    if not candidates:
        return None
    knee_load = candidates[0].stage.load if choice is None or choice.knee.load is None else choice.knee.load
    burst_load = math.ceil(BURST_FACTOR * knee_load)
    return confirm_protective(candidates, burst_load=burst_load, slo=slo, launches=launches, store=store)
