"""A tuning job from end to end: search, choose, confirm, answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tuner.analysis.explanation import Wanted
from tuner.analysis.profiles import ProductionChoice, choose_production, run_verdict
from tuner.analysis.protective import choose_protective
from tuner.analysis.recommendation import Confirmations, recommend
from tuner.analysis.refutation import ConfirmedPair, refutation, with_room
from tuner.answer import LadderVerdict, Provenance, Recommendation, RunVerdict, Slo
from tuner.confirm import confirm_production, measure_safe_rate, try_protective
from tuner.engine_config import EngineConfig
from tuner.job import TuningJob
from tuner.launches import Launches
from tuner.oom_lessons import ShareCeiling, ruled_out, share_ceiling
from tuner.planning import default_values
from tuner.progress import Watcher
from tuner.records import TrialRecord, TrialRole
from tuner.request_evidence import requests_of
from tuner.search import search
from tuner.store import RunStore
from tuner.study import Study
from tuner.trial import TrialRunner

MAX_CHOICES = 3
"""Choices of production that are confirmed, each further one only where launches refuted the one before."""

BURST_FACTOR = 2
"""The burst's load, in knees."""


def run_tuning(
    job: TuningJob,
    store: RunStore,
    provenance: Provenance,
    workers: TrialRunner,
    watcher: Watcher,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Recommendation:
    """Run `job` on `workers` and write everything it measures and decides into `store`.

    What the store holds already of this job is not done again.

    Returns:
        The answer, also where it is that there is none: the verdict says why.

    Raises:
        StopRequestedError: where the user asked for an end; the run can be gone on with.
    """
    defaults = job.config(default_values(job))
    launches = Launches(job, store, workers, watcher, stop_requested=stop_requested)
    journal = store.path / "study.journal"
    study = Study(job.search_space, journal, seed=job.seed, sampler=job.sampler, impossible=job.impossible)
    slo = search(job, study, launches)
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
    searched = tuple(trial for trial in launches.trials if trial.role is TrialRole.STUDY)
    choice = None if slo is None else choose_production(searched, slo, ceiling=_ceiling(job, launches))
    finding = run_verdict(searched, choice, slo)
    launches.note(f"{finding.verdict.value}: {finding.reason}")
    confirmations = Confirmations()
    if slo is not None and choice is not None and finding.verdict is RunVerdict.RESOLVED:
        confirmations = _confirm(job, searched, choice, slo, defaults, launches)
    if slo is not None and launches.full_device is None:
        confirmations = _protect(job, store, launches, slo, defaults, searched, confirmations)
    choice, pair = confirmations.choice, confirmations.pair
    if slo is not None and choice is not None and pair is not None and launches.full_device is None:
        rate = measure_safe_rate(choice, pair, slo, job, launches)
        confirmations = replace(confirmations, rate=rate)
    if launches.full_devices:
        texts = (device.text for device in launches.full_devices)
        confirmations = replace(confirmations, setbacks=(*confirmations.setbacks, *texts))
    return recommend(
        finding=finding,
        slo=slo,
        confirmations=confirmations,
        trials=launches.trials,
        defaults=defaults,
        time=launches.time_split(),
        provenance=provenance,
        requests=requests_of(store, confirmations.choice, launches.trials, slo),
        wanted=Wanted(expected=job.expected, price_per_device_hour=job.price_per_device_hour),
    )


def _ceiling(job: TuningJob, launches: Launches) -> ShareCeiling | None:
    """What the launches so far teach about the share to recommend."""
    return share_ceiling(launches.so_far(), margin=job.oom_margin)


def _confirm(
    job: TuningJob,
    searched: Sequence[TrialRecord],
    first: ProductionChoice,
    slo: Slo,
    defaults: EngineConfig,
    launches: Launches,
) -> Confirmations:
    """Launch the choice; where its own launches refute it, the next best, a few times at the most.

    The next has as much room as those before were seen to lack. Where none has, the night is not given up for one
    launch that may have met other work on the machine: another that the search saw inside the limits is tried.
    """
    setbacks: list[str] = []
    refuted: list[EngineConfig] = []
    choice: ProductionChoice | None = first
    limits = slo
    for _ in range(MAX_CHOICES):
        if launches.full_device is not None or choice is None or choice.knee.verdict is not LadderVerdict.KNEE:
            break
        burst_load = _burst_load(choice, choice.stage.users)
        candidates = [choice] if choice.rival is None else [choice, choice.rival]
        choice, pair = confirm_production(choice, defaults, launches, job, slo=slo, burst_load=burst_load)
        reason = refutation(choice, pair, slo)
        if reason is None:
            broken = job.broken_by(choice.config)
            if broken is not None:
                setbacks.append(f"production's fence is the load that was measured, and with it {broken}")
            return Confirmations(choice=choice, pair=pair, setbacks=tuple(setbacks))
        launches.note(reason)
        setbacks.append(reason)
        refuted += [choice.config, *(each.config for each in candidates if _is_refuted(each, launches, slo))]
        limits, ceiling = with_room(limits, choice, pair, slo=slo), _ceiling(job, launches)
        choice = choose_production(searched, limits, ceiling=ceiling, refuted=refuted)
        if choice is None or choice.knee.verdict is not LadderVerdict.KNEE:
            choice = choose_production(searched, slo, ceiling=ceiling, refuted=refuted)
    return Confirmations(setbacks=tuple(setbacks))


def _is_refuted(candidate: ProductionChoice, launches: Launches, slo: Slo) -> bool:
    made = [trial for trial in launches.so_far() if trial.role is TrialRole.CONFIRM_PRODUCTION]
    own = tuple(trial for trial in made if trial.config == candidate.config)
    return refutation(candidate, ConfirmedPair(production=own, baseline=()), slo) is not None


def _burst_load(choice: ProductionChoice | None, otherwise: int) -> int:
    load = otherwise if choice is None or choice.knee.load is None else choice.knee.load
    return math.ceil(BURST_FACTOR * load)


def _protect(
    job: TuningJob,
    store: RunStore,
    launches: Launches,
    slo: Slo,
    defaults: EngineConfig,
    searched: Sequence[TrialRecord],
    confirmations: Confirmations,
) -> Confirmations:
    """Add the protective profile: hit with long prompts at twice the knee, or at twice the first candidate's fence."""
    choice = confirmations.choice
    ceiling = defaults if choice is None else choice.config
    chosen = choose_protective(
        ceiling,
        searched,
        slo,
        burst_tokens=job.burst.longest_request_tokens(),
        production_tokens_per_s=0.0 if choice is None else choice.stage.output_throughput.value,
    )
    candidates = [
        candidate
        for candidate in chosen
        if job.broken_by(candidate.config) is None and ruled_out(candidate.config, launches.so_far()) is None
    ]
    if not candidates:
        return confirmations
    burst_load = _burst_load(choice, candidates[0].users)
    protective, setbacks = try_protective(candidates, burst_load=burst_load, slo=slo, launches=launches, store=store)
    return replace(confirmations, protective=protective, setbacks=(*confirmations.setbacks, *setbacks))
