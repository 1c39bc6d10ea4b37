"""One ladder over HTTP with its knee, and the engine's memory figures beside the driver's: for `gpu.py`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from gpu_engine import saved, shape_of
from gpu_kernels import Rows, device_of
from prometheus_client.parser import text_string_to_metric_families
from served import served

from tuner.analysis.fence import ladder_knee
from tuner.climb import Climb, stage_spec
from tuner.job import MeasureSpec
from tuner.ladder import Ladder, next_step
from tuner.load.connection import Endpoint
from tuner.load.workload import load_workload
from tuner.measure.stage import Target, measure_stage
from tuner.records import StageRecord

SERVED = "model"


def ladder(*, smoke: bool) -> dict[str, Rows]:
    """Serve Qwen3-0.6B's shape and climb."""
    device, shape = device_of(smoke=smoke), shape_of("small", smoke=smoke)
    fence = 8 if smoke else 256
    flags = ["--load-format", "dummy", "--served-model-name", SERVED, "--no-enable-prefix-caching"]
    flags += ["--max-num-seqs", str(fence), "--max-model-len", str(shape.max_model_len), "--device", device.type]
    flags += ["--max-num-batched-tokens", str(shape.given["max_num_batched_tokens"])]
    flags += ["--device-memory", "256M"] if smoke else ["--gpu-memory-utilization", "0.9"]
    used_bytes = (lambda: None) if smoke else _driver()
    before = used_bytes()
    with saved(shape) as folder, served(folder, *flags) as url:
        started, parts = used_bytes(), _parts(url)
        stages = _climb(url, fence, shape.max_model_len, smoke=smoke)
        after = used_bytes()
    finding = ladder_knee(stages, fence=fence, seed=0)
    knee = {"verdict": finding.verdict.value, "knee": finding.load, "interval": str(finding.interval)}
    knee |= {"bound by": finding.binding, "warnings": "; ".join(finding.warnings)}
    memory = [{"what": f"engine: {name}", "GiB": size / 2**30} for name, size in parts.items()]
    for what, seen in (("started", started), ("after the ladder", after)):
        if seen is not None and before is not None:
            memory.append({"what": f"driver: taken since before, {what}", "GiB": (seen - before) / 2**30})
    return {
        f"Ladder over HTTP, {shape.name}, chat-short": [_row(stage) for stage in stages],
        "Knee": [knee],
        "Memory": memory,
    }


def _climb(url: str, fence: int, max_model_len: int, *, smoke: bool) -> list[StageRecord]:
    workload = load_workload("chat-short")
    short = {"min_requests": 20, "min_time": "200ms", "max_time": "1s", "max_warm_up": "1s", "precision": 0.5}
    measure = MeasureSpec.model_validate(short if smoke else {"max_time": "4s", "max_warm_up": "3s"})
    task = Climb(
        plan=Ladder(max_num_seqs=fence, max_load=2 * fence),
        workload=workload,
        burst=workload,
        measure=measure,
        entropy=(0, 0),
        fence=fence,
        max_model_len=max_model_len,
        caches_prefixes=False,
    )
    parts = urlsplit(url)
    endpoint = Endpoint(str(parts.hostname), int(parts.port or 0))
    target = Target(endpoint=endpoint, model=SERVED, max_model_len=max_model_len)
    stages: list[StageRecord] = []
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        while (step := next_step(task.plan, stages)) is not None:
            stages.append(runner.run(measure_stage(stage_spec(task, step, stages), target)).record)
            print(_row(stages[-1]), flush=True)  # into the log: where time is up, these are what there is
    return stages


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Uvloop's where it is installed: the figures are the engine's either way, the generator's ceiling is not."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


def _row(stage: StageRecord) -> dict[str, Any]:
    row: dict[str, Any] = {"load": stage.load, "kind": stage.kind.value, "valid": stage.valid}
    row["output tokens/s"] = stage.output_throughput.value
    row["TTFT p95 ms"] = stage.ttft_p95_ms.value
    row["ITL p95 ms"] = stage.itl_p95_ms.value
    row["preemptions"] = stage.num_preemptions
    return row | {"not valid for": "; ".join(stage.invalid_reasons)[:80]}


def _parts(url: str) -> dict[str, float]:
    """Where the engine says that its memory goes. Unit: bytes."""
    with urlopen(f"{url}/metrics", timeout=10) as page:  # noqa: S310 - our own server
        text = page.read().decode()
    families = text_string_to_metric_families(text)
    return {
        sample.labels["part"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "engine:memory_bytes"
    }


def _driver() -> Callable[[], int | None]:
    """What reads how much of the first GPU is used, by the driver; where its library is missing, nothing does."""
    if importlib.util.find_spec("pynvml") is None:
        return lambda: None
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    return lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
