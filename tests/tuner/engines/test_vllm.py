"""How vLLM is started and read, on what a real 0.32.0 said (tests/golden/vllm_config.json); it runs in tests/vllm."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tuner.engine_config import EngineConfig
from tuner.engines import vllm, vllm_install
from tuner.engines.adapter import recognised, start_timeout_s
from tuner.engines.vllm import VLLM
from tuner.engines.vllm_config import captures_graphs, device_of
from tuner.engines.vllm_install import Question, Told, flags_of, python_of, told
from tuner.inputs import InputError
from tuner.job import EngineSpec, TuningJob, load_job
from tuner.records import Failed, FailureKind

TOLD = json.loads((Path(__file__).parents[2] / "golden" / "vllm_config.json").read_text(encoding="utf-8"))
CONFIG = EngineConfig(max_num_seqs=64, max_num_batched_tokens=2048, gpu_memory_utilization=0.9, max_model_len=1024)
SPEC = EngineSpec(name="vllm", command=("/opt/vllm/bin/vllm",))


def _line(config: EngineConfig, spec: EngineSpec = SPEC) -> list[str]:
    return VLLM.command("/models/m4", config, spec, port=1, served_model_name="ours")


def test_every_parameter_is_explicit_and_false_has_its_own_flag() -> None:
    """Defaults differ by device and version, and a flag left out of a false value would leave the feature on."""
    line = _line(CONFIG)
    assert line[:3] == ["/opt/vllm/bin/vllm", "serve", "/models/m4"]
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert line[line.index("--served-model-name") + 1] == "ours"
    told = " ".join(line)
    for flag in (
        "--max-num-seqs 64",
        "--max-num-batched-tokens 2048",
        "--gpu-memory-utilization 0.9",
        "--max-model-len 1024",
        "--no-enable-prefix-caching",
        "--enable-chunked-prefill",
        "--tensor-parallel-size 1",
    ):
        assert f" {flag}" in told
    assert _line(CONFIG, EngineSpec(name="vllm"))[:2] == ["vllm", "serve"]


@pytest.mark.parametrize(
    ("parallel", "executor"),
    [
        ({}, "uni"),
        ({"tensor_parallel_size": 2}, "mp"),
        ({"pipeline_parallel_size": 2}, "mp"),
        ({"data_parallel_size": 2}, "uni"),
    ],
)
def test_no_executor_takes_our_ray_for_its_own(parallel: dict[str, int], executor: str) -> None:
    """Under Ray vLLM would place its workers by Ray, on GPUs that other trials have."""
    line = _line(CONFIG.model_copy(update=parallel))
    assert line[line.index("--distributed-executor-backend") + 1] == executor


def test_its_environment_is_its_own(tmp_path: Path) -> None:
    """Our packages on its path would be imported in place of its own; a local model needs no hub."""
    ours = {"PYTHONPATH": "/ours", "VIRTUAL_ENV": "/ours", "RAY_AUTH_TOKEN": "r", "RAY_ADDRESS": "127.0.0.1:1"}
    inherited = ours | {"HF_TOKEN": "t", "VLLM_CACHE_ROOT": "/cache", "PYTHONUNBUFFERED": "1"}
    got = VLLM.environment(inherited, str(tmp_path), SPEC)
    assert not set(ours) & set(got)
    assert got["PYTHONUNBUFFERED"] == "1"
    assert (got["HF_TOKEN"], got["VLLM_CACHE_ROOT"]) == ("t", "/cache")
    assert (got["VLLM_SERVER_DEV_MODE"], got["VLLM_NO_USAGE_STATS"], got["VLLM_HOST_IP"]) == ("1", "1", "127.0.0.1")
    assert got["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in VLLM.environment({}, "owner/name", SPEC)
    spec = SPEC.model_copy(update={"environment": {"VLLM_HOST_IP": "10.0.0.1"}, "cpus": 1})
    got = VLLM.environment(inherited, "owner/name", spec)
    assert got["VLLM_HOST_IP"] == "10.0.0.1"
    assert got["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("sizes", "cpus", "dealt"),
    [
        ({}, 4, "2,3,5,7"),
        ({"data_parallel_size": 2}, 4, "2,5|3,7"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, 4, "2|3|5|7"),
        ({"data_parallel_size": 3}, 2, "2|3|2"),
    ],
)
def test_every_worker_of_every_core_has_cpus(
    sizes: dict[str, int], cpus: int, dealt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One list for all is a second core that does not start, and the whole server with it."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {7, 5, 3, 2})
    spec, config = SPEC.model_copy(update={"cpus": cpus}), CONFIG.model_copy(update=sizes)
    assert (
        VLLM.environment({}, "owner/name", spec, num_devices=config.num_devices)["VLLM_CPU_OMP_THREADS_BIND"] == dealt
    )


@pytest.mark.parametrize(
    ("over", "limit_s"),
    [
        ({"device": "cuda"}, 1800),
        ({"device": "auto"}, 1800),
        ({"device": "cpu"}, 600),
        ({"start_timeout": "90m"}, 5400),
    ],
)
def test_a_start_gets_the_time_that_a_first_one_takes_there(over: dict[str, object], limit_s: int) -> None:
    """Minutes of compiling would be taken for a hang, by us or by vLLM's own limit, and every setting ruled out."""
    spec = EngineSpec.model_validate({"name": "vllm", **over})
    assert start_timeout_s(VLLM, spec) == limit_s
    assert VLLM.environment({}, "owner/name", spec)["VLLM_ENGINE_READY_TIMEOUT_S"] == str(limit_s)


