"""Confirmation: what was chosen is launched again on its own, and those figures are the reported ones.

The figure that won a selection is flattered by having won it. So production is re-measured in turn with the engine's
defaults, and the protective profile is tried with the burst it is meant to survive.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.analysis.profiles import ProductionChoice, ProtectiveCandidate, judge_burst
from tuner.analysis.recommendation import ConfirmedPair, ConfirmedProtective
from tuner.answer import Slo
from tuner.ladder import FixedSteps, LadderStep
from tuner.launches import Launches
from tuner.oom_lessons import ruled_out
from tuner.planning import MAX_PROTECTIVE_LAUNCHES
from tuner.records import EngineConfig, StageKind, StageRecord, TrialRecord, TrialRole
from tuner.store import RunStore, read_requests

ORDER = (
    TrialRole.CONFIRM_PRODUCTION,
    TrialRole.CONFIRM_BASELINE,
    TrialRole.CONFIRM_BASELINE,
    TrialRole.CONFIRM_PRODUCTION,
)
"""Launches in turn and back: what drifts on the machine meanwhile meets both alike."""


def confirm_production(
    choice: ProductionChoice, defaults: EngineConfig, launches: Launches, *, burst_load: int
) -> ConfirmedPair:
    """Launch production and the defaults in turn, at the operating point and at twice its load.

    Production's last launch is hit with the burst besides, so that protective has something to be compared with. Where
    the job's time is up after one launch of each, that is all. Defaults that ran out of memory are not launched again.
    """
    load = choice.stage.load
    steps = (LadderStep(kind=StageKind.OPERATING, load=load), LadderStep(kind=StageKind.DOUBLE, load=2 * load))
    burst = LadderStep(kind=StageKind.BURST, load=burst_load)
    settings = {
        TrialRole.CONFIRM_PRODUCTION: (choice.config, "production"),
        TrialRole.CONFIRM_BASELINE: (defaults, "defaults"),
    }
    order: tuple[TrialRole, ...] = ORDER
    hopeless = ruled_out(defaults, launches.trials)
    if hopeless is not None:
        launches.note(f"the defaults are not re-measured beside production: {hopeless.detail}")
        order = tuple(role for role in ORDER if role is not TrialRole.CONFIRM_BASELINE)
    launches.expect(len(order) + MAX_PROTECTIVE_LAUNCHES)
    trials: list[TrialRecord] = []
    for number, role in enumerate(order, start=1):
        config, origin = settings[role]
        plan = FixedSteps(
            steps=(*steps, burst) if number == len(order) else steps,
            request_rate_rps=choice.stage.request_throughput_rps,
        )
        trials.append(launches.run(role, config, origin=origin, plan=plan))
        if number == len(order) // 2 and launches.is_time_up():
            launches.note("the job's time is up: production and the defaults were re-measured once each, not twice")
            break
    return ConfirmedPair(
        production=tuple(trial for trial in trials if trial.role is TrialRole.CONFIRM_PRODUCTION),
        baseline=tuple(trial for trial in trials if trial.role is TrialRole.CONFIRM_BASELINE),
    )


def try_protective(
    candidates: Sequence[ProtectiveCandidate], *, burst_load: int, slo: Slo, launches: Launches, store: RunStore
) -> tuple[ConfirmedProtective | None, list[str]]:
    """Hit candidates with the burst, best first, until one holds; a few launches at the most.

    Returns:
        The first that held, else the one of highest goodput, None where none could be measured; and what went wrong
        with those that failed, a sentence each.
    """
    tried: list[ConfirmedProtective] = []
    setbacks: list[str] = []
    for number, candidate in enumerate(candidates[:MAX_PROTECTIVE_LAUNCHES]):
        if number > 0 and launches.is_time_up():
            launches.note("the job's time is up: no further protective candidate is tried")
            break
        trial, stage = _launch(candidate, burst_load, launches)
        if stage is None:
            said = trial.outcome.detail if trial.outcome.outcome == "failed" else "its burst was not measured"
            setbacks.append(f"a protective candidate failed in trial {trial.number}: {said}")
            launches.note(setbacks[-1])
            continue
        burst = judge_burst(stage, read_requests(store.trial_directory(trial.number), stage), slo)
        confirmed = ConfirmedProtective(candidate=candidate, trial=trial, burst=burst)
        if burst.passed:
            return confirmed, setbacks
        tried.append(confirmed)
        launches.note(f"the protective candidate of trial {trial.number} did not hold: {'; '.join(burst.reasons)}")
    return max(tried, key=lambda each: each.burst.goodput_rps, default=None), setbacks


def _launch(
    candidate: ProtectiveCandidate, burst_load: int, launches: Launches
) -> tuple[TrialRecord, StageRecord | None]:
    """Measure the candidate's operating point and the burst; None where the engine did not live to its end."""
    steps = (
        LadderStep(kind=StageKind.OPERATING, load=candidate.stage.load),
        LadderStep(kind=StageKind.BURST, load=burst_load),
    )
    plan = FixedSteps(steps=steps, request_rate_rps=candidate.stage.request_throughput_rps)
    trial = launches.run(TrialRole.CONFIRM_PROTECTIVE, candidate.config, origin="protective", plan=plan)
    stages = trial.outcome.stages if trial.outcome.outcome == "measured" else ()
    bursts = [stage for stage in stages if stage.kind is StageKind.BURST]
    return trial, bursts[-1] if bursts else None
