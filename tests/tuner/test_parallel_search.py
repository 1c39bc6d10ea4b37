"""A search with several trials in flight keeps the promises of one with a single one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tests.fakes.records import estimate, resolved_run
from tests.fakes.workers import FakeWorkers, Rule
from tests.tuner.test_tuning import Silent
from tuner.engine_config import EngineConfig
from tuner.job import TuningJob, load_job
from tuner.launches import Launches, StopRequestedError
from tuner.records import Failed, FailureKind, StageRecord, TrialRecord, TrialRole
from tuner.search import search
from tuner.space import load_space
from tuner.store import RunStore, kept_stages
from tuner.study import STUDY_NAME, Study
from tuner.trial import TrialEvent, TrialSpec

SEQS = [16, 32, 128]
SHARES = [0.5, 0.7, 0.9]


def _job(*, trials: int = 30, seed: int = 0) -> TuningJob:
    space = load_space("cpu").model_dump(mode="json")
    for name, choices in (
        ("max_num_seqs", SEQS),
        ("max_num_batched_tokens", [256, 2048]),
        ("gpu_memory_utilization", SHARES),
    ):
        space["parameters"][name]["choices"] = choices
    over: dict[str, object] = {
        "search_space": space,
        "budget": {"trials": trials, "time": "10h"},
        "seed": seed,
        "slo": None,
        "sampler": "random",
    }
    return load_job("embedded", over)


def _saturating(made: StageRecord) -> StageRecord:
    running = min(made.load, 128 if not made.fenced else made.load // 2)
    return made.model_copy(
        update={
            "output_throughput": estimate(2000 * running / (5 + running), spread=0.02),
            "ttft_p95_ms": estimate(10.0 + made.load),
            "itl_p95_ms": estimate(4.0 + running),
            "num_preemptions": 0,
            "kv_cache_usage_peak": 0.3,
        }
    )


def _out_of_memory(spec: TrialSpec) -> Failed | None:
    """The largest share dies, so that what it would have answered has to be found out otherwise."""
    died = Failed(kind=FailureKind.OOM_RUNTIME, detail="out of memory under load")
    return died if spec.config.gpu_memory_utilization >= 0.9 else None


class _Watched(FakeWorkers):
    """Sees to it that nothing is launched which a launch in flight may answer, and nothing beside the first ladder."""

    def __init__(
        self,
        *,
        parallel_trials: int,
        seed: int,
        fails: Rule = lambda _: None,
        fills_in: int | None = None,
        dies_at: int = -1,
    ) -> None:
        super().__init__(
            reshape=_saturating, fails=fails, fills_in=fills_in, parallel_trials=parallel_trials, seed=seed
        )
        self.together: list[int] = []
        """How many ran, this one included, at each launch."""

        self._events_left = dies_at

    def start(self, spec: TrialSpec) -> None:
        """Compare with what runs."""
        beside = [other.config for other in self.launched if other.number in self.running]
        assert not any(config == spec.config or _is_higher_fence(config, spec.config) for config in beside)
        super().start(spec)
        self.together.append(len(self.running))

    def run(self, spec: TrialSpec) -> Iterator[TrialEvent]:
        """The trial's events, until the process dies."""
        for event in super().run(spec):
            if self._events_left == 0:
                raise _KilledError
            self._events_left -= 1
            yield event


class _KilledError(BaseException):
    """The process that tunes dies here."""


def _is_higher_fence(config: EngineConfig, other: EngineConfig) -> bool:
    same = config.model_copy(update={"max_num_seqs": other.max_num_seqs}) == other
    return same and config.max_num_seqs > other.max_num_seqs


def _search(
    job: TuningJob, store: RunStore, workers: FakeWorkers, *, stop_requested: Callable[[], bool] = lambda: False
) -> None:
    study = Study(job.search_space, store.path / "study.journal", seed=job.seed, impossible=job.impossible)
    search(job, study, Launches(job, store, workers, Silent(), stop_requested=stop_requested))


def _store(folder: Path, job: TuningJob) -> RunStore:
    return RunStore.create(folder, job, resolved_run().recommendation.provenance)


def _states(store: RunStore) -> set[TrialState]:
    storage = JournalStorage(JournalFileBackend(str(store.path / "study.journal")))
    return {trial.state for trial in optuna.load_study(study_name=STUDY_NAME, storage=storage).trials}


def _is_known(config: EngineConfig, trials: list[TrialRecord]) -> bool:
    """Whether a trial has it, or answers for it."""
    measured = [trial.config for trial in trials if trial.outcome.outcome == "measured"]
    return any(trial.config == config for trial in trials) or any(_is_higher_fence(each, config) for each in measured)