def _served(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, dev_mode: bool = True) -> None:
    """A server that answers as vLLM does."""
    pages = {
        "/v1/models": json.dumps({"data": [{"id": "ours"}]}),
        "/version": '{"version": "0.32.0"}',
        "/metrics": 'vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="None"} 1.0\n'.replace(
            "None", "98"
        )
        + 'vllm:cache_config_info{block_size="128",engine="1",num_gpu_blocks="97"} 1.0\n',
    }
    if dev_mode:
        pages["/server_info?config_format=json"] = json.dumps({"vllm_config": config})

    def read_url(url: str, *, timeout_s: float) -> bytes:
        path = url.removeprefix("http://x")
        if path not in pages:
            raise OSError(f"{path}: HTTP 404")
        return pages[path].encode()

    monkeypatch.setattr(vllm, "read_url", read_url)


def _asked(**over: object) -> EngineConfig:
    at_golden = {"max_num_seqs": 128, "gpu_memory_utilization": 0.92, "enable_prefix_caching": True}
    return CONFIG.model_copy(update=at_golden | over)


def test_what_runs_is_read_back_in_the_tuners_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record says what was in force; what was only asked for is no evidence."""
    _served(TOLD, monkeypatch)
    log = tmp_path / "engine.log"
    log.write_text("")
    reading = VLLM.read("http://x", log=log)
    facts = reading.facts
    assert facts is not None
    assert (facts.engine, facts.version, facts.device) == ("vllm", "0.32.0", "cpu")
    assert (facts.num_gpu_blocks, facts.block_size, facts.max_model_len) == (195, 128, 1024)
    assert facts.memory_reserved_bytes is None
    assert facts.captures_graphs is False
    assert reading.in_force["dtype"] == "float32"
    assert reading.in_force["kv_cache_dtype"] == "auto"
    found = recognised(VLLM, reading, _asked(dtype="float32"), served_model_name="ours", url="http://x")
    assert not isinstance(found, Failed)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"max_num_seqs": 64}, "max_num_seqs: asked for 64, the engine runs with 128"),
        ({"max_num_active_seqs": 4}, "max_num_active_seqs: asked for 4, the engine runs with None"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching: asked for False, the engine runs with True"),
        ({"dtype": "bfloat16"}, "dtype: asked for bfloat16, the engine runs with float32"),
    ],
)
def test_another_value_in_force_is_a_mismatch_that_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object], told: str
) -> None:
    """A swept value that never reached the server must not be recommended."""
    _served(TOLD, monkeypatch)
    log = tmp_path / "engine.log"
    log.write_text("")
    found = recognised(VLLM, VLLM.read("http://x", log=log), _asked(**asked), served_model_name="ours", url="http://x")
    assert isinstance(found, Failed)
    assert (found.kind, found.detail) == (FailureKind.CONFIG_MISMATCH, told)


def test_a_server_that_shows_no_configuration_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /server_info nothing says which values are in force: unknown fails closed."""
    _served(TOLD, monkeypatch, dev_mode=False)
    reading = VLLM.read("http://x", log=tmp_path / "engine.log")
    found = recognised(VLLM, reading, CONFIG, served_model_name="ours", url="http://x")
    assert isinstance(found, Failed)
    assert found.kind is FailureKind.CONFIG_MISMATCH


