"""The search: propose, refuse or launch, tell, until the budget is spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.analysis.knee import find_knee, points_of
from tuner.analysis.slo import derive_slo, least_violating_stage, operating_point, violations
from tuner.answer import Slo
from tuner.conditions import Condition
from tuner.job import TuningJob
from tuner.ladder import Ladder
from tuner.launches import Launches
from tuner.memory_model import MemoryModel
from tuner.oom_lessons import ruled_out
from tuner.planning import (
    CONFIRMATION_LAUNCHES,
    CONFIRMATION_STAGES,
    MAX_PROTECTIVE_LAUNCHES,
    PROTECTIVE_STAGES,
    cautious_values,
    default_values,
    longest_stage_s,
)
from tuner.records import SAYS_NOTHING, EngineConfig, Failed, FailureKind, TrialRecord, TrialRole
from tuner.space import broken_condition, broken_rule
from tuner.study import Objectives, Proposal, Study

DEFAULTS_ORIGIN = "defaults"
CAUTIOUS_ORIGIN = "cautious_start"
STAGE_RESERVE = 1.5
"""A confirming stage is held at a higher load than the mean rung, and takes so many times as long."""

FAILED_ALIKE = 3
"""Settings that all failed for one and the same reason, word for word: what is wrong is none of them."""

FEWEST_LAUNCHES = 2
"""The defaults and the cautious start are measured whatever the clock says."""


@dataclass(slots=True)
class _Findings:
    """What the study's trials have told so far."""

    slo: Slo | None
    """The job's limits, or those derived from the first ladder."""

    memory: MemoryModel | None = None
    start: int = 2
    """Where the next ladder starts after load 1: two doublings below the last knee."""

    def take_in(self, trial: TrialRecord) -> None:
        """Learn from a trial, if it is one of the study and was measured."""
        if trial.role is TrialRole.STUDY and trial.outcome.outcome == "measured":
            self.slo = self.slo or derive_slo(trial.outcome.stages)
            self.memory = self.memory or MemoryModel.calibrated(trial.config, trial.outcome.facts)
            knee = find_knee(points_of(trial.outcome.stages), num_bootstrap=0).load
            if knee is not None and knee >= 8:
                self.start = 2 ** math.floor(math.log2(knee / 4))


def search(job: TuningJob, study: Study, launches: Launches) -> Slo | None:
    """Measure settings until trials, time or the space are used up; what an earlier process measured counts.

    Returns:
        The limits in force: the job's, or those derived from the first ladder; None if no ladder was climbed.
    """
    study.enqueue(default_values(job), DEFAULTS_ORIGIN)
    study.enqueue(cautious_values(job), CAUTIOUS_ORIGIN)
    findings = _Findings(job.limits())
    for trial in launches.trials:
        findings.take_in(trial)
    while study.num_left_open or launches.num_settings_launched() < job.budget.trials:
        num_launched = launches.num_settings_launched()
        if num_launched >= FEWEST_LAUNCHES and not _has_time(job, launches):
            launches.note(
                f"the search ends after {num_launched} launches: the rest of the budget, "
                f"{launches.seconds_left():.0f} s, is for confirming"
            )
            break
        proposal = study.ask()
        if proposal is None:
            launches.note(f"every setting of the space is known after {num_launched} launches: the search ends early")
            break
        trial = _try(job, proposal, launches, findings)
        findings.take_in(trial)
        _tell(study, proposal, trial, findings.slo)
        if launches.full_device is not None:
            launches.note(f"the search ends: {launches.full_device.device} is not free for another launch")
            break
        if (alike := _all_failed_alike(launches.trials)) is not None:
            launches.note(f"the search ends: {FAILED_ALIKE} different settings failed alike and none worked: {alike}")
            break
    return findings.slo


def _all_failed_alike(trials: Sequence[TrialRecord]) -> str | None:
    """Why every setting launched so far was refused, where that is one and the same reason: it is not in them."""
    outcomes = {trial.config: trial.outcome for trial in trials if trial.launched}
    reasons = {
        outcome.detail if outcome.outcome == "failed" and outcome.kind is FailureKind.INVALID_CONFIG else None
        for outcome in outcomes.values()
    }
    return reasons.pop() if len(outcomes) >= FAILED_ALIKE and len(reasons) == 1 else None


