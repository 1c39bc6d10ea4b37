"""Choosing the production profile, and the run's verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from tuner import wording
from tuner.analysis.fence import ladder_knee
from tuner.analysis.graph_grid import stages_to_stand_on
from tuner.analysis.noise import launch_noise, widened
from tuner.analysis.pareto import overlap, smaller_first
from tuner.analysis.slo import (
    complies,
    least_violating_stage,
    operating_point,
    violations,
)
from tuner.answer import KneeFinding, LadderVerdict, RunVerdict, Slo
from tuner.engine_config import EngineConfig
from tuner.oom_lessons import ShareCeiling
from tuner.records import (
    CLIMB_KINDS,
    Failed,
    Measured,
    StageRecord,
    TrialRecord,
    TrialRole,
)

WORTH_A_LAUNCH = 0.03
"""Share of the throughput that a tie may give up unexamined; where the search saw more, both are measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductionChoice:
    """The measured stage production is pinned to, before it is confirmed."""

    trial: TrialRecord
    knee: KneeFinding
    stage: StageRecord
    config: EngineConfig
    """The trial's config with its fence at the stage's load, and its share at most the one that is safe."""

    evidence: tuple[str, ...]
    rival: ProductionChoice | None = None
    """The larger setting that gave the most where this one was taken as within noise of it: a close call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinding:
    """What a run says about its question."""

    verdict: RunVerdict
    reason: str
    least_violating_trial: int | None = None


def choose_production(
    trials: Sequence[TrialRecord],
    slo: Slo,
    *,
    ceiling: ShareCeiling | None = None,
    refuted: Collection[EngineConfig] = (),
) -> ProductionChoice | None:
    """The operating point with the most throughput; within noise the smaller setting.

    Trials whose ladder shows a knee come first: a fenced or unfinished ladder is chosen from only where no other is,
    and the run is then not resolved.

    Args:
        trials: any trials; only measured study trials count.
        slo: limits on the operating point.
        ceiling: a share that no choice goes above; None where no higher one ran out of memory.
        refuted: settings that their own launches did not bear out. Several trials may lead to one: all that differ by
            their fence do.
    """
    choices = [
        choice
        for trial, measured in studied(trials)
        if (choice := _pinned(trial, measured, slo, ceiling=ceiling, refuted=refuted)) is not None
    ]
    if not choices:
        return None
    resolved = [choice for choice in choices if choice.knee.verdict is LadderVerdict.KNEE]
    pool = resolved or choices
    noise = launch_noise(trials)
    seen = [(choice, widened(choice.stage.output_throughput, noise)) for choice in pool]
    most, its_throughput = max(seen, key=lambda entry: entry[1].value)
    tied = [choice for choice, throughput in seen if overlap(throughput, its_throughput)]
    smallest = min(tied, key=lambda choice: (*smaller_first(choice.config), choice.trial.number))
    given_up = 1 - smallest.stage.output_throughput.value / its_throughput.value
    return replace(smallest, rival=most) if given_up > WORTH_A_LAUNCH else smallest


def run_verdict(trials: Sequence[TrialRecord], production: ProductionChoice | None, slo: Slo | None) -> RunFinding:
    """The run's verdict and one sentence of reason.

    Args:
        trials: any trials; only study trials count.
        production: what `choose_production` answered.
        slo: limits in force; None where no ladder gave any.
    """
    measured = [(trial, outcome) for trial, outcome in studied(trials) if open_stages(outcome.stages)]
    if not measured:
        return _nothing_feasible(trials)
    if production is not None and production.knee.verdict is LadderVerdict.KNEE:
        return RunFinding(verdict=RunVerdict.RESOLVED, reason=_resolved(production))
    if production is None and slo is not None:
        infeasible = _infeasible(measured, slo)
        if infeasible is not None:
            return infeasible
    return _unresolved(measured)


def studied(trials: Sequence[TrialRecord]) -> Iterator[tuple[TrialRecord, Measured]]:
    """Those the search measured."""
    for trial in trials:
        if trial.role is TrialRole.STUDY and isinstance(trial.outcome, Measured):
            yield trial, trial.outcome


def open_stages(stages: Sequence[StageRecord]) -> list[StageRecord]:
    """The valid stages of a ladder at which all that wanted to run did."""
    return [stage for stage in stages if stage.valid and not stage.fenced and stage.kind in CLIMB_KINDS]


def _pinned(
    trial: TrialRecord,
    measured: Measured,
    slo: Slo,
    *,
    ceiling: ShareCeiling | None,
    refuted: Collection[EngineConfig],
) -> ProductionChoice | None:
    knee = ladder_knee(measured.stages, fence=trial.config.fence)
    stages = [s for s in stages_to_stand_on(measured) if _config_at(s, trial.config, ceiling) not in refuted]
    stage = operating_point(stages, knee, slo)
    if stage is None:
        return None
    bend = "shows no knee: " + knee.verdict.value if knee.load is None else f"bends at load {knee.load:g}"
    most = "the most of all stages left of their own knee and inside the SLO, or within noise of it and smaller"
    evidence = [
        f"{stage.output_throughput.value:.4g} tokens/s at load {stage.load}: {most}",
        f"p95 TTFT {stage.ttft_p95_ms.value:.4g} ms, p95 ITL {stage.itl_p95_ms.value:.4g} ms",
        f"preemptions {wording.preemptions(stage)}, KV use at most {wording.kv_use(stage)}",
        f"the ladder of trial {trial.number} {bend}",
    ]
    asked = trial.config.share
    if ceiling is not None and asked > ceiling.gpu_memory_utilization:
        lowered = f"gpu_memory_utilization {asked:g} lowered to {ceiling.gpu_memory_utilization:g}: {ceiling.reason}"
        evidence.append(lowered)
    config = _config_at(stage, trial.config, ceiling)
    return ProductionChoice(trial=trial, knee=knee, stage=stage, config=config, evidence=tuple(evidence))


def _config_at(stage: StageRecord, config: EngineConfig, ceiling: ShareCeiling | None) -> EngineConfig:
    """The setting with its fence at the stage's load and, where it asks for more, the highest share that is safe."""
    # Users who think may be more than the fence lets run.
    config = config.fenced(min(stage.users, config.fence))
    if ceiling is None or config.share <= ceiling.gpu_memory_utilization:
        return config
    return config.model_copy(update={"gpu_memory_utilization": ceiling.gpu_memory_utilization})


