"""Trials run on a real Ray worker, and what happens to the worker is not blamed on the config."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.processes import gone
from tuner.engine_config import EngineConfig
from tuner.engines.family import living, read_launch
from tuner.job import load_job
from tuner.ladder import FixedSteps, LadderStep
from tuner.placement import Placement
from tuner.records import Measured, StageKind, StageRecord, TrialRecord, TrialRole
from tuner.trial import TrialEvent, TrialNote, TrialSpec, WorkerLost
from tuner.workers import Workers

# Ray leaves sockets and files to the interpreter's exit.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

QUICK = {"min_requests": 20, "min_time": "300ms", "max_time": "20s", "max_warm_up": "20s", "precision": 0.5}


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    """One Ray instance for this file: starting it is most of the cost."""
    with Workers(Placement(parallel_trials=1, num_gpus=0)) as workers:
        yield workers


def _spec(directory: Path, *loads: int) -> TrialSpec:
    directory.mkdir(exist_ok=True)
    return TrialSpec(
        number=0,
        role=TrialRole.STUDY,
        config=EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, gpu_memory_utilization=0.6, max_model_len=2048),
        origin="defaults",
        job=load_job("embedded", {"measure": QUICK}),
        plan=FixedSteps(
            steps=tuple(LadderStep(kind=StageKind.LADDER, load=load) for load in loads), request_rate_rps=50.0
        ),
        directory=directory,
    )


def _events(workers: Workers, spec: TrialSpec) -> Iterator[TrialEvent | WorkerLost]:
    """What a trial reports, to its last."""
    workers.start(spec)
    event: TrialEvent | WorkerLost | None = None
    while not isinstance(event, TrialRecord | WorkerLost):
        number, event = workers.next_event()
        assert number == spec.number
        yield event


def test_stages_arrive_one_by_one_and_the_trial_last(pool: Workers, tmp_path: Path) -> None:
    """The driver sees each figure as it is measured, in the worker's words."""
    *stages, trial = [event for event in _events(pool, _spec(tmp_path, 1, 2)) if not isinstance(event, TrialNote)]
    assert {stage.load for stage in stages if isinstance(stage, StageRecord)} == {1, 2}
    assert isinstance(trial, TrialRecord)
    assert isinstance(trial.outcome, Measured)
    assert trial.outcome.stages == tuple(stages)


def test_the_next_trial_runs_in_the_worker_that_is_there(pool: Workers, tmp_path: Path) -> None:
    """Whoever takes the trial's record and asks no further loses no second a launch to a new process."""
    workers = []
    for directory in (tmp_path / "first", tmp_path / "second"):
        next(event for event in _events(pool, _spec(directory, 1)) if isinstance(event, TrialRecord))
        command = json.loads((directory / "command.json").read_text())
        workers.append(command[command.index("--served-model-name") + 1].rpartition("-")[2])
    assert workers[0] == workers[1]


def test_a_killed_worker_takes_its_engine_along_and_the_next_trial_gets_a_new_one(
    pool: Workers, tmp_path: Path
) -> None:
    """After kill -9 of the worker no engine is left on the device, and the study goes on."""
    events = _events(pool, _spec(tmp_path / "first", 1, 2, 4))
    next(event for event in events if isinstance(event, StageRecord))
    launch = read_launch(tmp_path / "first")
    assert launch is not None
    family = living(launch)
    assert len(family) > 1
    os.kill(psutil.Process(launch.pid).ppid(), signal.SIGKILL)
    *_, last = events
    assert isinstance(last, WorkerLost)
    assert gone(*family)

    *_, trial = _events(pool, _spec(tmp_path / "second", 1))
    assert isinstance(trial, TrialRecord)
    assert isinstance(trial.outcome, Measured)
