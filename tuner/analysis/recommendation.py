"""The answer of a run, put together from what was chosen and what was confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.analysis.combine import operating_point_of, ratio
from tuner.analysis.diagnosis import binding
from tuner.analysis.pareto import pareto_front
from tuner.analysis.profiles import ProductionChoice, ProtectiveCandidate, RunFinding
from tuner.records import (
    Baseline,
    BurstEvidence,
    EngineConfig,
    KneeFinding,
    Profile,
    Provenance,
    Recommendation,
    Slo,
    StageKind,
    StageRecord,
    TimeSplit,
    TrialRecord,
    TrialRole,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedPair:
    """Production and the defaults, re-measured in turn at the same loads."""

    production: tuple[TrialRecord, ...]
    baseline: tuple[TrialRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedProtective:
    """A candidate for the protective profile and what its own launch showed."""

    candidate: ProtectiveCandidate
    trial: TrialRecord
    burst: BurstEvidence | None
    """None where the burst could not be measured."""


def recommend(
    *,
    finding: RunFinding,
    slo: Slo | None,
    choice: ProductionChoice | None,
    pair: ConfirmedPair | None,
    protective: ConfirmedProtective | None,
    trials: Sequence[TrialRecord],
    defaults: EngineConfig,
    time: TimeSplit,
    provenance: Provenance,
) -> Recommendation:
    """Put the answer together.

    Args:
        choice: production's choice; given only where the verdict is `resolved`.
        pair: the launches that re-measured it; None where there was nothing to confirm.
    """
    production_profile = None if choice is None else _production(choice, pair)
    protective_profile = None if protective is None else _protective(protective)
    return Recommendation(
        verdict=finding.verdict,
        reason=finding.reason,
        slo=slo,
        knee=None if choice is None else _knee(choice),
        knee_trial=None if choice is None else choice.trial.number,
        production=production_profile,
        protective=protective_profile,
        baseline=_baseline(trials, defaults, pair),
        pareto=pareto_front(trials),
        least_violating_trial=finding.least_violating_trial,
        num_trials=len(trials),
        num_failed=sum(trial.outcome.outcome == "failed" for trial in trials),
        time=time,
        provenance=provenance,
        warnings=tuple(_warnings(production_profile, protective_profile, slo)),
    )


def stages_of(trials: Sequence[TrialRecord], kind: StageKind) -> list[StageRecord]:
    """The valid stages of that kind, of each measured trial the last one."""
    found = []
    for trial in trials:
        if trial.outcome.outcome == "measured":
            found += [stage for stage in trial.outcome.stages if stage.kind is kind and stage.valid][-1:]
    return found


def _knee(choice: ProductionChoice) -> KneeFinding:
    outcome = choice.trial.outcome
    stages = outcome.stages if outcome.outcome == "measured" else ()
    return choice.knee.model_copy(update={"binding": binding(stages, choice.knee, choice.trial.config)})


def _production(choice: ProductionChoice, pair: ConfirmedPair | None) -> Profile:
    confirmations = () if pair is None else pair.production
    measured = stages_of(confirmations, StageKind.OPERATING)
    point = operating_point_of(measured or [choice.stage])
    double = stages_of(confirmations, StageKind.DOUBLE)
    evidence = list(choice.evidence)
    if measured:
        evidence.append(
            f"re-measured by {len(measured)} launches of its own: {point.output_throughput.value:.4g} tokens/s, "
            f"where the search had seen {choice.stage.output_throughput.value:.4g}"
        )
    evidence += [f"at twice that load {_figures(double)}"] if double else []
    unfenced = [] if pair is None else stages_of(pair.baseline, StageKind.DOUBLE)
    evidence += [f"where the defaults gave {_figures(unfenced)}"] if double and unfenced else []
    return Profile(
        name="production",
        config=choice.config,
        operating_point=point,
        trial=choice.trial.number,
        confirmed_by=_numbers(confirmations),
        evidence=tuple(evidence),
    )


def _figures(stages: Sequence[StageRecord]) -> str:
    point = operating_point_of(stages)
    return (
        f"{point.output_throughput.value:.4g} tokens/s, p95 TTFT {point.ttft_p95_ms.value:.4g} ms, "
        f"p95 ITL {point.itl_p95_ms.value:.4g} ms"
    )


def _protective(confirmed: ConfirmedProtective) -> Profile:
    candidate = confirmed.candidate
    measured = stages_of([confirmed.trial], StageKind.OPERATING)
    return Profile(
        name="protective",
        config=candidate.config,
        operating_point=operating_point_of(measured or [candidate.stage]),
        trial=candidate.trial,
        confirmed_by=_numbers([confirmed.trial]),
        evidence=(f"measured by trial {candidate.trial} at load {candidate.stage.load}",),
        cuts=candidate.cuts,
        burst=confirmed.burst,
    )


def _baseline(trials: Sequence[TrialRecord], defaults: EngineConfig, pair: ConfirmedPair | None) -> Baseline | None:
    studied = [trial for trial in trials if trial.role is TrialRole.STUDY and trial.config == defaults]
    if not studied:
        return None
    confirmations = () if pair is None else pair.baseline
    measured = stages_of(confirmations, StageKind.OPERATING)
    production = () if pair is None else stages_of(pair.production, StageKind.OPERATING)
    return Baseline(
        trial=studied[0].number,
        config=defaults,
        operating_point=operating_point_of(measured) if measured else None,
        confirmed_by=_numbers(confirmations),
        throughput_gain=ratio(
            [stage.output_throughput for stage in production], [stage.output_throughput for stage in measured]
        ),
    )


def _numbers(trials: Sequence[TrialRecord]) -> tuple[int, ...]:
    return tuple(trial.number for trial in trials if trial.outcome.outcome == "measured")


def _warnings(production: Profile | None, protective: Profile | None, slo: Slo | None) -> list[str]:
    """What the re-measured figures contradict; said, never smoothed over."""
    found = []
    if production is not None:
        found += _point_warnings("production", production, slo)
        if not production.confirmed_by:
            found.append("production was not re-measured: no launch of its own gave a valid stage")
    if protective is not None:
        found += _point_warnings("protective", protective, slo)
        if protective.burst is None:
            found.append("protective was not tried with the burst: no launch of its own gave that stage")
        elif not protective.burst.passed:
            found.append(f"protective did not hold under the burst: {'; '.join(protective.burst.reasons)}")
    if production is not None and protective is None:
        found.append("no protective profile: nothing below production was measured")
    found.append("no safe rate was measured: the figures are for a closed loop, an open one needs headroom below them")
    return found


def _point_warnings(name: str, profile: Profile, slo: Slo | None) -> list[str]:
    point = profile.operating_point
    found = []
    if point.num_preemptions:
        found.append(f"{name} preempted {point.num_preemptions} times when re-measured at load {point.load}")
    if slo is not None:
        for figure, value, limit in (
            ("TTFT", point.ttft_p95_ms.value, slo.ttft_p95_ms),
            ("ITL", point.itl_p95_ms.value, slo.itl_p95_ms),
        ):
            if value > limit:
                found.append(f"{name} missed its p95 {figure} limit when re-measured: {value:.4g} of {limit:.4g} ms")
    return found