@pytest.mark.parametrize("seed", range(3))
def test_a_setting_that_a_launch_in_flight_may_answer_waits_for_it(tmp_path: Path, seed: int) -> None:
    """A whole ladder is saved: the workers here refuse such a launch, and without the wait each of these has one."""
    job = _job(seed=seed)
    workers = _Watched(parallel_trials=4, seed=seed)
    _search(job, _store(tmp_path, job), workers)
    assert max(workers.together) == 4


def test_the_first_ladder_is_climbed_alone_until_one_was_climbed(tmp_path: Path) -> None:
    """Limits and the memory's size come from it: what ran beside it would be judged without either."""

    def fails(spec: TrialSpec) -> Failed | None:
        died = Failed(kind=FailureKind.STALLED, detail="requests waited and no token came")
        return died if spec.number < 2 else None

    job = _job(trials=8)
    workers = _Watched(parallel_trials=3, seed=0, fails=fails)
    _search(job, _store(tmp_path, job), workers)
    assert workers.together[:5] == [1, 1, 1, 1, 2]


@given(
    at_once=st.integers(1, 5),
    seed=st.integers(0, 1000),
    fails=st.sampled_from([lambda _: None, _out_of_memory]),
    trials=st.sampled_from([6, 30]),
)
@settings(max_examples=6)
def test_whoever_ends_first_every_setting_is_settled_once(
    tmp_path_factory: pytest.TempPathFactory, at_once: int, seed: int, fails: Rule, trials: int
) -> None:
    """Four cards cost no launch more than one: nothing is measured twice or left out, no number is missing."""
    job = _job(seed=seed, trials=trials)
    store = _store(tmp_path_factory.mktemp("run"), job)
    workers = _Watched(parallel_trials=at_once, seed=seed, fails=fails)
    _search(job, store, workers)

    launched = [spec.config for spec in workers.launched]
    assert len(set(launched)) == len(launched) <= trials
    assert workers.together[0] == 1
    assert min(at_once, 2) <= max(workers.together) <= at_once
    kept = store.trials()
    assert [trial.number for trial in kept] == list(range(len(kept)))
    assert TrialState.RUNNING not in _states(store)
    if trials == 6:
        assert len(launched) == 6
    else:
        for seqs in SEQS:
            for share in SHARES:
                values = {"max_num_seqs": seqs, "max_num_batched_tokens": 256, "gpu_memory_utilization": share}
                assert _is_known(kept[1].config.model_copy(update=values), kept)


@given(
    at_once=st.integers(2, 4), seed=st.integers(0, 1000), deaths=st.lists(st.integers(0, 40), min_size=1, max_size=4)
)
@settings(max_examples=6)
def test_a_search_killed_with_several_trials_in_flight_goes_on_with_each(
    tmp_path_factory: pytest.TempPathFactory, at_once: int, seed: int, deaths: list[int]
) -> None:
    """No stage is measured twice, no trial lost, no number missing, also where fewer cards are left afterwards."""
    job = _job(trials=8, seed=seed)
    store = _store(tmp_path_factory.mktemp("run"), job)
    measured: list[tuple[int, int]] = []
    for dies_at in deaths:
        workers = _Watched(parallel_trials=at_once, seed=seed, dies_at=dies_at)
        with contextlib.suppress(_KilledError):
            _search(job, RunStore.open(store.path), workers)
        measured += workers.stages_made
    last = _Watched(parallel_trials=1 + seed % at_once, seed=seed)
    _search(job, RunStore.open(store.path), last)
    measured += last.stages_made

    trials = store.trials()
    assert len(set(measured)) == len(measured)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert store.unfinished_trials() == []
    launched = [trial.config for trial in trials if trial.launched]
    assert len(set(launched)) == len(launched) == 8
    assert all(trial.outcome.outcome == "measured" for trial in trials if trial.launched)
    assert TrialState.RUNNING not in _states(store)