@pytest.mark.parametrize(
    ("mode", "eager", "captures"),
    [(0, False, False), ("NONE", False, False), ([2, 1], False, True), ([2, 1], True, False)],
)
def test_whether_graphs_are_captured_is_told(mode: object, captures: bool, eager: bool) -> None:  # noqa: FBT001
    """A fence off the captured sizes may be slow only where there are any."""
    config = TOLD | {
        "device_config": {"device": "cuda:0"},
        "model_config": {"enforce_eager": eager},
        "compilation_config": {"cudagraph_mode": mode},
    }
    assert device_of(config) == "cuda"
    assert captures_graphs(config) is captures


QUESTION = Question(
    command=("/opt/vllm/bin/vllm",),
    flags=frozenset({"--max-num-seqs", "--max-num-queued-reqs"}),
    arguments=("--model", "/models/m4"),
    environment=(),
)
SAID = {"version": "0.32.0", "flags": ["--max-num-seqs", "--max-num-queued-reqs", "--model"], "config": TOLD}


def test_the_defaults_are_what_this_version_takes_here() -> None:
    """They are 128, 256 or 1024 sequences by device and version: the gain over them is stated against the real ones."""
    config = TOLD | {"scheduler_config": TOLD["scheduler_config"] | {"max_num_seqs": 1024}}
    found = told(QUESTION, SAID | {"config": config}, "")
    assert (found.version, found.device) == ("0.32.0", "cpu")
    assert found.defaults.max_num_seqs == 1024
    assert (found.defaults.max_num_batched_tokens, found.defaults.gpu_memory_utilization) == (2048, 0.92)
    assert found.defaults.max_model_len is None


def _job(device: str, folder: Path) -> TuningJob:
    (folder / "config.json").write_text("{}")
    engine = {"name": "vllm", "command": ["/opt/vllm/bin/vllm"], "device": device}
    return load_job("default", {"model": str(folder), "engine": engine})


def _answers(monkeypatch: pytest.MonkeyPatch, *, gpus: tuple[str, ...]) -> list[Question]:
    """The installed vLLM is the golden one, for CPUs; what it is asked."""
    asked: list[Question] = []

    def ask(question: Question) -> Told:
        asked.append(question)
        return told(question, SAID | {"flags": [*question.flags]}, "")

    monkeypatch.setattr(vllm, "ask", ask)
    monkeypatch.setattr(vllm, "visible_gpus", lambda: gpus)
    return asked


def test_only_what_the_job_fixes_is_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is searched is left to vLLM's own choice, and its flags have to be known all the same."""
    asked = _answers(monkeypatch, gpus=())
    installed = VLLM.installed(_job("auto", tmp_path))
    assert (installed.version, installed.device) == ("0.32.0", "cpu")
    (question,) = asked
    assert installed.flags == question.flags  # an export is checked against them
    assert "--max-num-seqs" in question.flags
    assert "--max-num-seqs" not in question.arguments
    assert "--no-enable-prefix-caching" in question.arguments


