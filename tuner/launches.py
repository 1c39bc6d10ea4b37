"""The launches of one job: numbered, retried, recorded, and counted against the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuner import timekeeping
from tuner.answer import TimeSplit
from tuner.engine_config import EngineConfig
from tuner.engines.device_return import DeviceFull
from tuner.engines.leftovers import end_lost_launch
from tuner.job import TuningJob
from tuner.ladder import FixedSteps, Plan
from tuner.progress import Clock, Watcher
from tuner.records import Failed, FailureKind, StageRecord, TrialRecord, TrialRole
from tuner.store import AskedTrial, RunStore, kept_stages
from tuner.trial import TrialEvent, TrialNote, TrialRunner, TrialSpec, WorkerLost

RECENT_LAUNCHES = 4
"""Launches the time left is reckoned from: a confirmation takes much less time than a ladder."""

FEWEST_START_S = 60.0
"""That any start gets, however little time is left. Unit: seconds."""

START_ROOM = 3
"""That much longer than all before may a start take where no time is left."""

MAX_RETRIES = {FailureKind.INFRASTRUCTURE: 2, FailureKind.CRASHED: 1}
"""How often a launch is tried again after it failed so: for a reason outside the config, or without giving one."""


class StopRequestedError(Exception):
    """The user asked for an end; the stages that were running are finished and kept."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """A trial that runs."""

    spec: TrialSpec
    asked: AskedTrial
    begun_s: float
    """Of this process's clock, which an earlier process's part of the trial is not on."""


class Launches:
    """Runs trials, as many at once as there are places for, and keeps every record. One object a job.

    Only this process writes, and it takes in one report after the other, whoever sent it. Of a run that was cut off it
    knows what ended before: those trials are there from the start, a launch for confirming that was made already is not
    made again, and trials that were running go on after the stages they kept.
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
            stop_requested: asked after each report; True ends the job when each trial that runs has ended its stage.
        """
        self.trials: list[TrialRecord] = store.trials()
        """Those that have ended, by number."""

        self.full_devices: list[DeviceFull] = []
        """Devices that launches of this process left full: nothing is launched there any more."""

        self._is_closed = False
        self._confirmed = [trial for trial in self.trials if trial.role is not TrialRole.STUDY]
        self._earlier = {trial.number for trial in self.trials}
        self._unfinished = store.unfinished_trials()
        self._running: dict[int, _Launch] = {}
        self._retries: list[tuple[_Launch, TrialRecord]] = []
        numbers = self._earlier | {asked.number for asked in self._unfinished}
        self._next_number = 1 + max(numbers, default=-1)
        self._num_expected = 0
        self._at_once = 1
        self._besides_s = 0.0
        self._stop_requested = stop_requested
        self._job = job
        self._store = store
        self._workers = workers
        self._watcher = watcher
        self._begun_s = time.perf_counter() - self._reached_earlier_s()

    def so_far(self) -> list[TrialRecord]:
        """The trials less the confirming launches of an earlier process that were not asked for again yet.

        What is decided from these is decided alike, whether or not the run was cut off in between.
        """
        later = {trial.number for trial in self._confirmed}
        return [trial for trial in self.trials if trial.number not in later]

    @property
    def parallel_trials(self) -> int:
        """How many launches run at once, at the most."""
        return self._workers.parallel_trials

    @property
    def full_device(self) -> DeviceFull | None:
        """The device without which no place for a launch is left; None while there is one."""
        return self.full_devices[-1] if self._is_closed or self.parallel_trials == 0 else None

    def has_room(self) -> bool:
        """Whether one more launch can be started now."""
        return len(self._running) + len(self._retries) < self.parallel_trials and not self._is_closed

    def run(self, role: TrialRole, config: EngineConfig, *, origin: str, plan: Plan) -> TrialRecord:
        """Launch `config` and wait for what comes of it; for when nothing else runs.

        Where every device was left full nothing is launched: the trial says so.

        Raises:
            StopRequestedError: after the stage that was running when the user asked for an end.
        """
        earlier = self._confirmed_earlier(role, config, plan)
        if earlier is not None:
            return earlier
        if self.full_device is not None:
            failed = Failed(kind=FailureKind.INFRASTRUCTURE, detail=self.full_device.text)
            return self.refuse(config, origin=origin, failed=failed, role=role)
        self.start(role, config, origin=origin, plan=plan)
        return self.wait()

    def start(self, role: TrialRole, config: EngineConfig, *, origin: str, plan: Plan) -> None:
        """Launch `config` to measure what `plan` says; there is room for it.

        Raises:
            StopRequestedError: if the user asked for an end.
        """
        if self._stop_requested():
            self._stop(None)
        self._launch(self._cut_off(role, config) or self._new(role, config, origin), plan)

    def wait(self) -> TrialRecord:
        """Wait for the next launch to come to its end; what failed by no known fault of the config is retried first.

        Each try is a trial.

        Raises:
            StopRequestedError: when the user asked for an end and every trial that ran has ended its stage.
        """
        while True:
            while self._retries and self._may_launch():
                launch, trial = self._retries.pop(0)
                self._launch(self._new(trial.role, trial.config, trial.origin), launch.spec.plan)
            if not self._running:
                return self._retries.pop(0)[1]  # nowhere is left to try it again
            launch, trial = self._next_ended()
            if not self._may_retry(trial) or self.full_device is not None:
                self._num_expected = max(0, self._num_expected - 1)
                return trial
            self._watcher.note(f"trial {trial.number} may have failed for reasons outside the config: tried again")
            self._retries.append((launch, trial))

    def refuse(
        self, config: EngineConfig, *, origin: str, failed: Failed, role: TrialRole = TrialRole.STUDY
    ) -> TrialRecord:
        """Record a setting that is known not to work, without a launch."""
        said = failed.model_copy(update={"detail": f"refused before launch: {failed.detail}"})
        trial = TrialRecord(
            number=self._next_number,
            role=role,
            config=config,
            origin=origin,
            outcome=said,
            launched=False,
            begun_s=self.elapsed_s(),
        )
        self._next_number += 1
        self._keep(trial)
        return trial

    def last_of(self, config: EngineConfig) -> TrialRecord | None:
        """The last study trial of this config that says something about it; None if there is none."""
        known = [trial for trial in self.trials if trial.role is TrialRole.STUDY and trial.config == config]
        if not known or _says_nothing(known[-1]) or self._may_retry(known[-1]):
            return None
        return known[-1]

    def configs_running(self) -> list[EngineConfig]:
        """The study settings whose launches run now."""
        return [launch.spec.config for launch in self._running.values() if launch.spec.role is TrialRole.STUDY]

    def num_settings_launched(self) -> int:
        """Study settings launched so far, those that run included; tries of one setting are counted once.

        Of an earlier process only those count that came to something: the others get another chance.
        """
        told = {
            trial.config
            for trial in self.trials
            if trial.role is TrialRole.STUDY
            and trial.launched
            and not (trial.number in self._earlier and _says_nothing(trial))
        }
        return len(told.union(self.configs_running()))

    def expect(self, num_launches: int, *, at_once: int = 1, besides_s: float = 0.0) -> None:
        """Say how many launches are still to come, those that run included: the time left is reckoned from it.

        Args:
            at_once: how many of them run side by side.
            besides_s: how long others take that are not like the latest. Unit: seconds.
        """
        self._num_expected, self._at_once, self._besides_s = num_launches, at_once, besides_s

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
        """Until the wall time or the device-hours of the budget are used up. Unit: seconds.

        Trials that run have taken their device-hours: as many as launches took so far.
        """
        left_s = self._job.budget.time - self.elapsed_s()
        hours = self._job.budget.device_hours
        if hours is None:
            return left_s
        used_s = timekeeping.device_s(self.trials) + sum(map(self._expected_device_s, self._running.values()))
        devices = max((trial.config.num_devices for trial in self.trials), default=1)
        return min(left_s, (3600 * hours - used_s) / devices)

    def time_split(self) -> TimeSplit:
        """Where the time went so far."""
        return timekeeping.time_split(self.trials, wall_s=self.elapsed_s())

    def _reached_earlier_s(self) -> float:
        """How far on the job's clock the process before this one came."""
        ended_s = timekeeping.end_s(self.trials)
        kept_s = (
            (ended_s if asked.begun_s is None else asked.begun_s)
            + sum(stage.wall_s for stage in kept_stages(self._store.trial_directory(asked.number)))
            for asked in self._unfinished
        )
        return max(ended_s, *kept_s, 0.0)

    def _expected_device_s(self, launch: _Launch) -> float:
        mean_s = timekeeping.mean_launch_s(self.trials, launch.spec.role) or 0.0
        return launch.spec.config.num_devices * max(mean_s, time.perf_counter() - launch.begun_s)

    def _may_retry(self, trial: TrialRecord) -> bool:
        """Whether a failure of that kind is tried again, after as many of this config as there were until then."""
        kind = _failure(trial)
        tries = [
            earlier
            for earlier in self.trials
            if (earlier.role, earlier.config) == (trial.role, trial.config)
            and earlier.number <= trial.number
            and _failure(earlier) in MAX_RETRIES
        ]
        return kind in MAX_RETRIES and len(tries) <= MAX_RETRIES[kind]

    def has_begun(self, role: TrialRole, config: EngineConfig) -> bool:
        """Whether a confirming launch of this config was made, or begun, before the run was cut off, and not used yet.

        What is there costs no time, whatever the clock says.
        """
        made = any(
            trial.role is role and trial.config == config and not _says_nothing(trial) for trial in self._confirmed
        )
        return made or any((asked.role, asked.config) == (role, config) for asked in self._unfinished)

    def _confirmed_earlier(self, role: TrialRole, config: EngineConfig, plan: Plan) -> TrialRecord | None:
        """A confirming launch of this plan made before the run was cut off; each answers once, in the order made.

        One that was tried again is used up by the next.
        """
        of_this = [trial for trial in self._confirmed if trial.role is role and trial.config == config]
        for trial in of_this:
            if _says_nothing(trial) or not _is_of(plan, trial):
                continue
            self._confirmed.remove(trial)
            if not self._may_retry(trial):
                return trial
        return None

    def _new(self, role: TrialRole, config: EngineConfig, origin: str) -> AskedTrial:
        number, self._next_number = self._next_number, self._next_number + 1
        return AskedTrial(number=number, role=role, config=config, origin=origin, begun_s=self.elapsed_s())

    def _launch(self, asked: AskedTrial, plan: Plan) -> None:
        kept = tuple(kept_stages(self._store.trial_directory(asked.number)))
        self._watcher.trial_began(asked.number, asked.role, asked.config, asked.origin, self._clock())
        if kept:
            self._watcher.note(f"it goes on after the {len(kept)} stages it kept when the run was cut off")
        spec = TrialSpec(
            number=asked.number,
            role=asked.role,
            config=asked.config,
            origin=asked.origin,
            job=self._job,
            plan=plan,
            directory=self._store.begin_trial(asked).absolute(),
            kept_stages=kept,
            most_start_s=self._most_start_s(),
        )
        self._running[asked.number] = _Launch(spec, asked, time.perf_counter())
        self._workers.start(spec)

    def _most_start_s(self) -> float:
        """What is left of the budget; a start that is like those before it is not given up for that."""
        came_up = [trial for trial in self.trials if _failure(trial) is not FailureKind.START_TIMEOUT]
        longest_s = max((trial.start_s for trial in came_up), default=0.0)
        return max(FEWEST_START_S, START_ROOM * longest_s, self.seconds_left())

    def _cut_off(self, role: TrialRole, config: EngineConfig) -> AskedTrial | None:
        """The trial of this config that was cut off with the run, to go on with; where it is none of them, all close.

        What a run goes on with is asked for before anything new.
        """
        for asked in self._unfinished:
            if (asked.role, asked.config) == (role, config):
                self._unfinished.remove(asked)
                return asked
        cut_off = Failed(kind=FailureKind.INFRASTRUCTURE, detail="cut off with the run, and not needed when it went on")
        while self._unfinished:
            self._keep(TrialRecord(**self._unfinished.pop(0).model_dump(), outcome=cut_off))
        return None

    def _may_launch(self) -> bool:
        return len(self._running) < self.parallel_trials and not self._is_closed

    def _next_ended(self) -> tuple[_Launch, TrialRecord]:
        """Take in reports until one is a trial's last."""
        while True:
            number, event = self._workers.next_event()
            launch = self._running[number]
            trial = self._take(launch, event)
            if self._stop_requested():
                self._stop(number)
            if trial is not None:
                return launch, trial

    def _take(self, launch: _Launch, event: TrialEvent | WorkerLost) -> TrialRecord | None:
        """Take in one report; the trial, if that was its last."""
        number = launch.spec.number
        match event:
            case TrialNote(text=text):
                self._watcher.note(text)
                return None
            case DeviceFull():
                self._leave_out(event)
                return None
            case StageRecord():
                self._watcher.stage_ended(number, event, self._clock())
                return None
            case TrialRecord():
                trial = event.model_copy(update={"begun_s": launch.asked.begun_s})
            case WorkerLost(detail=detail):
                failed = Failed(kind=FailureKind.INFRASTRUCTURE, detail=detail)
                full = end_lost_launch(launch.spec.directory, launch.spec.job.engine)
                if full is not None:
                    # Ray gives the lost worker's device to the next: nobody holds it back.
                    self._is_closed = True
                    self._leave_out(full)
                wall_s = time.perf_counter() - launch.begun_s
                trial = TrialRecord(**launch.asked.model_dump(), outcome=failed, wall_s=wall_s)
        del self._running[number]
        self._keep(trial)
        return trial

    def _leave_out(self, device: DeviceFull) -> None:
        self.full_devices.append(device)
        self._watcher.note(device.text)

    def _stop(self, reported: int | None) -> None:
        """End every trial after its next report, which for one has just come, and then the job."""
        while True:
            if reported in self._running:
                self._workers.give_up(reported)
                del self._running[reported]
            if not self._running:
                raise StopRequestedError
            reported, event = self._workers.next_event()
            self._take(self._running[reported], event)

    def _keep(self, trial: TrialRecord) -> None:
        self.trials.append(trial)
        self.trials.sort(key=lambda each: each.number)
        self._store.write_trial(trial)
        self._watcher.trial_ended(trial, self._clock())

    def _clock(self) -> Clock:
        walls = [trial.wall_s for trial in _last_launched(self.trials)]
        left_s = None
        if walls:
            mean_s = sum(walls) / len(walls)
            running_s = max((time.perf_counter() - launch.begun_s for launch in self._running.values()), default=0.0)
            to_go_s = self._num_expected / self._at_once * mean_s + self._besides_s - running_s
            left_s = max(0.0, min(to_go_s, self.seconds_left()))
        return Clock(elapsed_s=self.elapsed_s(), left_s=left_s)


def _last_launched(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [trial for trial in trials[-RECENT_LAUNCHES:] if trial.launched]


def _failure(trial: TrialRecord) -> FailureKind | None:
    return trial.outcome.kind if trial.outcome.outcome == "failed" else None


def _says_nothing(trial: TrialRecord) -> bool:
    return _failure(trial) is FailureKind.INFRASTRUCTURE


def _is_of(plan: Plan, trial: TrialRecord) -> bool:
    """Whether the trial measured, as far as it came, what `plan` asks for."""
    if not isinstance(plan, FixedSteps) or trial.outcome.outcome != "measured":
        return True
    asked = [(step.kind, step.load) for step in plan.steps]
    seen = list(dict.fromkeys((stage.kind, stage.load) for stage in trial.outcome.stages))
    return seen == asked[: len(seen)]
