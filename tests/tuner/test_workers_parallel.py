"""Four trials at once on Ray, each with a GPU of its own as far as Ray knows; engines are simulated, processes real."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.fakes.records import resolved_run
from tests.tuner.kill_study import JOB
from tuner.engine_config import EngineConfig
from tuner.engines.family import leader, read_launch
from tuner.job import TuningJob, load_job
from tuner.launches import Launches
from tuner.placement import Placement
from tuner.progress import Clock
from tuner.records import FailureKind, StageRecord, TrialRecord, TrialRole
from tuner.search import search
from tuner.space import load_space
from tuner.store import RunStore
from tuner.study import Study
from tuner.workers import Workers

# Ray leaves sockets and files to the interpreter's exit.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

LAW = """
description: 10 ms a step and 1 ms a request
max_model_len: 256
dtype: float32
step_time: {combine: sum, base_s: 0.01, decode_token_s: 0.001}
memory: {total_bytes: 1000000000, weights_bytes: 1000, activation_bytes_per_token: 1, kv_bytes_per_token: 1000}
"""


class _Killer:
    """Watches which engines run on what, and kills one worker while others run."""

    def __init__(self, store: RunStore) -> None:
        self.shown: dict[int, str] = {}
        """What each trial's engine finds in its environment."""

        self.most_alive = 0
        self.killed: int | None = None
        self._store = store
        self._running: set[int] = set()

    def trial_began(self, number: int, role: TrialRole, config: EngineConfig, origin: str, clock: Clock) -> None:  # noqa: ARG002
        """One more."""
        self._running.add(number)

    def stage_ended(self, number: int, stage: StageRecord, clock: Clock) -> None:  # noqa: ARG002
        """Look at every engine there is; once two are up, kill the worker of the one that reports."""
        engines = {}
        for other in self._running:
            launch = read_launch(self._store.trial_directory(other))
            if launch is not None and (engine := leader(launch)) is not None:
                engines[other] = engine
        self.most_alive = max(self.most_alive, len(engines))
        if number in engines:
            self.shown[number] = engines[number].environ()["CUDA_VISIBLE_DEVICES"]
            if self.killed is None and len(engines) > 1:
                os.kill(engines[number].ppid(), signal.SIGKILL)
                self.killed = number

    def trial_ended(self, trial: TrialRecord, clock: Clock) -> None:  # noqa: ARG002
        """One less."""
        self._running.discard(trial.number)

    def note(self, text: str) -> None:
        """Nothing."""


def _job(law: Path) -> TuningJob:
    space = load_space("cpu").model_dump(mode="json")
    space["parameters"] |= {
        "max_num_seqs": {"choices": [4], "unit": "", "why": "small"},
        "max_num_batched_tokens": {"choices": [256, 512], "unit": "", "why": "small"},
        "gpu_memory_utilization": {"choices": [0.6, 0.8], "unit": "", "why": "small"},
    }
    space["cautious_start"] = {"max_num_seqs": 2, "max_num_batched_tokens": 128, "gpu_memory_utilization": 0.7}
    engine = {"law": str(law), "device_memory": None, "cpus": None, "fixed": {"max_model_len": 256}}
    return load_job("embedded", {**JOB, "engine": engine, "search_space": space, "budget": {"trials": 6, "time": "2h"}})


def test_four_gpus_have_one_engine_each_and_a_killed_worker_costs_one_try_of_one_trial(tmp_path: Path) -> None:
    """Engines never share a card and see no other, and what happens to one trial does not reach those beside it."""
    law = tmp_path / "known.yaml"
    law.write_text(LAW, encoding="utf-8")
    job = _job(law)
    store = RunStore.create(tmp_path, job, resolved_run().recommendation.provenance)
    study = Study(job.search_space, tmp_path / "study.journal", seed=0)
    killer = _Killer(store)
    with Workers(Placement(parallel_trials=4, num_gpus=4)) as workers:
        search(job, study, Launches(job, store, workers, killer))

    trials = store.trials()
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert len({trial.config for trial in trials}) == 6
    failed = [trial for trial in trials if trial.outcome.outcome == "failed"]
    assert [trial.number for trial in failed] == [killer.killed]
    assert failed[0].outcome.outcome == "failed"
    assert failed[0].outcome.kind is FailureKind.INFRASTRUCTURE
    assert len([trial for trial in trials if trial.config == failed[0].config]) == 2

    assert 2 <= killer.most_alive <= 4
    measured = [trial for trial in trials if trial not in failed]
    assert {trial.number: trial.devices for trial in measured} == {
        trial.number: (killer.shown[trial.number],) for trial in measured
    }
    assert {trial.devices for trial in measured} <= {("0",), ("1",), ("2",), ("3",)}
    for device in {trial.devices for trial in measured}:
        spans = sorted(_span(store, trial) for trial in measured if trial.devices == device)
        assert all(end <= begun for (_, end), (begun, _) in pairwise(spans))
    launches = [read_launch(store.trial_directory(trial.number)) for trial in trials]
    assert not any(psutil.pid_exists(launch.pid) for launch in launches if launch is not None)


def _span(store: RunStore, trial: TrialRecord) -> tuple[float, float]:
    """When the trial's engine was started, and when its last stage had ended, or later."""
    launch = read_launch(store.trial_directory(trial.number))
    assert launch is not None
    return launch.create_time, launch.create_time + trial.start_s + trial.measure_s
