"""A real vLLM and a small model of random weights; how each test gets a trial on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.checkpoints import SHAPES, make_checkpoint
from tuner.engine_config import EngineConfig
from tuner.job import TuningJob, load_job
from tuner.ladder import FixedSteps, LadderStep
from tuner.records import StageKind, TrialRole
from tuner.trial import TrialSpec

QUICK = {"min_requests": 20, "min_time": "300ms", "max_time": "20s", "max_warm_up": "20s", "precision": 0.5}
_VARIABLE = "KNEETUNE_VLLM"
_BUILT = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "vllm"

MakeJob = Callable[..., TuningJob]
MakeSpec = Callable[..., TrialSpec]


@pytest.fixture(scope="session")
def vllm_command() -> str:
    """The vLLM under test: what KNEETUNE_VLLM names, else the one that `make test-vllm` builds."""
    command = os.environ.get(_VARIABLE, str(_BUILT))
    if not Path(command).is_file():
        pytest.fail(f"{command} is not there: `make test-vllm` builds one, {_VARIABLE}=/path/to/bin/vllm names another")
    return command


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of four million random weights that takes requests of 1024 tokens."""
    folder = tmp_path_factory.mktemp("models") / "qwen3-4m"
    make_checkpoint(SHAPES[0], folder)
    return str(folder)


@pytest.fixture
def make_job(vllm_command: str, model: str) -> MakeJob:
    """A job on that vLLM, with keys of its engine and its own replaced."""

    def job(*, engine: dict[str, object] | None = None, **over: object) -> TuningJob:
        named: dict[str, object] = {"name": "vllm", "command": [vllm_command], "device": "cpu", "device_memory": None}
        fixed = {"max_model_len": 1024, "dtype": "float32", "enforce_eager": True}
        return load_job(
            "embedded", {"model": model, "measure": QUICK, "engine": named | {"fixed": fixed} | (engine or {}), **over}
        )

    return job


@pytest.fixture
def make_spec(tmp_path: Path, make_job: MakeJob) -> MakeSpec:
    """A trial of some loads on such a job, with parameters of its config replaced."""

    def spec(*loads: int, engine: dict[str, object] | None = None, **config: object) -> TrialSpec:
        job = make_job(engine=engine)
        values = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.1}
        fixed = job.engine.fixed.model_dump(exclude_none=True)
        return TrialSpec(
            number=3,
            role=TrialRole.STUDY,
            config=EngineConfig.model_validate(fixed | values | config),
            origin="sampler",
            job=job,
            plan=FixedSteps(
                steps=tuple(LadderStep(kind=StageKind.LADDER, load=load) for load in loads), request_rate_rps=50.0
            ),
            directory=tmp_path,
        )

    return spec