def _resolved(production: ProductionChoice) -> str:
    stage, low_high = production.stage, production.knee.interval
    within = f" ({low_high[0]:g} to {low_high[1]:g})" if low_high else ""
    return (
        f"the knee of trial {production.trial.number} is at load {production.knee.load:g}{within}; load {stage.load} "
        f"left of it gives {stage.output_throughput.value:.4g} tokens/s inside the SLO"
    )


def _nothing_feasible(trials: Sequence[TrialRecord]) -> RunFinding:
    kinds = Counter(
        trial.outcome.kind.value if isinstance(trial.outcome, Failed) else "no valid stage"
        for trial in trials
        if trial.role is TrialRole.STUDY
    )
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none was launched"
    said = Counter(
        trial.outcome.detail for trial in trials if trial.role is TrialRole.STUDY and isinstance(trial.outcome, Failed)
    )
    if said:
        listed += f"; most often: {said.most_common(1)[0][0]}"
    return RunFinding(
        verdict=RunVerdict.NO_FEASIBLE_CONFIG, reason=f"no feasible configuration among {kinds.total()}: {listed}"
    )


def _infeasible(measured: Sequence[tuple[TrialRecord, Measured]], slo: Slo) -> RunFinding | None:
    """The finding of a run where limits, and not the ladders' shape, left nothing to choose; else None."""
    nearest = [
        (trial.number, stage)
        for trial, outcome in measured
        if (stage := least_violating_stage(outcome.stages, slo)) is not None
    ]
    number, stage = min(nearest, key=lambda entry: max(violations(entry[1], slo).values()))
    figures = (
        f"trial {number} at load {stage.load} comes closest, with p95 TTFT {_figure(stage.ttft_p95_ms.value)} of "
        f"{slo.ttft_p95_ms:.4g} ms and p95 ITL {_figure(stage.itl_p95_ms.value)} of {slo.itl_p95_ms:.4g} ms"
    )
    stages = [stage for _, outcome in measured for stage in open_stages(outcome.stages)]
    if not any(
        stage.ttft_p95_ms.value <= slo.ttft_p95_ms and stage.itl_p95_ms.value <= slo.itl_p95_ms for stage in stages
    ):
        reason = f"no stage meets the SLO: {figures}"
        return RunFinding(verdict=RunVerdict.SLO_INFEASIBLE, reason=reason, least_violating_trial=number)
    if not any(_finding(trial, outcome).verdict is LadderVerdict.KNEE for trial, outcome in measured):
        return None
    if any(complies(stage, slo) for stage in stages):
        reason = "no setting has a stage left of its knee inside the SLO without preemption and with KV headroom"
        return RunFinding(
            verdict=RunVerdict.NO_FEASIBLE_CONFIG, reason=f"{reason}: {figures}", least_violating_trial=number
        )
    reason = "no stage inside the SLO has the 59 samples its p95 needs: measure longer"
    return RunFinding(verdict=RunVerdict.TOO_FEW_STAGES, reason=f"{reason}; {figures}", least_violating_trial=number)


