"""Where a result comes from: versions, hardware, model, job."""

from __future__ import annotations

import hashlib
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

from tuner.answer import Provenance
from tuner.engines.registry import adapter_of
from tuner.gpus import described_gpus
from tuner.job import TuningJob
from tuner.placement import needs_gpu_count

PACKAGES = ("optuna", "ray", "torch", "transformers", "pandas", "numpy", "plotly", "aiohttp")
"""Those whose version can change a figure or a decision."""


def provenance(job: TuningJob) -> Provenance:
    """What a reader needs to judge whether the answer still holds."""
    installed = adapter_of(job.engine).installed(job)
    return Provenance(
        kneetune_version=metadata.version("kneetune"),
        engine=adapter_of(job.engine).name,
        engine_version=installed.version,
        model=job.model,
        model_hash=model_hash(job.model),
        workload=job.workload.name,
        workload_hash=job.workload.hash,
        device=installed.device or _device(job),
        hardware=hardware(),
        python=platform.python_version(),
        packages={name: metadata.version(name) for name in PACKAGES},
        seed=job.seed,
        simulated=job.engine.law is not None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


_GGUF_HEAD_BYTES = 2**20
"""Names, shapes and the vocabulary stand there."""


def hardware() -> str:
    """The processor, its cores and the memory, in one line."""
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{_cpu_name()}, {psutil.cpu_count()} cores, {memory_gib:.0f} GiB"


def model_hash(model: str) -> str:
    """Names a model by content: sha256 over a local folder's config and the names and sizes of its weights.

    Of a GGUF file over its size and its beginning, which says what it holds. The weights themselves are not read: they
    are large, and a changed file nearly always changes its size or name.
    For anything that is not on this machine the name is all there is.
    """
    digest = hashlib.sha256(model.encode())
    folder = Path(model)
    if folder.is_dir():
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(f"{file.name}:{file.stat().st_size}".encode())
    elif folder.is_file():
        with folder.open("rb") as weights:
            digest = hashlib.sha256(weights.read(_GGUF_HEAD_BYTES) + str(folder.stat().st_size).encode())
    return digest.hexdigest()[:16]


def _device(job: TuningJob) -> str:
    if job.engine.law is not None:
        return f"simulated: {job.engine.law}"
    gpus = described_gpus() if needs_gpu_count(job.engine) else None
    if gpus is not None:
        return gpus
    size = job.engine.device_memory
    return "cpu" if size is None else f"cpu, {size / 2**20:.0f} MiB set aside as the device"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