def test_a_stop_lets_every_trial_end_its_stage_and_each_goes_on_later(tmp_path: Path) -> None:
    """Ctrl-C costs no stage on any card, and two cut-off trials are both gone on with under their own numbers."""
    job = _job(trials=8)
    store = _store(tmp_path, job)
    workers = _Watched(parallel_trials=3, seed=1)

    def stop() -> bool:
        return len(workers.running) == 3 and len(workers.stages_made) > 12

    asked = False

    def stop_requested() -> bool:
        nonlocal asked
        asked = asked or stop()
        return asked

    with pytest.raises(StopRequestedError):
        _search(job, store, workers, stop_requested=stop_requested)
    assert workers.running == {}
    unfinished = {asked.number: asked.config for asked in store.unfinished_trials()}
    assert len(unfinished) >= 2
    kept = {number: kept_stages(store.trial_directory(number)) for number in unfinished}
    assert all(kept.values())

    again = _Watched(parallel_trials=3, seed=2)
    _search(job, RunStore.open(store.path), again)
    resumed = {spec.number: spec for spec in again.launched if spec.number in unfinished}
    assert {number: spec.config for number, spec in resumed.items()} == unfinished
    assert {number: list(spec.kept_stages) for number, spec in resumed.items()} == kept
    assert all(trial.outcome.outcome == "measured" for trial in store.trials() if trial.launched)


def test_a_worker_lost_among_others_costs_its_own_trial_one_try(tmp_path: Path) -> None:
    """The neighbours' ladders are climbed once, and the setting that was lost is measured."""

    def fails(spec: TrialSpec) -> Failed | None:
        clash = Failed(kind=FailureKind.INFRASTRUCTURE, detail="port held by another server")
        return clash if spec.number == 2 else None

    job = _job(trials=8)
    store = _store(tmp_path, job)
    _search(job, store, _Watched(parallel_trials=3, seed=4, fails=fails))
    trials = store.trials()
    again = [trial for trial in trials if trial.config == trials[2].config]
    assert [trial.outcome.outcome for trial in again] == ["failed", "measured"]
    others = [trial.config for trial in trials if trial.launched and trial.config != trials[2].config]
    assert len(set(others)) == len(others) == 7
    assert {trial.role for trial in trials} == {TrialRole.STUDY}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("also_fails", ["", "port held by another server"])
def test_a_device_that_stays_full_costs_its_place_and_the_others_go_on(
    tmp_path: Path, seed: int, also_fails: str
) -> None:
    """One bad card of three does not end the night, and a retry waits for a place where there is none."""

    def fails(spec: TrialSpec) -> Failed | None:
        clash = Failed(kind=FailureKind.INFRASTRUCTURE, detail=also_fails)
        return clash if also_fails and spec.number == 3 else None

    job = _job(trials=8)
    store = _store(tmp_path, job)
    workers = _Watched(parallel_trials=3, seed=seed, fails=fails, fills_in=3)
    study = Study(job.search_space, store.path / "study.journal", seed=job.seed, impossible=job.impossible)
    launches = Launches(job, store, workers, Silent())
    search(job, study, launches)
    trials = store.trials()
    assert [device.device for device in launches.full_devices] == ["GPU-a"]
    assert launches.full_device is None
    assert max(workers.together[:4]) == 3
    assert max(workers.together[6:]) == 2
    assert len({trial.config for trial in trials if trial.outcome.outcome == "measured"}) == 8
    assert [trial.number for trial in trials if trial.outcome.outcome == "failed"] == ([3] if also_fails else [])


def test_nothing_is_tried_again_where_no_device_is_left(tmp_path: Path) -> None:
    """The search ends with what it has, and what it could not try again is told as it was."""
    clash = Failed(kind=FailureKind.INFRASTRUCTURE, detail="a neighbour took the memory")
    job = _job(trials=8)
    store = _store(tmp_path, job)
    workers = _Watched(parallel_trials=1, seed=0, fails=lambda spec: clash if spec.number == 2 else None, fills_in=2)
    _search(job, store, workers)
    assert [trial.outcome.outcome for trial in store.trials()] == ["measured", "measured", "failed"]


def test_time_side_by_side_is_counted_once(tmp_path: Path) -> None:
    """Four cards for an hour are an hour of the user's time, and four device-hours."""
    job = _job()
    store = _store(tmp_path, job)
    one = resolved_run().trials[0].model_copy(update={"wall_s": 100.0, "start_s": 10.0, "measure_s": 80.0})
    for number, begun_s in enumerate((0.0, 100.0, 100.0, 150.0)):
        store.write_trial(one.model_copy(update={"number": number, "begun_s": begun_s}))
    launches = Launches(job, store, FakeWorkers(), Silent())
    assert 250.0 <= launches.elapsed_s() < 400.0
    split = launches.time_split()
    assert (split.start_s, split.measure_s) == pytest.approx((25.0, 200.0))
    assert split.start_s + split.measure_s + split.overhead_s == pytest.approx(split.wall_s)
    hours = job.model_copy(update={"budget": job.budget.model_copy(update={"device_hours": 500.0 / 3600})})
    assert Launches(hours, store, FakeWorkers(), Silent()).seconds_left() == pytest.approx(100.0)
