"""The engines that the conformance kit is run on: where each is found, and a small config that it can serve."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tuner.engine_config import EngineConfig
from tuner.job import TuningJob, load_job

QUICK = {"min_requests": 20, "min_time": "300ms", "max_time": "20s", "max_warm_up": "20s", "precision": 0.5}
_ROOT = Path(__file__).parents[2]
_SENT = {"name": "kit", "input_len": {"kind": "fixed", "tokens": 32}, "output_len": {"kind": "fixed", "tokens": 16}}
_LOAD = {"measure": QUICK, "workload": _SENT, "burst": _SENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUnderTest:
    """An engine that is there, with a job on it and a config that it can serve."""

    job: TuningJob
    config: EngineConfig
    broken_model: str
    """A model that no engine can load."""


def _under_test(job: TuningJob, broken_model: Path, **config: object) -> EngineUnderTest:
    values = {"max_num_seqs": 3, "max_num_batched_tokens": 160, "max_model_len": 512, **config}
    fixed = job.engine.fixed.model_dump(exclude_none=True)
    return EngineUnderTest(job=job, config=EngineConfig.model_validate(fixed | values), broken_model=str(broken_model))


def _empty_folder(folder: Path) -> Path:
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    return broken


def _builtin(folder: Path) -> EngineUnderTest:
    return _under_test(load_job("embedded", dict(_LOAD)), _empty_folder(folder), gpu_memory_utilization=0.3)


def _vllm(folder: Path) -> EngineUnderTest:
    from benchmarks.checkpoints import SHAPES, make_checkpoint

    command = _found("vllm", "KNEETUNE_VLLM", _ROOT / ".venv-vllm" / "bin" / "vllm", made_by="make test-vllm")
    model = folder / "qwen3-4m"
    make_checkpoint(SHAPES[0], model)
    fixed = {"dtype": "float32", "enforce_eager": True}
    engine = {"name": "vllm", "command": [command], "device": "cpu", "device_memory": None, "fixed": fixed}
    job = load_job("embedded", {**_LOAD, "model": str(model), "engine": engine})
    return _under_test(job, _empty_folder(folder), gpu_memory_utilization=0.1)


def _llama(folder: Path) -> EngineUnderTest:
    from benchmarks.gguf_checkpoint import make_gguf

    built = _ROOT / ".llama" / "build" / "bin" / "llama-server"
    command = _found("llama-server", "KNEETUNE_LLAMA", built, made_by="make test-llama")
    model, broken = folder / "llama-4m.gguf", folder / "broken.gguf"
    make_gguf(model)
    broken.write_bytes(b"no weights")
    space = {
        "why": "slots and batch",
        "parameters": {
            "max_num_seqs": {"choices": [3, 8], "why": "slots"},
            "max_num_batched_tokens": {"choices": [160, 512], "why": "batch"},
        },
        "cautious_start": {"max_num_seqs": 3, "max_num_batched_tokens": 160},
    }
    engine = {
        "name": "command",
        "definition": "llama-cpp",
        "command": [command],
        "device": "cpu",
        "device_memory": None,
        "fixed": {"max_model_len": 512},
    }
    job = load_job("embedded", {**_LOAD, "model": str(model), "engine": engine, "search_space": space})
    return _under_test(job, broken)


def _found(name: str, variable: str, built: Path, *, made_by: str) -> str:
    command = os.environ.get(variable) or (str(built) if built.is_file() else shutil.which(name))
    if command is None or not Path(command).is_file():
        pytest.skip(f"there is no {name}: `{made_by}` makes one, {variable}=/path/to/{name} names another")
    return command


ENGINES: dict[str, Callable[[Path], EngineUnderTest]] = {"builtin": _builtin, "vllm": _vllm, "llama": _llama}
"""By the name of its marker; the built-in engine is always there and has none."""

PARAMS = ["builtin", pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("llama", marks=pytest.mark.llama)]
