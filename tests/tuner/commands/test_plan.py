"""A plan says how many trials run at once on this machine, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tuner.kill_study import JOB
from tuner.__main__ import app
from tuner.commands.plan import place_here
from tuner.inputs import InputError
from tuner.job import TuningJob, load_job
from tuner.planning import plan_of


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's tool lists four, and the machine has the CPUs for them."""
    tool = tmp_path / "nvidia-smi"
    lines = "".join(f"GPU {number}: NVIDIA L4 (UUID: GPU-{number})\\n" for number in range(4))
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))


def _job(**engine: object) -> TuningJob:
    given = {"device_memory": None, "cpus": None, **engine}
    return load_job("embedded", {**JOB, "engine": given, "budget": {"trials": 9, "time": "90h"}})


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_machine_with_four_gpus_takes_four_trials_at_once_and_the_time_is_reckoned_with_them(device: str) -> None:
    """Whoever rents four cards sees before the night what they bring."""
    job = _job(device=device)
    four = plan_of(job, place_here(job))
    alone = job.model_copy(update={"parallel_trials": 1})
    one = plan_of(alone, place_here(alone))
    assert (four.parallel_trials, one.parallel_trials) == (4, 1)
    assert four.num_study_launches == one.num_study_launches == 9
    confirming = plan_of(
        job.model_copy(update={"budget": job.budget.model_copy(update={"trials": 1})}), place_here(job)
    )
    # The first ladder alone and eight by fours are three turns; one by one they are nine.
    turn_s = (one.expected_s - four.expected_s) / 6
    assert confirming.expected_s + 2 * turn_s == pytest.approx(four.expected_s)


@pytest.mark.usefixtures("four_gpus")
def test_more_than_fit_are_named_in_the_plan_and_on_a_cpu_there_is_one() -> None:
    """The number that was asked for, the number there is, and what follows."""
    told = CliRunner().invoke(
        app, ["tune", "embedded", "--dry-run", "--parallel-trials", "8", "--json"], catch_exceptions=False
    )
    planned = json.loads(told.stdout)
    assert planned["parallel_trials"] == 1
    assert "parallel_trials=8" in planned["warnings"][0]
    job = _job(device="cuda").model_copy(update={"parallel_trials": 8})
    assert "parallel_trials=8 do not fit on 4 GPUs" in plan_of(job, place_here(job)).warnings[0]


def test_a_divided_gpu_is_refused_until_its_instances_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is launched, with the line that makes it work."""
    tool = tmp_path / "nvidia-smi"
    listing = r"GPU 0: NVIDIA A100 (UUID: GPU-a)\n  MIG 1g Device 0: (UUID: MIG-b)\n  MIG 1g Device 1: (UUID: MIG-c)\n"
    tool.write_text(f"#!/bin/sh\nprintf '{listing}'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES=MIG-b,MIG-c"):
        place_here(_job(device="cuda"))
    assert place_here(_job(device="cpu")).parallel_trials == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b,MIG-c")
    assert place_here(_job(device="cuda")).parallel_trials == 2


def test_a_job_for_a_gpu_is_refused_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for it for ever, silently."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="0 can be used here"):
        place_here(_job(device="cuda"))