def test_a_build_for_cpus_is_not_launched_for_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials side by side would share one CPU, each under the name of a GPU."""
    _answers(monkeypatch, gpus=("0", "1"))
    with pytest.raises(InputError, match=r"computes on cpu, and cuda is expected here: .*engine\.device: cpu"):
        VLLM.installed(_job("auto", tmp_path))
    assert VLLM.installed(_job("cpu", tmp_path)).device == "cpu"


@pytest.mark.parametrize(
    ("said", "log", "told_of"),
    [
        (
            {"version": "0.20.1", "flags": ["--max-num-seqs"], "config": TOLD},
            "",
            r"the vLLM 0\.20\.1 of /opt/vllm/bin/vllm does not know --max-num-queued-reqs",
        ),
        (
            {"version": "0.32.0", "flags": SAID["flags"], "error": "ValueError: User-specified max_model_len (4096)"},
            "",
            r"the vLLM 0\.32\.0 of .* refuses the job .*User-specified max_model_len \(4096\)",
        ),
        (
            {},
            "Traceback (most recent call last):\nRuntimeError: operator torchvision::nms does not exist\n",
            "no vLLM that works: RuntimeError: operator torchvision::nms does not exist",
        ),
    ],
)
def test_what_cannot_be_launched_is_an_error_before_the_first_launch(
    said: dict[str, Any], log: str, told_of: str
) -> None:
    """A flag of another version would make every launch exit at once, minutes apart."""
    with pytest.raises(InputError, match=told_of):
        told(QUESTION, said, log)


def test_flags_are_known_however_they_are_written() -> None:
    """Underscores, `=` and keys of a group are all the same to vLLM: none makes a known flag an unknown one."""
    written = ["--max_model_len=1024", "--compilation-config.cudagraph_mode", "NONE", "-1", "--no-enable-log-requests"]
    assert flags_of(written) == {"--max-model-len", "--compilation-config", "--no-enable-log-requests"}


def test_what_has_no_name_goes_to_the_command_line_as_it_is() -> None:
    """A flag that kneetune does not know is the user's own business, and is checked against the version."""
    line = _line(CONFIG.model_copy(update={"extra_args": ("--max-lora-rank", "16")}))
    assert line[-2:] == ["--max-lora-rank", "16"]


def test_the_python_behind_a_command_is_found(tmp_path: Path) -> None:
    """What is asked is the vLLM that will be launched, and no other that is installed."""
    short, long, env, shell = (tmp_path / name for name in ("short", "long", "env", "shell"))
    short.write_text(f"#!{sys.executable}\nimport vllm\n")
    long.write_text(f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\nimport vllm\n")
    env.write_text(f"#!/usr/bin/env {Path(sys.executable).name}\n")
    shell.write_text("#!/bin/bash\nexec docker run vllm\n")
    for script in (short, long, env, shell):
        script.chmod(0o755)
    path = str(Path(sys.executable).parent)
    for script in (short, long, env):
        assert python_of(str(script), path=path) == sys.executable
    assert python_of(sys.executable, path=path) == sys.executable
    with pytest.raises(InputError, match="no script of a Python"):
        python_of(str(shell), path=path)
    with pytest.raises(InputError, match="there is no such command"):
        python_of("vllm", path=str(tmp_path))


def test_an_environment_without_vllm_says_so() -> None:
    """The commonest mistake is the wrong environment, and its error names the import that failed."""
    question = Question(
        command=(sys.executable,), flags=frozenset(), arguments=("--model", "m"), environment=tuple(os.environ.items())
    )
    with pytest.raises(InputError, match="No module named 'vllm'"):
        vllm_install.ask(question)
