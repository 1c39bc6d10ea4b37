"""vLLM as the tuner meets it: `vllm serve` from any environment a job names, its log, and its HTTP."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.engine_config import EngineConfig, Setting
from tuner.engines import vllm_log
from tuner.engines.adapter import Installed, Reading, asked, start_timeout_s
from tuner.engines.device_return import NotFree
from tuner.engines.kv_block import kv_block_bytes
from tuner.engines.process import how_it_ended, read_url
from tuner.engines.vllm_config import captures_graphs, device_of, parameters
from tuner.engines.vllm_install import Question, ask, flags_of
from tuner.gpus import visible_gpus
from tuner.inputs import InputError
from tuner.job import EngineSpec, TuningJob
from tuner.measure.memory import EngineMemory
from tuner.measure.prometheus import VLLM_METRICS, MetricNames, read_infos
from tuner.parameters import SearchedValues
from tuner.placement import needs_gpu_count
from tuner.records import EngineFacts, Failed, FailureKind

LONGEST_START_S = 1800.0
"""A first start on a GPU fetches and loads a big model's weights, compiles it, warms kernels up and captures graphs of
dozens of batch sizes: minutes each. Unit: seconds."""

CPU_LONGEST_START_S = 600.0
"""No graphs there, and small models: the longest start seen took two minutes. Unit: seconds."""

ANSWER_S = 60.0
"""Longest `/server_info` may take: it looks over the whole machine. Unit: seconds."""

_OWN_CACHE = "~/.cache/kneetune/vllm"
"""What vLLM compiles, kept from launch to launch and from job to job; its keys tell versions and configs apart."""

_NOT_FOR_IT = re.compile(r"PYTHON(PATH|HOME|STARTUP)$|VIRTUAL_ENV$|RAY_")
"""What leads to this process's packages and to its Ray: vLLM has an environment of its own."""

_ALWAYS = ("--host", "--port", "--served-model-name")


@dataclass(frozen=True, slots=True)
class VllmEngine:
    """The adapter of vLLM."""

    name: str = "vllm"
    settable: frozenset[str] = frozenset(EngineConfig.model_fields) - {"extra_args"}
    # It shows what it made of the JSON, with dozens of keys that nobody wrote.
    not_applicable: frozenset[str] = frozenset({"speculative_config"})
    metrics: MetricNames = VLLM_METRICS
    health: str = "/health"
    own_keys: frozenset[str] = frozenset({"command", "environment", "cpus"})
    assumed_start_s: float = 60.0
    exit_grace_s: float = 30.0

    def longest_start_s(self, spec: EngineSpec) -> float:
        """Ten minutes on a CPU; half an hour elsewhere, where kernels are compiled and graphs captured."""
        return CPU_LONGEST_START_S if spec.device == "cpu" else LONGEST_START_S

    def installed(self, job: TuningJob) -> Installed:
        """Ask the environment's own Python which flags its vLLM knows and what it takes where it is told nothing.

        Raises:
            InputError: where there is no vLLM, it does not know a flag, or refuses the model or a fixed parameter.
        """
        spec, searched = job.engine, set(job.search_space.searched)
        config = job.config(_any_values(job))
        fixed = {name: value for name, value in asked(self, config).items() if name not in searched}
        arguments = ("--model", job.model, *_flags(fixed), *_executor(config), *config.extra_args)
        environment = self.environment(os.environ, job.model, spec)
        told = ask(
            Question(
                command=_command(spec),
                flags=flags_of(arguments) | {*_ALWAYS, *map(_flag, searched)} - {"--model"},
                arguments=arguments,
                environment=tuple(sorted(environment.items())),
            )
        )
        expected = "cuda" if spec.device == "auto" and needs_gpu_count(spec) and visible_gpus() else spec.device
        if expected not in ("auto", told.device):
            raise InputError(
                f"the vLLM {told.version} of {_command(spec)[0]} computes on {told.device}, and {expected} is expected "
                f"here: name another (engine.command), or the device it has (engine.device: {told.device})"
            )
        return Installed(version=told.version, defaults=told.defaults, device=told.device, flags=told.flags)

    def command(
        self, model: str, config: EngineConfig, spec: EngineSpec, *, port: int, served_model_name: str
    ) -> list[str]:
        """The argument list that starts this config on 127.0.0.1:`port`, every parameter that is set explicit."""
        return [
            *(*_command(spec), "serve", model),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", served_model_name),
            *_flags(asked(self, config)),
            *_executor(config),
            *config.extra_args,
        ]

    def environment(
        self, inherited: Mapping[str, str], model: str, spec: EngineSpec, *, num_devices: int = 1
    ) -> dict[str, str]:
        """This process's environment without what leads to our packages, with vLLM kept to this machine.

        What the job sets goes before what is inherited, and that before what is set here.
        """
        here = {
            "VLLM_SERVER_DEV_MODE": "1",  # /server_info and /reset_prefix_cache; it listens on 127.0.0.1 alone
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(Path(_OWN_CACHE).expanduser()),
            # Its own limit for its core, ten minutes: one of the two limits has to rule, and this one can be set.
            "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(start_timeout_s(self, spec))),
        }
        if Path(model).is_dir():
            here["HF_HUB_OFFLINE"] = "1"
        if spec.cpus is not None:
            here["VLLM_CPU_OMP_THREADS_BIND"] = _cpus_of_each(num_devices, spec.cpus)
        kept = {name: value for name, value in inherited.items() if _NOT_FOR_IT.match(name) is None}
        return here | kept | {"VLLM_SERVER_DEV_MODE": "1"} | dict(spec.environment)

    def progress(self, line: str) -> str | None:
        """How far a start has come, by a line of its log."""
        return vllm_log.progress(line)

    def read(self, base_url: str, *, log: Path) -> Reading:
        """Ask a server who it is and which values are in force, by `/v1/models`, `/server_info` and `/metrics`.

        Where its memory went stands in its log alone.
        """
        model_name = str(_json(f"{base_url}/v1/models")["data"][0]["id"])
        try:
            config = _json(f"{base_url}/server_info?config_format=json")["vllm_config"]
        except (OSError, LookupError):
            return Reading(model_name=model_name)
        caches = read_infos(_text(f"{base_url}/metrics"), "vllm:cache_config_info")
        blocks = [cache.get("num_gpu_blocks", "") for cache in caches]
        text = log.read_text(encoding="utf-8", errors="replace")
        in_force = parameters(config)
        memory = vllm_log.memory_of(text)
        facts = EngineFacts(
            engine=self.name,
            version=str(_json(f"{base_url}/version")["version"]),
            device=device_of(config),
            num_gpu_blocks=sum(map(int, blocks)) if blocks and all(map(str.isdecimal, blocks)) else None,
            block_size=_whole(caches[0].get("block_size")) if caches else None,
            max_model_len=int(in_force["max_model_len"]),
            memory_total_bytes=vllm_log.memory_total(text),
            memory_reserved_bytes=memory.requested_bytes,
            weights_bytes=memory.weights_bytes,
            kv_block_bytes=_block_bytes(config, in_force, caches, memory),
            captures_graphs=captures_graphs(config),
        )
        return Reading(model_name=model_name, in_force=in_force, facts=facts, memory=memory)

    def last_words(self, log: Path, *, was_ready: bool, exit_code: int | None = None) -> Failed:
        """Why an engine ended: by the line of its log that others only echo, else by its exit code."""
        text = log.read_text(encoding="utf-8", errors="replace")
        said = vllm_log.decisive(text, was_ready=was_ready, exit_code=exit_code)
        if said is not None:
            return said
        # Nothing kills itself so: somebody did, or the kernel for want of memory; no setting is condemned for either.
        kind = FailureKind.INFRASTRUCTURE if exit_code == -signal.SIGKILL else FailureKind.CRASHED
        return Failed(kind=kind, detail=f"{how_it_ended(exit_code)} and gave no reason; see {log}")

    def not_free(self, detail: str) -> NotFree | None:
        """What a start was short of, where less was free than its share."""
        return vllm_log.not_free(detail)


