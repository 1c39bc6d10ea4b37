"""The search: propose, refuse or launch, tell, until the budget is spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.analysis.fence import ladder_knee
from tuner.analysis.graph_grid import stages_to_stand_on
from tuner.analysis.knee import find_knee, points_of
from tuner.analysis.slo import derive_slo, least_violating_stage, operating_point, violations
from tuner.answer import Slo
from tuner.conditions import Condition
from tuner.engine_config import EngineConfig
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
    safe_rate_s,
)
from tuner.records import SAYS_NOTHING, Failed, FailureKind, TrialRecord, TrialRole
from tuner.space import broken_condition, broken_rule
from tuner.study import Objectives, Proposal, Study
from tuner.timekeeping import mean_launch_s, mean_stage_s

DEFAULTS_ORIGIN = "defaults"
CAUTIOUS_ORIGIN = "cautious_start"
STAGE_RESERVE = 1.5
"""A confirming stage is held at a higher load than the mean rung, and takes so many times as long."""

FAILED_ALIKE = 3
"""Settings that all failed for one and the same reason, word for word: what is wrong is none of them."""

FAILED_OUTSIDE = 2
"""Settings that failed for reasons outside them, each after all its tries, before anything worked."""

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

    has_ladder: bool = False
    """Whether a ladder was climbed."""

    def take_in(self, trial: TrialRecord) -> None:
        """Learn from a trial, if it is one of the study and was measured."""
        if trial.role is TrialRole.STUDY and trial.outcome.outcome == "measured":
            self.has_ladder = True
            self.slo = self.slo or derive_slo(trial.outcome.stages)
            self.memory = self.memory or MemoryModel.calibrated(trial.config, trial.outcome.facts)
            knee = find_knee(points_of(trial.outcome.stages), num_bootstrap=0).load
            if knee is not None and knee >= 8:
                self.start = 2 ** math.floor(math.log2(knee / 4))

    @property
    def enough_for_several(self) -> bool:
        """Whether launches may run side by side: limits and the memory's size come from a ladder before them."""
        return self.has_ladder and self.slo is not None


def search(job: TuningJob, study: Study, launches: Launches) -> Slo | None:
    """Measure settings until trials, time or the space are used up; what an earlier process measured counts.

    Returns:
        The limits in force: the job's, or those derived from the first ladder; None if no ladder was climbed.
    """
    return _Search(job, study, launches).run()