def _unresolved(measured: Sequence[tuple[TrialRecord, Measured]]) -> RunFinding:
    """The verdict of ladders without a usable knee: what most promises an answer if repeated otherwise comes first."""
    verdicts = {trial.number: _finding(trial, outcome).verdict for trial, outcome in measured}
    counts = Counter(verdicts.values())
    open_ended = counts[LadderVerdict.NOT_REACHED] + counts[LadderVerdict.FENCED]
    top = max(stage.users for _, outcome in measured for stage in open_stages(outcome.stages))
    if open_ended:
        way_out = "extend the range" if counts[LadderVerdict.NOT_REACHED] else "raise max_num_seqs"
        reason = f"no knee up to load {top} in {open_ended} of {len(measured)} ladders: {way_out}"
        return RunFinding(verdict=RunVerdict.NOT_REACHED, reason=reason + _invalid_beyond(top, measured))
    if counts[LadderVerdict.ALREADY_SATURATED]:
        low = min(stage.load for _, outcome in measured for stage in open_stages(outcome.stages))
        reason = f"already saturated at the lowest load, {low}, in {counts[LadderVerdict.ALREADY_SATURATED]} ladders"
        return RunFinding(verdict=RunVerdict.ALREADY_SATURATED, reason=reason)
    most = max(len(open_stages(outcome.stages)) for _, outcome in measured)
    reason = f"too few valid stages: {most} on the longest of {len(measured)} ladders, where 5 are needed"
    return RunFinding(verdict=RunVerdict.TOO_FEW_STAGES, reason=reason)


def _invalid_beyond(top: int, measured: Sequence[tuple[TrialRecord, Measured]]) -> str:
    """What kept the loads above `top` out of the ladders, where they were measured: more range would not help then."""
    beyond = [stage for _, outcome in measured for stage in outcome.stages if stage.load > top and not stage.valid]
    if not beyond:
        return ""
    (reason, _), *_ = Counter(reason for stage in beyond for reason in stage.invalid_reasons).most_common(1)
    return f"; {len(beyond)} stages beyond it were invalid, such as: {reason}"


def _finding(trial: TrialRecord, outcome: Measured) -> KneeFinding:
    return ladder_knee(outcome.stages, fence=trial.config.fence, num_bootstrap=1)


def _figure(value: float) -> str:
    return f"{value:.4g} ms" if math.isfinite(value) else "unknown"
