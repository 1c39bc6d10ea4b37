"""A study whose processes are killed again and again: `python -m tests.tuner.kill_study --kills 30`.

Real processes: the command line, a Ray worker, the built-in engine. After each kill of the driver the run is gone on
with; a killed worker or engine is the driver's own business.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import yaml

from tuner.engines.family import living, read_launch
from tuner.records import SAYS_NOTHING, TrialRecord
from tuner.store import RunStore
from tuner.wording import config_text

JOB = {
    "name": "killed",
    "model": "embedded",
    "engine": {"device_memory": "256M", "cpus": 1, "fixed": {"max_model_len": 256}},
    "workload": {
        "name": "tiny",
        "input_len": {"kind": "fixed", "tokens": 16},
        "output_len": {"kind": "fixed", "tokens": 4},
    },
    "burst": {
        "name": "tiny-burst",
        "input_len": {"kind": "fixed", "tokens": 64},
        "output_len": {"kind": "fixed", "tokens": 4},
    },
    "budget": {"trials": 6, "time": "2h"},
    "measure": {"min_requests": 20, "min_time": "200ms", "max_time": "600ms", "max_warm_up": "600ms", "precision": 0.3},
    "max_load": 8,
}
CHOICES = {"max_num_seqs": [8], "max_num_batched_tokens": [256, 512], "gpu_memory_utilization": [0.6, 0.8]}


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    exit_code: int
    num_kills: dict[str, int] = field(default_factory=lambda: {"driver": 0, "worker": 0, "engine": 0})
    num_resumes: int = 0


def write_job(path: Path) -> None:
    """A job of six settings: four of a small grid, the defaults and the cautious start."""
    space = {
        "why": "small",
        "parameters": {name: {"choices": choices, "unit": "", "why": "small"} for name, choices in CHOICES.items()},
        "cautious_start": {"max_num_seqs": 4, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.7},
    }
    path.write_text(yaml.safe_dump(JOB | {"search_space": space}), encoding="utf-8")


def run_and_kill(directory: Path, *, num_kills: int, seed: int, longest_wait_s: float) -> Outcome:
    """Run the study in `directory` to its end, killing one of its processes `num_kills` times on the way.

    A victim and a moment are drawn before each kill; a study that ends first ends the killing. It is gone on with once
    more then: settings that came to nothing for reasons outside them get another chance.
    """
    rng = np.random.default_rng(seed)
    job, runs = directory / "job.yaml", directory / "runs"
    write_job(job)
    outcome = Outcome(exit_code=-1)
    command = ["tune", str(job), "--runs", str(runs)]
    while True:
        with (directory / "driver.log").open("ab") as log:
            driver = psutil.Popen([sys.executable, "-m", "tuner", *command], stdout=log, stderr=log)
        while driver.poll() is None and sum(outcome.num_kills.values()) < num_kills:
            _wait(driver, rng.uniform(0.0, longest_wait_s))
            victim = str(rng.choice(list(outcome.num_kills)))
            if _kill(victim, driver, runs / "killed"):
                outcome.num_kills[victim] += 1
        outcome.exit_code = driver.wait()
        is_over = outcome.exit_code >= 0
        if is_over and not any(_came_to_nothing(trial) for trial in RunStore(runs / "killed").trials()):
            return outcome
        if is_over and num_kills == 0:
            return outcome
        num_kills = 0 if is_over else num_kills
        outcome.num_resumes += 1
        is_begun = (runs / "killed" / "job.yaml").is_file()
        command = ["tune", "--resume", str(runs / "killed")] if is_begun else command


def _came_to_nothing(trial: TrialRecord) -> bool:
    return trial.outcome.outcome == "failed" and trial.outcome.kind in SAYS_NOTHING


def left_alive(store: RunStore) -> list[psutil.Process]:
    """Every process of the run's launches that lives."""
    launches = [read_launch(directory) for directory in (store.path / "trials").iterdir()]
    return [process for launch in launches if launch is not None for process in living(launch)]


def _wait(driver: psutil.Popen, wait_s: float) -> None:
    deadline = time.perf_counter() + wait_s
    while driver.poll() is None and time.perf_counter() < deadline:
        time.sleep(0.05)


def _kill(victim: str, driver: psutil.Popen, run: Path) -> bool:
    """SIGKILL the driver, the Ray worker that has the engine, or the engine; False where there is none just now."""
    try:
        if victim == "driver":
            driver.kill()
            return True
        unfinished = RunStore(run).unfinished_trials() if run.is_dir() else []
        launch = read_launch(run / "trials" / f"{unfinished[0].number:04d}") if unfinished else None
        if launch is None:
            return False
        keeper = psutil.Process(launch.pid)
        if keeper.create_time() != launch.create_time:
            return False
        for process in keeper.children()[:1] if victim == "engine" else [psutil.Process(keeper.ppid())]:
            process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def main() -> None:
    """Kill, resume, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest-wait", type=float, default=20.0, help="between two kills, in seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([sys.executable, "-c", "import ray"], check=True)
        begun = time.perf_counter()
        outcome = run_and_kill(Path(name), num_kills=args.kills, seed=args.seed, longest_wait_s=args.longest_wait)
        store = RunStore.open(Path(name) / "runs" / "killed")
        trials = store.trials()
        sys.stdout.write(
            f"{outcome} after {time.perf_counter() - begun:.0f} s\n"
            f"numbers without holes: {[trial.number for trial in trials] == list(range(len(trials)))}\n"
            f"left alive: {left_alive(store)}\n"
        )
        for trial in trials:
            said = (
                "measured" if trial.outcome.outcome == "measured" else f"{trial.outcome.kind}: {trial.outcome.detail}"
            )
            sys.stdout.write(f"{trial.number:3} {trial.role:20} {config_text(trial.config)}: {said}\n")


if __name__ == "__main__":
    main()