def _try(job: TuningJob, proposal: Proposal, launches: Launches, findings: _Findings) -> TrialRecord:
    """The proposal's trial: known from before, answered by another, refused, or launched now."""
    config = job.config(proposal.values)
    known = launches.last_of(config) or _answered(config, launches)
    if known is not None:
        return known
    conditions = () if proposal.origin == DEFAULTS_ORIGIN else job.search_space.conditions
    refused = _refusal(config, conditions, findings.memory, launches.trials)
    if refused is not None:
        return launches.refuse(config, origin=proposal.origin, failed=refused)
    launches.expect(job.budget.trials - launches.num_settings_launched() + CONFIRMATION_LAUNCHES // 2)
    ladder = Ladder(max_num_seqs=config.fence, max_load=job.max_load, start=findings.start)
    trial = launches.run(TrialRole.STUDY, config, origin=proposal.origin, plan=ladder)
    if trial.outcome.outcome == "measured":
        memory = findings.memory or MemoryModel.calibrated(config, trial.outcome.facts)
        _warn_of_preemptions(job, config, memory, launches)
    return trial


def _answered(config: EngineConfig, launches: Launches) -> TrialRecord | None:
    """What a trial of a higher fence says of this one, all else equal; None if there is no such trial.

    In a closed loop at a load within the fence every higher fence gives the same schedule: its stages are the answer.
    The record is for the sampler only, it is not kept: the stages it points at are the other trial's.
    """
    for trial in launches.trials:
        if trial.role is not TrialRole.STUDY or trial.outcome.outcome != "measured":
            continue
        higher, seqs, fence = trial.config, config.max_num_seqs, config.fence
        if higher.max_num_seqs > seqs and higher.model_copy(update={"max_num_seqs": seqs}) == config:
            within = tuple(stage for stage in trial.outcome.stages if stage.load <= fence)
            launches.note(f"max_num_seqs={seqs} with the rest of trial {trial.number} is answered by it: no launch")
            outcome = trial.outcome.model_copy(update={"stages": within})
            return trial.model_copy(update={"config": config, "outcome": outcome})
    return None


def _warn_of_preemptions(job: TuningJob, config: EngineConfig, memory: MemoryModel | None, launches: Launches) -> None:
    if memory is None or not memory.covers(config):
        return
    fit = memory.requests_that_fit(config, job.workload.mean_request_tokens)
    if fit < config.fence:
        launches.note(
            f"preemption-prone: {config.fence} requests may run at once, but the KV cache holds about {fit} "
            f"requests of {job.workload.mean_request_tokens:g} tokens"
        )


def _has_time(job: TuningJob, launches: Launches) -> bool:
    """Whether one more ladder fits before the confirmations must begin, by what starts and stages have taken so far."""
    ladder_s = launches.mean_launch_s(TrialRole.STUDY) or 0.0
    start_s = max((trial.start_s for trial in launches.trials), default=0.0)
    mean_s = launches.mean_stage_s()
    stage_s = longest_stage_s(job) if mean_s is None else STAGE_RESERVE * mean_s
    confirmation_s = CONFIRMATION_LAUNCHES * (start_s + CONFIRMATION_STAGES * stage_s)
    confirmation_s += MAX_PROTECTIVE_LAUNCHES * (start_s + PROTECTIVE_STAGES * stage_s)
    return ladder_s + confirmation_s <= launches.seconds_left()


def _refusal(
    config: EngineConfig, conditions: Sequence[Condition], memory: MemoryModel | None, trials: Sequence[TrialRecord]
) -> Failed | None:
    """How a launch of `config` would fail: by a rule, as an earlier one did, or by prediction; None if it may work.

    The job's conditions count as rules.
    """
    length = config.max_model_len or (None if memory is None else memory.max_model_len)
    rule = broken_rule(config, max_model_len=length) or broken_condition(config, conditions)
    if rule is not None:
        return Failed(kind=FailureKind.INVALID_CONFIG, detail=rule)
    known = ruled_out(config, trials)
    if known is not None or memory is None:
        return known
    too_small = memory.refusal(config)
    return None if too_small is None else Failed(kind=FailureKind.NO_KV_MEMORY, detail=too_small)


def _tell(study: Study, proposal: Proposal, trial: TrialRecord, slo: Slo | None) -> None:
    outcome = trial.outcome
    if outcome.outcome == "failed" and outcome.kind in SAYS_NOTHING:
        study.tell_nothing(proposal, f"{outcome.kind.value}: {outcome.detail}")
        return
    if outcome.outcome == "failed":
        study.tell_infeasible(proposal, {"works": 1.0}, f"{outcome.kind.value}: {outcome.detail}")
        return
    if slo is None:
        study.tell_infeasible(proposal, {"works": 1.0}, "no limits are known: no stage at load 1 was valid")
        return
    knee = find_knee(points_of(outcome.stages), fence=trial.config.fence)
    point = operating_point(outcome.stages, knee, slo)
    if point is None:
        nearest = least_violating_stage(outcome.stages, slo)
        amounts = {"works": 1.0} if nearest is None else violations(nearest, slo)
        study.tell_infeasible(proposal, amounts, "no stage left of the knee meets every limit")
        return
    objectives = Objectives(point.output_throughput.value, point.ttft_p95_ms.value, point.itl_p95_ms.value)
    study.tell_measured(proposal, objectives, violations(point, slo))
