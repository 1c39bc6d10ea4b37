"""The built-in engine as the tuner meets it: a command line, a decisive line in its log, and its /metrics."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tuner.engine_config import EngineConfig, Setting
from tuner.engines.adapter import LONGEST_START_S, Installed, Reading, asked
from tuner.engines.device_return import NotFree
from tuner.engines.family import TERM_GRACE_S
from tuner.engines.memory_failures import memory_failure
from tuner.engines.process import how_it_ended, read_url
from tuner.job import EngineSpec, TuningJob
from tuner.measure.memory import EngineMemory
from tuner.measure.prometheus import VLLM_METRICS, MetricNames, read_infos, read_memory_bytes
from tuner.parameters import SearchedValues
from tuner.records import EngineFacts, Failed, FailureKind

DEFAULTS = SearchedValues(max_num_seqs=128, max_num_batched_tokens=2048, gpu_memory_utilization=0.92)
"""What the engine does when it is told nothing."""

_NOT_FREE = re.compile(r"asks for ([\d.]+ \w+) of [\d.]+ \w+, but [\d.]+ \w+ is free now")
_HOLDER = re.compile(r"pid (\d+) holds")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}


@dataclass(frozen=True, slots=True)
class BuiltinEngine:
    """The adapter of the built-in engine."""

    name: str = "builtin"
    settable: frozenset[str] = frozenset(
        {
            *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_model_len"),
            *("enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "dtype", "kv_cache_dtype"),
            *("long_prefill_token_threshold", "max_num_active_seqs", "max_num_scheduled_tokens"),
            *("watermark", "scheduler_reserve_full_isl", "max_num_queued_reqs", "max_num_queued_tokens"),
            *("block_size", "num_gpu_blocks_override", "data_parallel_size"),
        }
    )
    not_applicable: frozenset[str] = frozenset()
    metrics: MetricNames = VLLM_METRICS
    health: str = "/health"
    own_keys: frozenset[str] = frozenset({"device_memory", "cpus", "law"})
    assumed_start_s: float = 8.0
    exit_grace_s: float = TERM_GRACE_S

    def longest_start_s(self, spec: EngineSpec) -> float:
        """Five minutes."""
        del spec
        return LONGEST_START_S

    def installed(self, job: TuningJob) -> Installed:
        """It comes with the tuner: nothing has to be asked."""
        del job
        return Installed(version=metadata.version("kneetune"), defaults=DEFAULTS)

    def command(
        self, model: str, config: EngineConfig, spec: EngineSpec, *, port: int, served_model_name: str
    ) -> list[str]:
        """The argument list that starts this config on 127.0.0.1:`port`, every parameter that is set explicit."""
        arguments = [
            *(sys.executable, "-P", "-m", "engine", "serve", model),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", served_model_name),
            *(argument for name, value in asked(self, config).items() for argument in _flag(name, value)),
            *config.extra_args,
        ]
        if spec.law is not None:
            arguments += ["--executor", "simulated", "--law", spec.law]
        if spec.device_memory is not None:
            arguments += ["--device-memory", str(spec.device_memory)]
        if spec.cpus is not None:
            arguments += ["--cpu-omp-threads-bind", cpus_flag(spec.cpus)]
        on_cpu = spec.device_memory is not None or spec.cpus is not None
        return [*arguments, "--device", "cpu" if on_cpu else spec.device]

    def environment(
        self, inherited: Mapping[str, str], model: str, spec: EngineSpec, *, num_devices: int = 1
    ) -> dict[str, str]:
        """Ours as it is: the engine is told all by its arguments."""
        del model, spec, num_devices
        return dict(inherited)

    def progress(self, line: str) -> str | None:
        """It is up in seconds: nothing is told meanwhile."""
        del line
        return None

    def read(self, base_url: str, *, log: Path) -> Reading:
        """Ask a server who it is and which values are in force, by `/v1/models` and `/metrics`.

        Of several cores the parameters are the first's, but for the KV blocks, which are all cores' blocks.
        """
        del log
        models = json.loads(_get(f"{base_url}/v1/models"))
        page = _get(f"{base_url}/metrics")
        caches = read_infos(page, "vllm:cache_config_info")
        labels: dict[str, str] = {}
        for said in (*caches[:1], *read_infos(page, "engine:config_info")):
            labels |= said
        if caches:
            labels["num_gpu_blocks"] = str(sum(int(cache["num_gpu_blocks"]) for cache in caches))
        parts, is_ours = read_memory_bytes(page), "version" in labels
        return Reading(
            model_name=models["data"][0]["id"],
            in_force={name: value for name, value in labels.items() if name in self.settable},
            facts=_facts(labels, parts) if is_ours else None,
            memory=_memory(labels, parts) if is_ours else EngineMemory(),
        )

    def last_words(self, log: Path, *, was_ready: bool, exit_code: int | None = None) -> Failed:
        """Why an engine ended: by the line ours leaves in its log, by a line on lack of memory, by its exit code."""
        text = log.read_text(encoding="utf-8", errors="replace")
        for line in reversed(text.splitlines()):
            event = _event(line)
            if event is not None:
                return Failed(kind=FailureKind(event["kind"]), detail=event["message"])
        without_memory = memory_failure(text, was_ready=was_ready)
        if without_memory is not None:
            return without_memory
        # Nothing kills itself so: somebody did, or the kernel for want of memory; no setting is condemned for either.
        kind = FailureKind.INFRASTRUCTURE if exit_code == -signal.SIGKILL else FailureKind.CRASHED
        return Failed(kind=kind, detail=f"{how_it_ended(exit_code)} and gave no reason; see {log}")

    def not_free(self, detail: str) -> NotFree | None:
        """What a start was short of by the engine's own words, or None where that was not the reason."""
        found = _NOT_FREE.search(detail)
        if found is None:
            return None
        amount, unit = found[1].split()
        holders = tuple(int(pid) for pid in _HOLDER.findall(detail))
        return NotFree(requested_bytes=round(float(amount) * _UNITS[unit]), holders=holders)


