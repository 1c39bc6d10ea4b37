"""The answer of a run, put together from what was chosen and what was confirmed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuner import wording
from tuner.analysis.combine import operating_point_of, ratio
from tuner.analysis.explanation import Requests, Wanted, capacity_of, diagnosis_of
from tuner.analysis.no_safe_rate import none_safe
from tuner.analysis.noise import kept_by_another, launch_noise
from tuner.analysis.not_further import not_further
from tuner.analysis.other_work import other_work_warning
from tuner.analysis.pareto import pareto_front
from tuner.analysis.profiles import ProductionChoice, RunFinding
from tuner.analysis.protective import LIVABLE, ProtectiveCandidate
from tuner.analysis.rates import RateSearch, safe_rate_found
from tuner.analysis.refutation import ConfirmedPair, stages_of
from tuner.answer import (
    Baseline,
    BurstEvidence,
    LaunchNoise,
    OperatingPoint,
    Profile,
    Provenance,
    Recommendation,
    RunVerdict,
    SafeRateFigure,
    Slo,
    TimeSplit,
)
from tuner.engine_config import EngineConfig
from tuner.records import FailureKind, StageKind, StageRecord, TrialRecord, TrialRole
from tuner.wording import preemptions

LITTLE_KEPT = 0.5
"""Share of a rate that another launch is sure to hold, below which the answer warns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedProtective:
    """A candidate for the protective profile that was hit with the burst."""

    candidate: ProtectiveCandidate
    trial: TrialRecord
    burst: BurstEvidence


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedRate:
    """Production under requests that came at a rate."""

    trial: TrialRecord
    search: RateSearch

    @property
    def stages(self) -> tuple[StageRecord, ...]:
        """The rates that were tried; none where the launch failed."""
        return self.trial.outcome.stages if self.trial.outcome.outcome == "measured" else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmations:
    """What the launches after the search showed."""

    choice: ProductionChoice | None = None
    """Production's choice that its own launches bore out; None where there was none, or all were refuted."""

    pair: ConfirmedPair | None = None
    """The launches that re-measured it."""

    protective: ConfirmedProtective | None = None
    rate: ConfirmedRate | None = None
    setbacks: tuple[str, ...] = ()
    """Choices that their own launches refuted, and candidates that failed: a sentence each."""


def recommend(
    *,
    finding: RunFinding,
    slo: Slo | None,
    confirmations: Confirmations,
    trials: Sequence[TrialRecord],
    defaults: EngineConfig,
    time: TimeSplit,
    provenance: Provenance,
    requests: Requests | None = None,
    wanted: Wanted | None = None,
) -> Recommendation:
    """Put the answer together; a `resolved` whose production was refuted is resolved no more.

    Args:
        requests: what single requests of the choice's trial tell; None where they were not kept.
        wanted: what the job says of the deployment.
    """
    requests, wanted = requests or Requests(), wanted or Wanted()
    choice, protective = confirmations.choice, confirmations.protective
    noise = launch_noise(trials)
    production_profile = None if choice is None else _production(choice, confirmations.pair, noise)
    protective_profile = None if protective is None else _protective(protective, confirmations.pair, production_profile)
    verdict, reason = _verdict(finding, choice, production_profile, confirmations.setbacks)
    why_not = None if choice is None or slo is None else not_further(choice, slo)
    if production_profile is not None and why_not is not None:
        reason = f"{reason}; {why_not}"
    rate = confirmations.rate
    safe_rate_rps = None if rate is None else _of_any_launch(safe_rate_found(rate.stages, rate.search.slo), noise)
    diagnosis = diagnosis_of(choice, trials, production_profile, protective_profile, slo, requests.mix)
    simulated = provenance.simulated or any(
        trial.outcome.facts.simulated for trial in trials if trial.outcome.outcome == "measured"
    )
    return Recommendation(
        verdict=verdict,
        reason=reason,
        slo=slo,
        knee=None if choice is None else choice.knee.model_copy(update={"binding": diagnosis.binding}),
        knee_trial=None if choice is None else choice.trial.number,
        diagnosis=diagnosis,
        production=production_profile,
        protective=protective_profile,
        baseline=_baseline(trials, defaults, confirmations.pair, noise),
        pareto=pareto_front(trials),
        launch_noise=noise,
        safe_rate_rps=safe_rate_rps,
        capacity=capacity_of(production_profile, choice, slo, requests, wanted, safe_rate_rps),
        least_violating_trial=finding.least_violating_trial,
        num_trials=len(trials),
        num_failed=sum(trial.outcome.outcome == "failed" for trial in trials),
        time=time,
        provenance=provenance.model_copy(update={"device": _device(trials, provenance), "simulated": simulated}),
        warnings=(
            *_simulated(simulated=simulated),
            *confirmations.setbacks,
            *_failed_defaults(trials, defaults),
            *_crashes(trials, (production_profile, protective_profile)),
            *_warnings(production_profile, protective_profile),
            *([] if production_profile is None else _no_safe_rate(rate)),
            *([] if safe_rate_rps is None else _scattered(noise)),
            *_disturbed(confirmations),
        ),
    )


