"""Exported files on the real parser and the real server: what was tuned is what is in force."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.records import resolved_run
from tuner.answer import Profile
from tuner.engine_config import EngineConfig
from tuner.engines.process import read_url
from tuner.engines.vllm import VLLM
from tuner.engines.vllm_config import parameters
from tuner.engines.vllm_install import python_of
from tuner.export.context import ExportContext
from tuner.export.vllm_yaml import vllm_args, vllm_yaml
from tuner.inputs import parse_token_count
from tuner.job import EngineSpec

pytestmark = pytest.mark.vllm

FIXED = {
    "max_model_len": 512,
    "dtype": "float32",
    "enforce_eager": True,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 256 * 2**20,
    "block_size": 32,
    "long_prefill_token_threshold": 128,
    "max_num_active_seqs": 8,
    "max_num_scheduled_tokens": 400,
    "watermark": 0.05,
    "scheduler_reserve_full_isl": False,
    "max_num_queued_reqs": 99,
    "max_num_queued_tokens": 16_000,
}
FURTHER = ("--seed", "7", "--generation-config=vllm", "--override-generation-config", '{"temperature": 0.5}')


def _exports(model: str, folder: Path) -> dict[Path, EngineConfig]:
    """A folder with both profiles as files and as lines, each with the config it must mean."""
    answer, written = resolved_run().recommendation, {}
    for profile in (answer.production, answer.protective):
        assert isinstance(profile, Profile)
        config = profile.config.model_copy(update=FIXED | {"extra_args": FURTHER})
        context = ExportContext(
            profile=profile.model_copy(update={"config": config}),
            recommendation=answer,
            run="r",
            model=model,
            max_model_len=512,
            served_model_name="tuned model",
        )
        for ending, text in (("vllm.yaml", vllm_yaml(context)), ("args.txt", vllm_args(context))):
            path = folder / f"{profile.name}.{ending}"
            path.write_text(text)
            written[path] = config
    return written


def _parsed(vllm_command: str, model: str, lines: list[list[str]]) -> list[dict[str, Any]]:
    """What its own parser makes of each command line."""
    answer = subprocess.run(
        [python_of(vllm_command, path=None), str(Path(__file__).with_name("parse_exported.py"))],
        input=json.dumps(lines),
        env=_environment(model),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [json.loads(line) for line in answer.stdout.splitlines()]


def _environment(model: str) -> dict[str, str]:
    return VLLM.environment(os.environ, model, EngineSpec(name="vllm"))


def test_its_own_parser_reads_every_file_and_line_to_the_exact_values(
    vllm_command: str, model: str, tmp_path: Path
) -> None:
    """A value that the parser drops or reads otherwise would be deployed in place of the one that was measured."""
    exports = _exports(model, tmp_path)
    lines = [
        ["serve", *(("--config", str(path)) if path.suffix == ".yaml" else shlex.split(path.read_text()))]
        for path in exports
    ]
    for config, said in zip(exports.values(), _parsed(vllm_command, model, lines), strict=True):
        asked = config.model_dump(exclude={"extra_args"}, exclude_none=True)
        assert {name: said[name] for name in asked} == asked
        assert (said["model"], said["seed"], said["generation_config"]) == (model, 7, "vllm")
        assert said["override_generation_config"] == {"temperature": 0.5}


def test_what_is_switched_off_is_off_and_lengths_are_read_as_it_reads_them(
    vllm_command: str, model: str, tmp_path: Path
) -> None:
    """It ignores `enable-prefix-caching: false` in a file, where the default is on; and to it 16k is less than 16K."""
    answer = resolved_run().recommendation
    assert answer.production is not None
    lines, sizes = [], ("16k", "16K", "25.6k", "1m", "512")
    for asked in (True, False):
        config = answer.production.config.model_copy(update=FIXED | {"enable_prefix_caching": asked})
        context = ExportContext(
            profile=answer.production.model_copy(update={"config": config}),
            recommendation=answer,
            run="r",
            model=model,
            max_model_len=512,
            served_model_name="tuned model",
        )
        path = tmp_path / f"{asked}.yaml"
        path.write_text(vllm_yaml(context))
        lines.append(["serve", "--config", str(path)])
    lines += [["serve", model, "--max-model-len", size] for size in sizes]
    told = _parsed(vllm_command, model, lines)
    assert [said["enable_prefix_caching"] for said in told[:2]] == [True, False]
    assert [said["max_model_len"] for said in told[2:]] == [parse_token_count(size) for size in sizes]


def test_a_server_started_from_a_file_runs_with_its_values(vllm_command: str, model: str, tmp_path: Path) -> None:
    """The last proof that the file deploys what was tuned: the server says so itself."""
    path, config = next(iter(_exports(model, tmp_path).items()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [vllm_command, "serve", "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, env=_environment(model), stdout=log, stderr=subprocess.STDOUT) as server,
    ):
        try:
            told = _server_info(f"http://127.0.0.1:{port}", server)
        finally:
            server.terminate()
    in_force = parameters(told["vllm_config"])
    asked = config.model_dump(exclude={"extra_args"}, exclude_none=True)
    assert {name: in_force.get(name) for name in asked if asked[name] != "auto"} == {
        name: value for name, value in asked.items() if value != "auto"
    }


def _server_info(url: str, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    while server.poll() is None:
        try:
            return dict(json.loads(read_url(f"{url}/server_info?config_format=json", timeout_s=60.0)))
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"vLLM ended with exit code {server.returncode} before it answered")
