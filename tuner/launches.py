"""The launches of one job: numbered, retried, recorded, and counted against the clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from tuner.answer import TimeSplit
from tuner.engines.device_return import DeviceFull
from tuner.engines.leftovers import end_lost_launch
from tuner.job import TuningJob
from tuner.ladder import Plan
from tuner.progress import Clock, Watcher
from tuner.records import EngineConfig, Failed, FailureKind, StageRecord, TrialRecord, TrialRole
from tuner.store import AskedTrial, RunStore, kept_stages
from tuner.trial import TrialNote, TrialRunner, TrialSpec, WorkerLostError

RECENT_LAUNCHES = 4
"""Launches the time left is reckoned from: a confirmation takes much less time than a ladder."""

MAX_RETRIES = {FailureKind.INFRASTRUCTURE: 2, FailureKind.CRASHED: 1}
"""How often a launch is tried again after it failed so: for a reason outside the config, or without giving one."""


class StopRequestedError(Exception):
    """The user asked for an end; the stage that was running is finished and kept."""


class Launches:
    """Runs trials one after the other and keeps every record. One object a job.

    Of a run that was cut off it knows what ended before: those trials are there from the start, a launch for confirming
    that was made already is not made again, and the trial that was running goes on after the stages it kept.
    """

    def __init__(
        self,
        job: TuningJob,
        store: RunStore,
        workers: TrialRunner,
        watcher: Watcher,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start counting, after what the store already holds.

        Args:
            stop_requested: asked after each stage; True ends the job there.
        """
        self.trials: list[TrialRecord] = store.trials()
        self.full_device: DeviceFull | None = None
        """The device that a launch of this process left full: nothing is launched there any more."""

        self._confirmed = [trial for trial in self.trials if trial.role is not TrialRole.STUDY]
        self._num_earlier = len(self.trials)
        self._unfinished = store.unfinished_trial()
        self._num_expected = 0
        self._stop_requested = stop_requested
        self._job = job
        self._store = store
        self._workers = workers
        self._watcher = watcher
        earlier_s = sum(trial.wall_s for trial in self.trials)
        if self._unfinished is not None:
            kept = kept_stages(store.trial_directory(self._unfinished.number))
            earlier_s += sum(stage.wall_s for stage in kept)
        self._begun_s = time.perf_counter() - earlier_s

    def run(self, role: TrialRole, config: EngineConfig, *, origin: str, plan: Plan) -> TrialRecord:
        """Launch `config` and measure what `plan` says; what failed by no known fault of the config is retried.

        Each try is a trial. On a device that was left full nothing is launched: the trial says so.

        Raises:
            StopRequestedError: after the stage that was running when the user asked for an end.
        """
        earlier = self._confirmed_earlier(role, config)
        if earlier is not None:
            return earlier
        if self.full_device is not None:
            failed = Failed(kind=FailureKind.INFRASTRUCTURE, detail=self.full_device.text)
            return self.refuse(config, origin=origin, failed=failed, role=role)
        trial = self._run_once(role, config, origin, plan)
        while self._may_retry(trial) and self.full_device is None:
            self._watcher.note(f"trial {trial.number} may have failed for reasons outside the config: tried again")
            trial = self._run_once(role, config, origin, plan)
        self._num_expected = max(0, self._num_expected - 1)
        return trial

    def refuse(
        self, config: EngineConfig, *, origin: str, failed: Failed, role: TrialRole = TrialRole.STUDY
    ) -> TrialRecord:
        """Record a setting that is known not to work, without a launch."""
        said = failed.model_copy(update={"detail": f"refused before launch: {failed.detail}"})
        trial = TrialRecord(
            number=len(self.trials), role=role, config=config, origin=origin, outcome=said, launched=False
        )
        self._keep(trial)
        return trial

    def last_of(self, config: EngineConfig) -> TrialRecord | None:
        """The last study trial of this config that says something about it; None if there is none."""
        known = [trial for trial in self.trials if trial.role is TrialRole.STUDY and trial.config == config]
        if not known or _says_nothing(known[-1]) or self._may_retry(known[-1]):
            return None
        return known[-1]

    def num_settings_launched(self) -> int:
        """Study settings launched so far, tries of one setting in a row counted once.

        Of an earlier process only those count that came to something: the others get another chance.
        """
        before, now = (
            [trial for trial in trials if trial.role is TrialRole.STUDY and trial.launched]
            for trials in (self.trials[: self._num_earlier], self.trials[self._num_earlier :])
        )
        told = {trial.config for trial in before if not _says_nothing(trial)}
        return len(told) + sum(config not in told for config, _ in itertools.groupby(trial.config for trial in now))

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
        """Whether the job has used what it was given."""
        return self.seconds_left() <= 0

    def seconds_left(self) -> float:
        """Until the wall time or the device-hours of the budget are used up. Unit: seconds."""
        left_s = self._job.budget.time - self.elapsed_s()
        hours = self._job.budget.device_hours
        if hours is None:
            return left_s
        used_s = sum(trial.wall_s * trial.config.tensor_parallel_size for trial in self.trials)
        devices = max((trial.config.tensor_parallel_size for trial in self.trials), default=1)
        return min(left_s, (3600 * hours - used_s) / devices)

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

    def _may_retry(self, trial: TrialRecord) -> bool:
        """Whether a failure of that kind is tried again, after as many of this config as there were."""
        kind = _failure(trial)
        tries = [
            earlier
            for earlier in self.trials
            if (earlier.role, earlier.config) == (trial.role, trial.config) and _failure(earlier) in MAX_RETRIES
        ]
        return kind in MAX_RETRIES and len(tries) <= MAX_RETRIES[kind]

    def _confirmed_earlier(self, role: TrialRole, config: EngineConfig) -> TrialRecord | None:
        """A confirming launch made before the run was cut off; each answers once, in the order they were made."""
        for trial in self._confirmed:
            if trial.role is role and trial.config == config and not _says_nothing(trial):
                self._confirmed.remove(trial)
                return trial
        return None

    def _run_once(self, role: TrialRole, config: EngineConfig, origin: str, plan: Plan) -> TrialRecord:
        kept = self._kept_stages(role, config)
        asked = AskedTrial(number=len(self.trials), role=role, config=config, origin=origin)
        self._watcher.trial_began(asked.number, role, config, origin, self._clock())
        if kept:
            self._watcher.note(f"it goes on after the {len(kept)} stages it kept when the run was cut off")
        spec = TrialSpec(
            number=asked.number,
            role=role,
            config=config,
            origin=origin,
            job=self._job,
            plan=plan,
            directory=self._store.begin_trial(asked).absolute(),
            kept_stages=kept,
        )
        trial = self._watched(spec)
        self._keep(trial)
        return trial

    def _kept_stages(self, role: TrialRole, config: EngineConfig) -> tuple[StageRecord, ...]:
        """What the trial that was cut off has measured, if this is it; one of another kind is closed first."""
        asked, self._unfinished = self._unfinished, None
        if asked is None:
            return ()
        if (asked.role, asked.config) == (role, config):
            return tuple(kept_stages(self._store.trial_directory(asked.number)))
        cut_off = Failed(kind=FailureKind.INFRASTRUCTURE, detail="cut off with the run, and not needed when it went on")
        self._keep(TrialRecord(**asked.model_dump(), outcome=cut_off))
        return ()

    def _watched(self, spec: TrialSpec) -> TrialRecord:
        begun_s = time.perf_counter()
        try:
            for event in self._workers.run(spec):
                match event:
                    case TrialRecord():
                        return event
                    case TrialNote(text=text):
                        self._watcher.note(text)
                    case DeviceFull():
                        self._leave_out(event)
                    case StageRecord():
                        self._watcher.stage_ended(spec.number, event, self._clock())
                if self._stop_requested():
                    raise StopRequestedError
            detail = "the worker ended without a result"
        except WorkerLostError as error:
            detail = str(error)
            full = end_lost_launch(spec.directory, spec.job.engine)
            if full is not None:
                self._leave_out(full)
        failed = Failed(kind=FailureKind.INFRASTRUCTURE, detail=detail)
        return TrialRecord(
            number=spec.number,
            role=spec.role,
            config=spec.config,
            origin=spec.origin,
            outcome=failed,
            wall_s=time.perf_counter() - begun_s,
        )

    def _leave_out(self, device: DeviceFull) -> None:
        self.full_device = device
        self._watcher.note(device.text)

    def _keep(self, trial: TrialRecord) -> None:
        self.trials.append(trial)
        self._store.write_trial(trial)
        self._watcher.trial_ended(trial, self._clock())

    def _clock(self) -> Clock:
        walls = [trial.wall_s for trial in self.trials[-RECENT_LAUNCHES:] if trial.launched]
        left_s = None
        if walls:
            mean_s = sum(walls) / len(walls)
            left_s = max(0.0, min(self._num_expected * mean_s, self.seconds_left()))
        return Clock(elapsed_s=self.elapsed_s(), left_s=left_s)


def _failure(trial: TrialRecord) -> FailureKind | None:
    return trial.outcome.kind if trial.outcome.outcome == "failed" else None


def _says_nothing(trial: TrialRecord) -> bool:
    return _failure(trial) is FailureKind.INFRASTRUCTURE