class _Search:
    """One search: what it knows, and the proposals that are not told yet."""

    def __init__(self, job: TuningJob, study: Study, launches: Launches) -> None:
        study.enqueue(default_values(job), DEFAULTS_ORIGIN)
        study.enqueue(cautious_values(job), CAUTIOUS_ORIGIN)
        self._job = job
        self._study = study
        self._launches = launches
        self._findings = _Findings(job.limits())
        for trial in launches.trials:
            self._findings.take_in(trial)
        self._running: dict[EngineConfig, Proposal] = {}
        self._waiting: list[Proposal] = []
        """Each answered by a launch that runs, unless that comes to nothing."""

        self._is_cut_off = False
        self._is_exhausted = False

    def run(self) -> Slo | None:
        """Keep every place busy until nothing is left to launch."""
        while True:
            while self._has_place() and (proposal := self._next()) is not None:
                self._take_up(proposal)
            if not self._running:
                return self._findings.slo
            trial = self._launches.wait()
            self._conclude(self._running.pop(trial.config), trial)
            self._warn_of_preemptions(trial)

    def _has_place(self) -> bool:
        return self._launches.has_room() and (self._findings.enough_for_several or not self._running)

    def _next(self) -> Proposal | None:
        """The next proposal to decide on, if there is to be one now."""
        ready = next((each for each in self._waiting if not self._must_wait(each)), None)
        if ready is None and not self._may_ask():
            return None
        num_launched = self._launches.num_settings_launched()
        if not self._is_cut_off and num_launched >= FEWEST_LAUNCHES and not _has_time(self._job, self._launches):
            left_s = self._launches.seconds_left()
            self._cut_off(f" after {num_launched} launches: the rest of the budget, {left_s:.0f} s, is for confirming")
        if ready is not None:
            self._waiting.remove(ready)
            return ready
        return None if self._is_cut_off else self._ask()

    def _may_ask(self) -> bool:
        if self._is_cut_off or self._is_exhausted or len(self._waiting) >= self._launches.parallel_trials:
            return False
        num_settings = self._launches.num_settings_launched() + len(self._waiting)
        return self._study.num_left_open > 0 or num_settings < self._job.budget.trials

    def _ask(self) -> Proposal | None:
        proposal = self._study.ask()
        if proposal is None:
            self._is_exhausted = True
            num_launched = self._launches.num_settings_launched()
            self._launches.note(
                f"every setting of the space is known after {num_launched} launches: the search ends early"
            )
        return proposal

    def _cut_off(self, reason: str) -> None:
        """Launch nothing more; what runs goes on to its end."""
        self._is_cut_off = True
        self._launches.note(f"the search ends{reason}")

    def _must_wait(self, proposal: Proposal) -> bool:
        """Whether a launch that runs may answer the proposal: the same setting, or one of a higher fence."""
        config = self._job.config(proposal.values)
        return any(config == running or _answers(running, config) for running in self._running)

    def _take_up(self, proposal: Proposal) -> None:
        """Tell what the proposal comes to, let it wait for a launch that may answer it, or launch it."""
        job, launches, config = self._job, self._launches, self._job.config(proposal.values)
        if self._must_wait(proposal):
            self._waiting.append(proposal)
            return
        known = launches.last_of(config) or _answered(config, launches)
        if known is None:
            conditions = () if proposal.origin == DEFAULTS_ORIGIN else job.search_space.conditions
            refused = _refusal(config, conditions, self._findings.memory, launches.trials)
            if refused is not None:
                known = launches.refuse(config, origin=proposal.origin, failed=refused)
        if known is not None:
            self._conclude(proposal, known)
        elif self._is_cut_off:
            self._study.tell_nothing(proposal, "the search ended while it waited for another launch")
        else:
            self._launch(proposal, config)

    def _launch(self, proposal: Proposal, config: EngineConfig) -> None:
        job, launches, at_once = self._job, self._launches, self._launches.parallel_trials
        num_left = job.budget.trials - launches.num_settings_launched() + len(self._running)
        # Confirming launches go one by one, and take as long as so many side by side.
        start_s = max((trial.start_s for trial in launches.trials), default=0.0)
        launches.expect(
            num_left + at_once * (CONFIRMATION_LAUNCHES // 2),
            at_once=at_once,
            besides_s=safe_rate_s(job, start_s=start_s),
        )
        slo, start = self._findings.slo, self._findings.start
        ladder = Ladder(
            max_num_seqs=config.fence, max_load=job.max_load, thinks=job.workload.thinks, slo=slo, start=start
        )
        launches.start(TrialRole.STUDY, config, origin=proposal.origin, plan=ladder)
        self._running[config] = proposal

    def _conclude(self, proposal: Proposal, trial: TrialRecord) -> None:
        self._findings.take_in(trial)
        _tell(self._study, proposal, trial, self._findings.slo)
        full = self._launches.full_device
        if full is not None and not self._is_cut_off:
            self._cut_off(f": {full.device} is not free for another launch")
        alike = _all_failed_alike(self._launches.trials)
        if alike is not None and not self._is_cut_off:
            self._cut_off(f": different settings failed alike and none worked: {alike}")

    def _warn_of_preemptions(self, trial: TrialRecord) -> None:
        if trial.outcome.outcome == "measured" and self._findings.memory is not None:
            tokens = self._job.workload.mean_request_tokens(trial.outcome.facts.max_model_len)
            warning = preemption_warning(trial.config, self._findings.memory, tokens_per_request=tokens)
            if warning is not None:
                self._launches.note(warning)


def preemption_warning(config: EngineConfig, memory: MemoryModel, *, tokens_per_request: float) -> str | None:
    """What to say of a fence above what the KV cache holds; None where it holds them, or nothing is known of it."""
    if not memory.covers(config):
        return None
    fit = memory.requests_that_fit(config, tokens_per_request)
    if fit >= config.fence:
        return None
    return (
        f"preemption-prone: {config.fence} requests may run at once, but the KV cache holds about {fit} "
        f"requests of {tokens_per_request:g} tokens"
    )


def _all_failed_alike(trials: Sequence[TrialRecord]) -> str | None:
    """Why every setting launched so far came to nothing, where the reason is not in them.

    All were refused in the same words, or all failed for reasons outside them although each was tried again: another
    process holds the device, say.
    """
    outcomes = {trial.config: trial.outcome for trial in trials if trial.launched}
    outside = [o.detail for o in outcomes.values() if o.outcome == "failed" and o.kind is FailureKind.INFRASTRUCTURE]
    if len(outside) == len(outcomes) >= FAILED_OUTSIDE:
        return outside[-1]
    reasons = {
        outcome.detail if outcome.outcome == "failed" and outcome.kind is FailureKind.INVALID_CONFIG else None
        for outcome in outcomes.values()
    }
    return reasons.pop() if len(outcomes) >= FAILED_ALIKE and len(reasons) == 1 else None


def _answered(config: EngineConfig, launches: Launches) -> TrialRecord | None:
    """What a trial of a higher fence says of this one, all else equal; None if there is no such trial.

    In a closed loop at a load within the fence every higher fence gives the same schedule: its stages are the answer.
    The record is for the sampler only, it is not kept: the stages it points at are the other trial's.
    """
    for trial in launches.trials:
        if trial.role is not TrialRole.STUDY or trial.outcome.outcome != "measured":
            continue
        if _answers(trial.config, config):
            within = tuple(stage for stage in trial.outcome.stages if stage.load <= config.fence)
            launches.note(
                f"max_num_seqs={config.max_num_seqs} with the rest of trial {trial.number} is answered by it: no launch"
            )
            outcome = trial.outcome.model_copy(update={"stages": within})
            return trial.model_copy(update={"config": config, "outcome": outcome})
    return None


def _answers(higher: EngineConfig, config: EngineConfig) -> bool:
    """Whether the one differs from the other by a higher fence alone."""
    seqs = config.max_num_seqs
    return higher.max_num_seqs > seqs and higher.model_copy(update={"max_num_seqs": seqs}) == config


def _has_time(job: TuningJob, launches: Launches) -> bool:
    """Whether one more ladder fits before the confirmations must begin, by what starts and stages have taken so far."""
    ladder_s = mean_launch_s(launches.trials, TrialRole.STUDY) or 0.0
    start_s = max((trial.start_s for trial in launches.trials), default=0.0)
    mean_s = mean_stage_s(launches.trials)
    stage_s = longest_stage_s(job) if mean_s is None else STAGE_RESERVE * mean_s
    confirmation_s = CONFIRMATION_LAUNCHES * (start_s + CONFIRMATION_STAGES * stage_s)
    confirmation_s += MAX_PROTECTIVE_LAUNCHES * (start_s + PROTECTIVE_STAGES * stage_s)
    confirmation_s += safe_rate_s(job, start_s=start_s)
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
    knee = ladder_knee(outcome.stages, fence=trial.config.fence)
    point = operating_point(stages_to_stand_on(outcome), knee, slo)
    if point is None:
        nearest = least_violating_stage(outcome.stages, slo)
        amounts = {"works": 1.0} if nearest is None else violations(nearest, slo)
        study.tell_infeasible(proposal, amounts, "no stage left of the knee meets every limit")
        return
    objectives = Objectives(point.output_throughput.value, point.ttft_p95_ms.value, point.itl_p95_ms.value)
    study.tell_measured(proposal, objectives, violations(point, slo))
