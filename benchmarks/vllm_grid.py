"""A grid of engine configs, each with its whole ladder, measured on a real vLLM on this machine's CPU.

    python benchmarks/vllm_grid.py --vllm ENV/bin/vllm --work FOLDER [--only 3]
    python benchmarks/vllm_grid.py --work FOLDER --write benchmarks/data

Truth for judging a search: what each setting really gives, made by no simulator. Every config is launched once, and
its ladder climbed under both workloads. A config that FOLDER already holds is not measured again, so that the grid can
be recorded in several goes (`--only` says how many configs this one measures); `--write` makes the table of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from checkpoints import WIDE_KV, make_checkpoint
from pydantic import Field

from tuner.climb import Climb, climb
from tuner.engine_config import EngineConfig
from tuner.engines.adapter import EngineAdapter, OurEngine, recognised
from tuner.engines.process import EngineStartError, RunningEngine
from tuner.engines.registry import adapter_of
from tuner.engines.starting import serving
from tuner.frozen import Record
from tuner.job import TuningJob
from tuner.ladder import Ladder
from tuner.load.connection import Endpoint
from tuner.load.workload import Workload
from tuner.measure.spec import Target
from tuner.parameters import SearchedValues
from tuner.provenance import hardware
from tuner.records import EngineFacts, Failed, StageRecord

SEQUENCES = (8, 16, 32)
BUDGETS = (64, 256, 1024)
SHARES = (0.045, 0.12)
"""Of 24 GiB the lower leaves some fifty KV blocks beside what vLLM itself takes, the higher more than it needs."""

MAX_LOAD = 64
STAGE_TIME = "4s"

COLUMNS = (
    *("kind", "load", "fenced", "valid", "invalid_reasons", "warm_up_s", "measured_s", "num_completed", "num_failed"),
    *("output_throughput", "request_throughput_rps", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms"),
    *("tpot_p50_ms", "e2e_p50_ms", "mean_prompt_tokens", "mean_output_tokens", "mean_in_flight"),
    *("num_preemptions", "kv_cache_usage_peak", "mean_running", "mean_waiting", "client_cpu_share"),
)
"""What is kept of a stage; an `Estimate` with both ends of its interval."""


class GridPoint(Record):
    """One config: what came of its launch, and its ladder under each workload, by name."""

    config: EngineConfig
    facts: EngineFacts | None = None
    failed: Failed | None = None
    start_s: float | None = None
    stages: dict[str, tuple[StageRecord, ...]] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where the grid is measured, and on what."""

    job: TuningJob
    """Its workload is the first, its burst the second that is measured."""

    work: Path

    @property
    def adapter(self) -> EngineAdapter:
        """The engine's."""
        return adapter_of(self.job.engine)

    def folder(self, config: EngineConfig) -> Path:
        """Of one config."""
        values = (config.max_num_seqs, config.max_num_batched_tokens, config.gpu_memory_utilization)
        return self.work / "-".join(map(str, values))

    def configs(self) -> Iterator[EngineConfig]:
        """Every setting of the grid."""
        for seqs, budget, share in itertools.product(SEQUENCES, BUDGETS, SHARES):
            yield self.job.config(
                SearchedValues(max_num_seqs=seqs, max_num_batched_tokens=budget, gpu_memory_utilization=share)
            )