BUILTIN = BuiltinEngine()


def cpus_flag(count: int) -> str:
    """The engine's way to say: the first `count` CPUs you may use, whichever machine this is."""
    return f"count:{count}"


def _flag(name: str, value: Setting) -> tuple[str, ...]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}" if value else f"--no-{flag}",)
    return f"--{flag}", str(value)


def _facts(labels: dict[str, str], parts: dict[str, int]) -> EngineFacts:
    """What is kept of `engine:config_info`, `vllm:cache_config_info` and `engine:memory_bytes`."""
    return EngineFacts(
        engine=BUILTIN.name,
        version=labels["version"],
        num_gpu_blocks=int(labels["num_gpu_blocks"]),
        block_size=int(labels["block_size"]),
        device=labels["device"],
        simulated=labels.get("executor") == "simulated",
        max_model_len=int(labels["max_model_len"]),
        kv_block_bytes=parts["kv_block"],
        memory_total_bytes=parts["total"],
        memory_reserved_bytes=parts["requested"],
        weights_bytes=parts["weights"],
        activation_peak_bytes=parts["activation_peak"],
        captures_graphs=_as_bool(labels.get("captures_graphs")),
    )


def _memory(labels: dict[str, str], parts: dict[str, int]) -> EngineMemory:
    return EngineMemory(
        requested_bytes=parts["requested"],
        weights_bytes=parts["weights"],
        activation_peak_bytes=parts["activation_peak"],
        # What usage is a share of: the blocks in force, which an override sets apart from what the share leaves.
        kv_cache_bytes=int(labels["num_gpu_blocks"]) * parts["kv_block"],
    )


def _as_bool(label: str | None) -> bool | None:
    return None if label is None else label == "True"


def _get(url: str) -> str:
    return read_url(url, timeout_s=10.0).decode()


def _event(line: str) -> dict[str, str] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event if event.get("event") in {"start_failed", "core_died"} and "kind" in event else None