VLLM = VllmEngine()


def _command(spec: EngineSpec) -> tuple[str, ...]:
    return spec.command or ("vllm",)


def _any_values(job: TuningJob) -> SearchedValues:
    """Values for the searched parameters, to be left out again."""
    return SearchedValues.model_validate(
        {name: job.search_space.choices(name)[0] for name in job.search_space.searched}
    )


def _executor(config: EngineConfig) -> tuple[str, str]:
    """What vLLM takes by itself where it does not find Ray; beside ours it would take that for its own."""
    devices_a_core = config.tensor_parallel_size * config.pipeline_parallel_size
    return "--distributed-executor-backend", "uni" if devices_a_core == 1 else "mp"


def _flags(parameters: Mapping[str, Setting]) -> list[str]:
    """Each parameter as vLLM's parser takes it, false in its explicit negative form."""
    flags: list[str] = []
    for name, value in parameters.items():
        if isinstance(value, bool):
            flags.append(_flag(name) if value else f"--no-{_flag(name)[2:]}")
        else:
            flags += [_flag(name), str(value)]
    return flags


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _cpus_of_each(num_workers: int, count: int) -> str:
    """The first CPUs that this process may use, dealt out to all cores' workers as vLLM's thread binding takes them.

    Where there are fewer CPUs than workers, some share one: vLLM starts no worker that has none.
    """
    cpus = sorted(os.sched_getaffinity(0))[:count]
    return "|".join(
        ",".join(map(str, cpus[worker::num_workers] or [cpus[worker % len(cpus)]])) for worker in range(num_workers)
    )


def _block_bytes(
    config: Mapping[str, Any],
    in_force: Mapping[str, Setting],
    caches: list[dict[str, str]],
    memory: EngineMemory,
) -> int | None:
    """By the shape of a model that is on this machine; None where it is not, or is of another kind."""
    size, blocks = (_whole(caches[0].get(name)) if caches else None for name in ("block_size", "num_gpu_blocks"))
    shape = _shape(str(config["model_config"]["model"]))
    if size is None or blocks is None or shape is None or memory.kv_cache_bytes is None:
        return None
    return kv_block_bytes(shape, in_force, block_size=size, blocks_a_core=blocks, kv_cache_bytes=memory.kv_cache_bytes)


def _shape(model: str) -> dict[str, Any] | None:
    """A model's config.json: of a folder, or of what was downloaded before."""
    from huggingface_hub import try_to_load_from_cache  # takes a third of a second, which --help need not wait for

    try:
        file = Path(model) / "config.json" if Path(model).is_dir() else try_to_load_from_cache(model, "config.json")
        shape = json.loads(Path(file).read_text(encoding="utf-8")) if isinstance(file, str | Path) else None
    except (OSError, ValueError):
        return None
    return shape if isinstance(shape, dict) else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _text(url: str) -> str:
    return read_url(url, timeout_s=ANSWER_S).decode()


def _json(url: str) -> Any:
    return json.loads(_text(url))