def main() -> int:
    """Measure what is missing, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="vllm", help="the command that starts it")
    parser.add_argument("--work", type=Path, required=True, help="where configs are kept as they are measured")
    parser.add_argument("--only", type=int, default=sys.maxsize, help="how many configs to measure at the most")
    parser.add_argument("--write", type=Path, help="write the table of what there is into this folder")
    options = parser.parse_args()
    grid = Grid(job=_job(options.work.resolve(), options.vllm), work=options.work.resolve())
    if options.write is not None:
        _write(grid, options.write)
        return 0
    missing = [config for config in grid.configs() if not (grid.folder(config) / "point.json").exists()]
    for config in missing[: options.only]:
        point = _measured(grid, config)
        (grid.folder(config) / "point.json").write_text(point.model_dump_json(), encoding="utf-8")
        print(f"{grid.folder(config).name}: {_said(point)}", file=sys.stderr)
    print(f"{max(0, len(missing) - options.only)} configs are left", file=sys.stderr)
    return 0


def _job(work: Path, vllm: str) -> TuningJob:
    model = work / "model"
    if not model.exists():
        make_checkpoint(WIDE_KV, model)
    choices = dict(
        zip(
            ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"),
            (SEQUENCES, BUDGETS, SHARES),
            strict=True,
        )
    )
    space = {
        "why": "The grid.",
        "parameters": {name: {"choices": values, "why": "Of the grid."} for name, values in choices.items()},
        "cautious_start": {name: values[0] for name, values in choices.items()},
    }
    engine = {
        "name": "vllm",
        "command": [vllm],
        "fixed": {"max_model_len": 1024, "dtype": "float32", "enforce_eager": True},
    }
    return TuningJob.model_validate(
        {
            "name": "vllm-grid",
            "model": str(model),
            "engine": engine,
            "workload": "chat-short",
            "burst": {
                "name": "long-prompts-short",
                "why": "Prompts five times as long, answers of the same length.",
                "input_len": {"kind": "uniform", "low": 384, "high": 768},
                "output_len": {"kind": "uniform", "low": 24, "high": 40},
            },
            "search_space": space,
            "measure": {"max_time": STAGE_TIME, "max_warm_up": STAGE_TIME},
        }
    )


def _measured(grid: Grid, config: EngineConfig) -> GridPoint:
    folder, adapter, engine = grid.folder(config), grid.adapter, grid.job.engine
    folder.mkdir(parents=True, exist_ok=True)
    name = f"grid-{os.getpid()}"
    try:
        with serving(adapter, grid.job.model, config, engine, served_model_name=name, directory=folder) as running:
            start_s = time.perf_counter() - running.begun_s
            reading = adapter.read(running.base_url, log=running.log_path)
            ours = recognised(adapter, reading, config, served_model_name=name, url=running.base_url)
            if isinstance(ours, Failed):
                return GridPoint(config=config, failed=ours, start_s=start_s)
            stages = {
                workload.name: tuple(_climbed(grid, config, workload, (running, ours, name)))
                for workload in (grid.job.workload, grid.job.burst)
            }
            return GridPoint(config=config, facts=ours.facts, start_s=start_s, stages=stages)
    except EngineStartError as error:
        failed = adapter.last_words(folder / "engine.log", was_ready=False, exit_code=error.exit_code)
        return GridPoint(config=config, failed=failed)


def _climbed(
    grid: Grid, config: EngineConfig, workload: Workload, at: tuple[RunningEngine, OurEngine, str]
) -> Iterator[StageRecord]:
    running, ours, name = at
    target = Target(
        endpoint=Endpoint.from_url(running.base_url),
        model=name,
        max_model_len=ours.facts.max_model_len,
        root_pid=running.pid,
        memory=ours.memory,
        not_applicable=grid.adapter.not_applicable,
    )
    task = Climb(
        plan=Ladder(max_num_seqs=config.fence, max_load=MAX_LOAD),
        workload=workload,
        burst=workload,
        measure=grid.job.measure,
        entropy=(len(workload.name), config.max_num_seqs * config.max_num_batched_tokens),
        fence=config.fence,
        max_model_len=ours.facts.max_model_len,
        caches_prefixes=config.enable_prefix_caching,
    )
    folder = grid.folder(config) / workload.name
    folder.mkdir(exist_ok=True)
    yield from climb(task, target, kept=(), directory=folder, goes_on=lambda _: running.is_alive())


def _said(point: GridPoint) -> str:
    if point.failed is not None:
        return f"{point.failed.kind}: {point.failed.detail}"
    best = {name: max(stage.output_throughput.value for stage in stages) for name, stages in point.stages.items()}
    preemptions = sum(stage.num_preemptions or 0 for stages in point.stages.values() for stage in stages)
    return f"{point.facts and point.facts.num_gpu_blocks} KV blocks, {best} tokens/s, {preemptions} preemptions"


def _write(grid: Grid, folder: Path) -> None:
    files = [grid.folder(config) / "point.json" for config in grid.configs()]
    points = [GridPoint.model_validate_json(file.read_bytes()) for file in files if file.exists()]
    rows = [row for point in points for row in _rows(point)]
    folder.mkdir(parents=True, exist_ok=True)
    pd.json_normalize(rows, sep="_").round(4).to_csv(folder / "vllm-cpu-grid.csv", index=False)
    facts = next(point.facts for point in points if point.facts is not None)
    provenance = {
        "what": "vLLM on a CPU: every config of the grid launched once, a ladder climbed under each workload",
        "command": "python benchmarks/vllm_grid.py --vllm ENV/bin/vllm --work FOLDER",
        "engine": f"{facts.engine} {facts.version}",
        "device": facts.device,
        "hardware": hardware(),
        "model": f"{WIDE_KV.name}: random weights of benchmarks/checkpoints.py, float32, eager",
        "workloads": [each.model_dump(mode="json") for each in (grid.job.workload, grid.job.burst)],
        "configs": len(points),
        "stages": sum(len(stages) for point in points for stages in point.stages.values()),
    }
    text = json.dumps(provenance, indent=1) + "\n"
    (folder / "vllm-cpu-grid.json").write_text(text, encoding="utf-8")


def _rows(point: GridPoint) -> Iterator[dict[str, object]]:
    config = point.config
    head: dict[str, object] = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "start_s": point.start_s,
        "num_gpu_blocks": None if point.facts is None else point.facts.num_gpu_blocks,
        "failed": None if point.failed is None else point.failed.kind.value,
    }
    if point.failed is not None:
        yield head
    for workload, stages in point.stages.items():
        for stage in stages:
            figures = stage.model_dump(mode="json", include=set(COLUMNS))
            for name in [name for name in figures if isinstance(figures[name], dict)]:
                figures[name].pop("num_samples")
            figures["invalid_reasons"] = "; ".join(stage.invalid_reasons)
            yield head | {"workload": workload} | figures


if __name__ == "__main__":
    sys.exit(main())