def _of_any_launch(figure: SafeRateFigure | None, noise: LaunchNoise | None) -> SafeRateFigure | None:
    """The rate with a lower end that holds for another launch as well.

    Where every step takes f times as long, arrivals at 1 / f of the rate meet the same queues, all of it f times as
    slow. So what a slower launch holds is the rate times the share of the speed that it keeps.
    """
    if figure is None or noise is None:
        return figure
    return figure.model_copy(update={"low": figure.value * kept_by_another(noise)})


def _scattered(noise: LaunchNoise | None) -> Iterator[str]:
    """A warning where what the next launch holds can hardly be told from this one."""
    if noise is not None and kept_by_another(noise) < LITTLE_KEPT:
        yield (
            f"launches of one setting differ by {wording.share(noise.relative_sd)} (sd of {noise.num_launches}), so "
            f"that another may hold {wording.share(kept_by_another(noise))} of this one's rate: see what else runs "
            "on the machine, or allow more trials"
        )


def _verdict(
    finding: RunFinding, choice: ProductionChoice | None, production: Profile | None, setbacks: Sequence[str]
) -> tuple[RunVerdict, str]:
    if finding.verdict is not RunVerdict.RESOLVED:
        return finding.verdict, finding.reason
    if choice is None or production is None:
        return RunVerdict.NO_FEASIBLE_CONFIG, "; ".join(setbacks) or "no choice could be confirmed"
    knee, point = choice.knee, production.operating_point
    within = "" if knee.interval is None else f" ({knee.interval[0]:g} to {knee.interval[1]:g})"
    return finding.verdict, (
        f"the knee of trial {choice.trial.number} is at load {knee.load:g}{within}; load {point.load} left of it gives "
        f"{point.output_throughput.value:.4g} tokens/s inside the SLO, re-measured by "
        f"{len(production.confirmed_by)} launches of its own"
    )


def _device(trials: Sequence[TrialRecord], provenance: Provenance) -> str:
    """What the engine said it computes on; as asked for where no engine ever came up."""
    for trial in trials:
        if trial.outcome.outcome == "measured":
            facts = trial.outcome.facts
            size = "" if facts.memory_total_bytes is None else f", {facts.memory_total_bytes / 2**20:.0f} MiB"
            return f"{facts.device}{size}"
    return provenance.device


def _production(choice: ProductionChoice, pair: ConfirmedPair | None, noise: LaunchNoise | None) -> Profile:
    confirmations = () if pair is None else pair.production
    measured = stages_of(confirmations, StageKind.OPERATING)
    point = operating_point_of(measured or [choice.stage], noise)
    double = stages_of(confirmations, StageKind.DOUBLE)
    evidence = list(choice.evidence)
    if measured:
        evidence.append(
            f"re-measured by {len(measured)} launches of its own: {point.output_throughput.value:.4g} tokens/s, "
            f"where the search had seen {choice.stage.output_throughput.value:.4g}"
        )
    if noise is not None:
        evidence.append(
            f"launches of one and the same schedule differed by {noise.relative_sd:.1%} (standard deviation, beyond "
            f"what each stage's interval shows; {noise.num_launches} launches of this run)"
        )
    evidence += [f"at twice that load {_figures(double)}"] if double else []
    unfenced = [] if pair is None else stages_of(pair.baseline, StageKind.DOUBLE, load=2 * point.load)
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


