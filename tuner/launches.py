"""The launches of one job: numbered, retried, recorded, and counted against the clock."""

from __future__ import annotations

import time

from tuner.answer import TimeSplit
from tuner.job import TuningJob
from tuner.ladder import Plan
from tuner.progress import Clock, Watcher
from tuner.records import EngineConfig, Failed, FailureKind, TrialRecord, TrialRole
from tuner.store import RunStore
from tuner.trial import TrialRunner, TrialSpec, WorkerLostError

RECENT_LAUNCHES = 4
"""Launches the time left is reckoned from: a confirmation takes much less time than a ladder."""

MAX_RETRIES = 2
"""After a failure that says nothing about the config."""


class Launches:
    """Runs trials one after the other and keeps every record. One object a job."""

    def __init__(
        self, job: TuningJob, store: RunStore, workers: TrialRunner, watcher: Watcher, *, begun_s: float
    ) -> None:
        """Start counting.

        Args:
            begun_s: when the job began, on `time.perf_counter`.
        """
        self.trials: list[TrialRecord] = []
        self._num_expected = 0
        self._job = job
        self._store = store
        self._workers = workers
        self._watcher = watcher
        self._begun_s = begun_s

    def run(self, role: TrialRole, config: EngineConfig, *, origin: str, plan: Plan) -> TrialRecord:
        """Launch `config` and measure what `plan` says; a failure of the machinery is retried, each try a trial."""
        trial = self._run_once(role, config, origin, plan)
        for _ in range(MAX_RETRIES):
            if not _says_nothing(trial):
                break
            self._watcher.note(f"trial {trial.number} failed for reasons outside the config and is tried again")
            trial = self._run_once(role, config, origin, plan)
        self._num_expected = max(0, self._num_expected - 1)
        return trial

    def refuse(self, config: EngineConfig, *, origin: str, failed: Failed) -> TrialRecord:
        """Record a study setting that is known not to work, without a launch."""
        said = failed.model_copy(update={"detail": f"refused before launch: {failed.detail}"})
        trial = TrialRecord(
            number=len(self.trials), role=TrialRole.STUDY, config=config, origin=origin, outcome=said, launched=False
        )
        self._keep(trial)
        return trial

    def expect(self, num_launches: int) -> None:
        """Say how many launches are still to come, this one included: the time left is reckoned from it."""
        self._num_expected = num_launches

    def note(self, text: str) -> None:
        """Tell the person who watches."""
        self._watcher.note(text)

    def elapsed_s(self) -> float:
        """Since the job began. Unit: seconds."""
        return time.perf_counter() - self._begun_s

    def is_time_up(self) -> bool:
        """Whether the job has used the wall time it was given."""
        return self.elapsed_s() >= self._job.budget.time

    def mean_launch_s(self, role: TrialRole) -> float | None:
        """Mean wall time of the launches of that role so far; None before the first."""
        walls = [trial.wall_s for trial in self.trials if trial.role is role and trial.launched]
        return sum(walls) / len(walls) if walls else None

    def mean_stage_s(self) -> float | None:
        """Mean wall time of the stages below the fence so far; None before the first."""
        walls = [
            stage.wall_s
            for trial in self.trials
            if trial.outcome.outcome == "measured"
            for stage in trial.outcome.stages
            if not stage.fenced
        ]
        return sum(walls) / len(walls) if walls else None

    def time_split(self) -> TimeSplit:
        """Where the time went so far."""
        wall_s = self.elapsed_s()
        start_s = sum(trial.start_s for trial in self.trials)
        measure_s = sum(trial.measure_s for trial in self.trials)
        return TimeSplit(
            wall_s=wall_s, start_s=start_s, measure_s=measure_s, overhead_s=max(0.0, wall_s - start_s - measure_s)
        )

    def _run_once(self, role: TrialRole, config: EngineConfig, origin: str, plan: Plan) -> TrialRecord:
        number = len(self.trials)
        self._watcher.trial_began(number, role, config, origin, self._clock())
        spec = TrialSpec(
            number=number,
            role=role,
            config=config,
            origin=origin,
            job=self._job,
            plan=plan,
            directory=self._store.trial_directory(number).absolute(),
        )
        trial = self._watched(spec)
        self._keep(trial)
        return trial

    def _watched(self, spec: TrialSpec) -> TrialRecord:
        begun_s = time.perf_counter()
        try:
            for event in self._workers.run(spec):
                if isinstance(event, TrialRecord):
                    return event
                self._watcher.stage_ended(spec.number, event, self._clock())
            detail = "the worker ended without a result"
        except WorkerLostError as error:
            detail = str(error)
        failed = Failed(kind=FailureKind.INFRASTRUCTURE, detail=detail)
        return TrialRecord(
            number=spec.number,
            role=spec.role,
            config=spec.config,
            origin=spec.origin,
            outcome=failed,
            wall_s=time.perf_counter() - begun_s,
        )

    def _keep(self, trial: TrialRecord) -> None:
        self.trials.append(trial)
        self._store.write_trial(trial)
        self._watcher.trial_ended(trial, self._clock())

    def _clock(self) -> Clock:
        walls = [trial.wall_s for trial in self.trials[-RECENT_LAUNCHES:] if trial.launched]
        left_s = None
        if walls:
            mean_s = sum(walls) / len(walls)
            left_s = max(0.0, min(self._num_expected * mean_s, self._job.budget.time - self.elapsed_s()))
        return Clock(elapsed_s=self.elapsed_s(), left_s=left_s)


def _says_nothing(trial: TrialRecord) -> bool:
    return trial.outcome.outcome == "failed" and trial.outcome.kind is FailureKind.INFRASTRUCTURE
