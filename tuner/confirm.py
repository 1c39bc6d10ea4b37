"""Confirmation: what was chosen is launched again on its own, and those figures are the reported ones.

The figure that won a selection is flattered by having won it. So production is re-measured in turn with the engine's
defaults, and the protective profile is tried with the burst it is meant to survive.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.analysis.combine import ratio
from tuner.analysis.noise import launch_noise
from tuner.analysis.profiles import ProductionChoice
from tuner.analysis.protective import ProtectiveCandidate, judge_burst, next_candidate
from tuner.analysis.rates import RateSearch
from tuner.analysis.recommendation import ConfirmedProtective, ConfirmedRate
from tuner.analysis.refutation import ConfirmedPair, refutation, stages_of
from tuner.answer import Slo
from tuner.engine_config import EngineConfig
from tuner.job import TuningJob
from tuner.ladder import FixedSteps, LadderStep
from tuner.launches import Launches
from tuner.oom_lessons import ruled_out
from tuner.planning import (
    MAX_PROTECTIVE_LAUNCHES,
    PROTECTIVE_CHOICE,
    SAFE_RATE_STAGES,
    SAFE_RATE_STEP,
    safe_rate_s,
)
from tuner.records import Estimate, StageKind, StageRecord, TrialRecord, TrialRole
from tuner.store import RunStore, read_requests
from tuner.wording import config_text


def confirm_production(
    choice: ProductionChoice, defaults: EngineConfig, launches: Launches, job: TuningJob, *, slo: Slo, burst_load: int
) -> tuple[ProductionChoice, ConfirmedPair]:
    """Launch production and the defaults in turn, at the operating point and at twice its load.

    A close call takes part: where the search had seen a larger setting give more, but within noise, that rival is
    launched in turn with the two, and is production if it is ahead beyond noise now that nobody picked the figure.
    They go in turn and back, so that what drifts on the machine meanwhile meets all alike. Production's last launch is
    hit with the burst besides, so that protective has something to be compared with. Where the job's time is up after
    one launch of each, or the first has refuted the choice, that is all. Defaults that ran out of memory are not
    launched again.

    Returns:
        The choice that stands, and the launches of it and of the defaults.
    """
    candidates = [choice] if choice.rival is None else [choice, choice.rival]
    turn: list[ProductionChoice | None] = [*candidates, None]
    hopeless = ruled_out(defaults, launches.so_far())
    if hopeless is not None:
        launches.note(f"the defaults are not re-measured beside production: {hopeless.detail}")
        turn.remove(None)
    rate_s = safe_rate_s(job, start_s=choice.trial.start_s, rate_rps=choice.stage.request_throughput_rps)
    launches.expect(2 * len(turn) + MAX_PROTECTIVE_LAUNCHES, besides_s=rate_s)
    first = [(each, _confirm_once(each, candidates, defaults, launches, slo=slo, burst_load=None)) for each in turn]
    if choice.rival is None and _is_refuted(once := _stands(choice, first, launches, slo), slo):
        return once
    goes_on = any(launches.has_begun(TrialRole.CONFIRM_PRODUCTION, each.config) for each in candidates)
    if launches.is_time_up() and not goes_on:
        launches.note("the job's time is up: production and the defaults were re-measured once each, not twice")
        return _stands(choice, first, launches, slo)
    again = [
        (each, _confirm_once(each, candidates, defaults, launches, slo=slo, burst_load=burst_load))
        for each in turn[::-1]
    ]
    return _stands(choice, [*first, *again], launches, slo)


def _is_refuted(once: tuple[ProductionChoice, ConfirmedPair], slo: Slo) -> bool:
    """Whether one launch is enough to tell: one that failed is tried again, one that broke a limit is not."""
    choice, pair = once
    return bool(stages_of(pair.production, StageKind.OPERATING)) and refutation(choice, pair, slo) is not None


def _confirm_once(
    each: ProductionChoice | None,
    candidates: Sequence[ProductionChoice],
    defaults: EngineConfig,
    launches: Launches,
    *,
    slo: Slo,
    burst_load: int | None,
) -> TrialRecord:
    """One launch: of a candidate at its own load, with the burst at the end if there is one; of the defaults (None)."""
    stages = [candidate.stage for candidate in candidates] if each is None else [each.stage]
    loads = sorted({stage.users for stage in stages})
    steps = [LadderStep(kind=StageKind.OPERATING, load=load) for load in loads]
    steps += [LadderStep(kind=StageKind.DOUBLE, load=2 * load) for load in loads]
    if each is not None and burst_load is not None:
        steps.append(LadderStep(kind=StageKind.BURST, load=burst_load))
    rate_rps = min(stage.request_throughput_rps for stage in stages)
    plan = FixedSteps(steps=tuple(steps), request_rate_rps=rate_rps, slo=slo)
    if each is None:
        return launches.run(TrialRole.CONFIRM_BASELINE, defaults, origin="defaults", plan=plan)
    origin = "production" if each is candidates[0] else "rival"
    return launches.run(TrialRole.CONFIRM_PRODUCTION, each.config, origin=origin, plan=plan)


def _stands(
    choice: ProductionChoice,
    made: Sequence[tuple[ProductionChoice | None, TrialRecord]],
    launches: Launches,
    slo: Slo,
) -> tuple[ProductionChoice, ConfirmedPair]:
    """Who is production: the choice, or its rival where that is faster beyond noise and bears its own launches."""

    def of(who: ProductionChoice | None) -> tuple[TrialRecord, ...]:
        return tuple(trial for each, trial in made if each is who)

    standing, rival = choice, choice.rival
    if rival is not None and refutation(rival, ConfirmedPair(production=of(rival), baseline=()), slo) is None:
        ahead = ratio(_throughputs(of(rival)), _throughputs(of(choice)), launch_noise(launches.so_far()))
        if ahead is not None and ahead.low is not None and ahead.low > 1:
            launches.note(f"{config_text(rival.config)} gives {ahead.value:.2f} times as much, beyond noise: taken")
            standing = rival
    return standing, ConfirmedPair(production=of(standing), baseline=of(None))


def _throughputs(trials: Sequence[TrialRecord]) -> list[Estimate]:
    return [stage.output_throughput for stage in stages_of(trials, StageKind.OPERATING)]


def measure_safe_rate(
    choice: ProductionChoice, pair: ConfirmedPair, slo: Slo, job: TuningJob, launches: Launches
) -> ConfirmedRate | None:
    """Launch production once more and send it requests at a rate: the highest that stays inside the limits.

    Returns:
        None where the job's time does not allow it, or production's own launches gave no rate to begin from.
    """
    stages = stages_of(pair.production, StageKind.OPERATING)
    if not stages:
        return None
    if job.workload.has_turns:
        launches.note("no safe rate: where requests follow each other in turns, an arrival is a conversation")
        return None
    start_s = max(trial.start_s for trial in pair.production)
    ceiling_rps = sum(stage.request_throughput_rps for stage in stages) / len(stages)
    needed_s, left_s = safe_rate_s(job, start_s=start_s, rate_rps=ceiling_rps), launches.seconds_left()
    if left_s < needed_s and not launches.has_begun(TrialRole.SAFE_RATE, choice.config):
        launches.note(f"no time for a safe rate: it takes about {needed_s:.0f} s, {left_s:.0f} s are left")
        return None
    search = RateSearch(
        slo=slo,
        ceiling_rps=ceiling_rps,
        request_s=max(1e-3 * stage.e2e_p50_ms.value for stage in stages),
        most_stages=SAFE_RATE_STAGES,
        relative_step=SAFE_RATE_STEP,
    )
    launches.expect(0, besides_s=needed_s)
    trial = launches.run(TrialRole.SAFE_RATE, choice.config, origin="production", plan=search)
    return ConfirmedRate(trial=trial, search=search)


def try_protective(
    candidates: Sequence[ProtectiveCandidate], *, burst_load: int, slo: Slo, launches: Launches, store: RunStore
) -> tuple[ConfirmedProtective | None, list[str]]:
    """Hit candidates with the burst, best first: two, so that there is a choice, and one more where neither held.

    Returns:
        Of those that held the one of highest goodput under the burst, else of all; None where none could be measured;
        and what went wrong with those that failed, a sentence each.
    """
    tried: list[ConfirmedProtective] = []
    setbacks: list[str] = []
    launched: list[tuple[EngineConfig, bool]] = []
    while len(launched) < (PROTECTIVE_CHOICE if any(held for _, held in launched) else MAX_PROTECTIVE_LAUNCHES):
        candidate = next_candidate(candidates, launched)
        if candidate is None:
            break
        if launched and launches.is_time_up() and not _has_begun(candidate, launches):
            launches.note("the job's time is up: no further protective candidate is tried")
            break
        trial, stage = _launch(candidate, burst_load, slo, launches)
        if stage is None:
            said = trial.outcome.detail if trial.outcome.outcome == "failed" else "its burst was not measured"
            setbacks.append(f"a protective candidate failed in trial {trial.number}: {said}")
            launches.note(setbacks[-1])
            launched.append((candidate.config, False))
            continue
        burst = judge_burst(stage, read_requests(store.trial_directory(trial.number), stage), slo)
        tried.append(ConfirmedProtective(candidate=candidate, trial=trial, burst=burst))
        launched.append((candidate.config, burst.passed))
        if not burst.passed:
            launches.note(f"the protective candidate of trial {trial.number} did not hold: {'; '.join(burst.reasons)}")
    return max(tried, key=lambda each: (each.burst.passed, each.burst.goodput_rps), default=None), setbacks


def _has_begun(candidate: ProtectiveCandidate, launches: Launches) -> bool:
    return launches.has_begun(TrialRole.CONFIRM_PROTECTIVE, candidate.config)


def _launch(
    candidate: ProtectiveCandidate, burst_load: int, slo: Slo, launches: Launches
) -> tuple[TrialRecord, StageRecord | None]:
    """Measure the candidate's operating point and the burst; None where the engine did not live to its end."""
    steps = (
        LadderStep(kind=StageKind.OPERATING, load=candidate.users),
        LadderStep(kind=StageKind.BURST, load=burst_load),
    )
    plan = FixedSteps(steps=steps, request_rate_rps=candidate.stage.request_throughput_rps, slo=slo)
    trial = launches.run(TrialRole.CONFIRM_PROTECTIVE, candidate.config, origin="protective", plan=plan)
    stages = trial.outcome.stages if trial.outcome.outcome == "measured" else ()
    bursts = [stage for stage in stages if stage.kind is StageKind.BURST]
    return trial, bursts[-1] if bursts else None