def _protective(confirmed: ConfirmedProtective, pair: ConfirmedPair | None, production: Profile | None) -> Profile:
    candidate = confirmed.candidate
    measured = stages_of([confirmed.trial], StageKind.OPERATING)
    point = operating_point_of(measured or [candidate.stage])
    evidence = [f"measured by trial {candidate.trial} at load {candidate.stage.load}"]
    if production is not None:
        evidence.append(f"it serves {_share_served(point, production):.0%} of production's throughput")
    evidence += [
        f"production under the same burst: {_figures([stage])}, preemptions {preemptions(stage)}"
        for stage in ([] if pair is None else stages_of(pair.production, StageKind.BURST))
    ]
    return Profile(
        name="protective",
        config=candidate.config,
        operating_point=point,
        trial=candidate.trial,
        confirmed_by=_numbers([confirmed.trial]),
        evidence=tuple(evidence),
        cuts=candidate.cuts,
        burst=confirmed.burst,
    )


def _share_served(point: OperatingPoint, production: Profile) -> float:
    return point.output_throughput.value / production.operating_point.output_throughput.value


def _baseline(
    trials: Sequence[TrialRecord], defaults: EngineConfig, pair: ConfirmedPair | None, noise: LaunchNoise | None
) -> Baseline | None:
    studied = [trial for trial in trials if trial.role is TrialRole.STUDY and trial.config == defaults]
    if not studied:
        return None
    confirmations = () if pair is None else pair.baseline
    production = [] if pair is None else stages_of(pair.production, StageKind.OPERATING)
    measured = stages_of(confirmations, StageKind.OPERATING, load=production[-1].load if production else None)
    return Baseline(
        trial=studied[0].number,
        config=defaults,
        operating_point=operating_point_of(measured, noise) if measured else None,
        confirmed_by=_numbers(confirmations),
        throughput_gain=ratio(
            [stage.output_throughput for stage in production], [stage.output_throughput for stage in measured], noise
        ),
    )


def _numbers(trials: Sequence[TrialRecord]) -> tuple[int, ...]:
    return tuple(trial.number for trial in trials if trial.outcome.outcome == "measured")


def _simulated(*, simulated: bool) -> list[str]:
    """The first thing to know of a rehearsal."""
    said = "simulated: step times came from a law, not from a device; a rehearsal that no deployment may rest on"
    return [said] if simulated else []


def _crashes(trials: Sequence[TrialRecord], profiles: Sequence[Profile | None]) -> list[str]:
    """A profile whose config crashed once and then held is told of it: the next crash may come at night."""
    return [
        f"{profile.name}: its config crashed in trial {trial.number} and held when tried again; "
        f"read trials/{trial.number:04d}/engine.log"
        for profile in profiles
        if profile is not None
        for trial in trials
        if trial.config == profile.config
        and trial.outcome.outcome == "failed"
        and trial.outcome.kind is FailureKind.CRASHED
    ]


def _warnings(production: Profile | None, protective: Profile | None) -> list[str]:
    """What the answer does not carry; said, never smoothed over."""
    found = []
    if protective is not None and protective.burst is not None and not protective.burst.passed:
        found.append(f"protective did not hold under the burst: {'; '.join(protective.burst.reasons)}")
    if production is not None and protective is None:
        found.append("there is no protective profile")
    if production is not None and protective is not None:
        served = _share_served(protective.operating_point, production)
        if served < LIVABLE:
            found.append(
                f"protective serves {served:.0%} of production's throughput: nothing that serves more was shown to hold"
            )
    return found


def _no_safe_rate(rate: ConfirmedRate | None) -> list[str]:
    """Why there is none, and what that means."""
    if rate is None or not rate.stages:
        return ["no safe rate was measured: an open loop needs headroom below these closed-loop figures"]
    why = none_safe(rate.stages, rate.search.slo)
    return [] if why is None else [why]


def _disturbed(confirmations: Confirmations) -> list[str]:
    pair, protective, rate = confirmations.pair, confirmations.protective, confirmations.rate
    launches = [] if pair is None else [*pair.production, *pair.baseline]
    launches += [] if protective is None else [protective.trial]
    launches += [] if rate is None else [rate.trial]
    warning = other_work_warning(sorted(launches, key=lambda trial: trial.number))
    return [] if warning is None else [warning]


def _failed_defaults(trials: Sequence[TrialRecord], defaults: EngineConfig) -> list[str]:
    """That there is nothing to compare with, where the engine's own defaults never gave a ladder."""
    tried = [trial for trial in trials if trial.role is TrialRole.STUDY and trial.config == defaults]
    failed = [trial for trial in tried if trial.outcome.outcome == "failed"]
    return [
        f"the engine's defaults failed in trial {trial.number}: {trial.outcome.kind.value}: {trial.outcome.detail}"
        for trial in failed
        if trial.outcome.outcome == "failed" and len(failed) == len(tried)
    ]
