"""Confirmation: what was chosen is launched again on its own, and those figures are the reported ones.

The figure that won a selection is flattered by having won it. So production is re-measured in turn with the engine's
defaults, and the protective profile is tried with the burst it is meant to survive.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.analysis.profiles import ProductionChoice, ProtectiveCandidate, judge_burst
from tuner.analysis.recommendation import ConfirmedPair, ConfirmedProtective
from tuner.ladder import FixedSteps, LadderStep
from tuner.launches import Launches
from tuner.planning import MAX_PROTECTIVE_LAUNCHES
from tuner.records import EngineConfig, Slo, StageKind, TrialRole
from tuner.store import RunStore, read_requests

ORDER = (
    TrialRole.CONFIRM_PRODUCTION,
    TrialRole.CONFIRM_BASELINE,
    TrialRole.CONFIRM_BASELINE,
    TrialRole.CONFIRM_PRODUCTION,
)
"""Launches in turn and back: what drifts on the machine meanwhile meets both alike."""


def confirm_production(choice: ProductionChoice, defaults: EngineConfig, launches: Launches) -> ConfirmedPair:
    """Launch production and the defaults in turn, at the operating point and at twice its load."""
    load = choice.stage.load
    plan = FixedSteps(
        steps=(LadderStep(kind=StageKind.OPERATING, load=load), LadderStep(kind=StageKind.DOUBLE, load=2 * load))
    )
    settings = {
        TrialRole.CONFIRM_PRODUCTION: (choice.config, "production"),
        TrialRole.CONFIRM_BASELINE: (defaults, "defaults"),
    }
    launches.expect(len(ORDER) + MAX_PROTECTIVE_LAUNCHES)
    trials = []
    for role in ORDER:
        config, origin = settings[role]
        trials.append(launches.run(role, config, origin=origin, plan=plan))
    return ConfirmedPair(
        production=tuple(trial for trial in trials if trial.role is TrialRole.CONFIRM_PRODUCTION),
        baseline=tuple(trial for trial in trials if trial.role is TrialRole.CONFIRM_BASELINE),
    )


def confirm_protective(
    candidates: Sequence[ProtectiveCandidate], *, burst_load: int, slo: Slo, launches: Launches, store: RunStore
) -> ConfirmedProtective | None:
    """Try candidates with the burst, best first, until one holds; a few launches at the most.

    Returns:
        The first that held, else the one of highest goodput with what went wrong; None where none could be measured.
    """
    tried: list[ConfirmedProtective] = []
    for candidate in candidates[:MAX_PROTECTIVE_LAUNCHES]:
        confirmed = _try(candidate, burst_load, slo, launches, store)
        if confirmed.trial.outcome.outcome == "failed":
            launches.note(
                f"the protective candidate of trial {confirmed.trial.number} did not start and is passed over"
            )
            continue
        tried.append(confirmed)
        if confirmed.burst is not None and confirmed.burst.passed:
            return confirmed
        launches.note("the protective candidate did not hold under the burst")
    return max(tried, key=_goodput_rps, default=None)


def _goodput_rps(confirmed: ConfirmedProtective) -> float:
    return -1.0 if confirmed.burst is None else confirmed.burst.goodput_rps


def _try(
    candidate: ProtectiveCandidate, burst_load: int, slo: Slo, launches: Launches, store: RunStore
) -> ConfirmedProtective:
    operating = LadderStep(kind=StageKind.OPERATING, load=candidate.stage.load)
    burst = LadderStep(kind=StageKind.BURST, load=burst_load)
    trial = launches.run(
        TrialRole.CONFIRM_PROTECTIVE, candidate.config, origin="protective", plan=FixedSteps(steps=(operating, burst))
    )
    stages = trial.outcome.stages if trial.outcome.outcome == "measured" else ()
    measured = [stage for stage in stages if stage.kind is StageKind.BURST]
    evidence = None
    if measured:
        evidence = judge_burst(measured[-1], read_requests(store.trial_directory(trial.number), measured[-1]), slo)
    return ConfirmedProtective(candidate=candidate, trial=trial, burst=evidence)
