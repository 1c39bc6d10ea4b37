"""How many trials run at once, and on what: from the GPUs there are and from what was asked for. Pure."""

from __future__ import annotations

from tuner.engine_config import EngineConfig
from tuner.frozen import Record
from tuner.inputs import InputError
from tuner.job import EngineSpec

CPUS_PER_TRIAL = 2
"""What a trial on a GPU keeps busy on the host: its load generator and the engine's own process."""


class Placement(Record):
    """Where the trials of a job run."""

    parallel_trials: int
    """How many at once."""

    num_gpus: int
    """GPUs they share; 0 where engines compute on the CPU."""

    warnings: tuple[str, ...] = ()


def needs_gpu_count(engine: EngineSpec) -> bool:
    """Whether an engine computes on GPUs where there are some."""
    return engine.device != "cpu" and (engine.law, engine.device_memory, engine.cpus) == (None, None, None)


def place(
    engine: EngineSpec, *, largest: EngineConfig, num_gpus: int, num_cpus: int, asked: int | None = None
) -> Placement:
    """Place the trials of a job whose launches take as many GPUs as `largest` does, where they take any.

    A GPU takes one engine at a time, and so does a CPU: engines on one device would measure each other.

    Args:
        engine: what the job says of it; `auto` takes GPUs where there are some.
        largest: of its settings the one that takes the most devices.
        num_gpus: how many this process may use.
        num_cpus: CPUs this process may use.
        asked: most trials at once; None: as many as fit.

    Raises:
        InputError: where not even one launch fits, naming what it takes and what there is.
    """
    if not needs_gpu_count(engine) or (engine.device == "auto" and num_gpus == 0):
        return Placement(parallel_trials=1, num_gpus=0, warnings=_on_a_cpu(asked))
    size = largest.num_devices
    if size > num_gpus:
        raise InputError(
            f"{largest.parallel_sizes} takes {size} GPUs, and {num_gpus} can be used here "
            "(nvidia-smi -L lists them, CUDA_VISIBLE_DEVICES may hide some): "
            + ("lower it" if num_gpus else "show this process a GPU, or give the job device: cpu")
        )
    fit = num_gpus // size
    at_once = fit if asked is None else min(asked, fit)
    warnings: list[str] = []
    if asked is not None and asked > fit:
        takes = f" at {largest.parallel_sizes}" if size > 1 else ""
        warnings.append(f"parallel_trials={asked} do not fit on {num_gpus} GPUs{takes}: {fit} run at once")
    if at_once > 1 and at_once * CPUS_PER_TRIAL > num_cpus:
        warnings.append(
            f"{at_once} trials at once keep {at_once * CPUS_PER_TRIAL} CPUs busy and there are {num_cpus}: stages may "
            f"come out client-bound, and parallel_trials={max(1, num_cpus // CPUS_PER_TRIAL)} would not"
        )
    return Placement(parallel_trials=at_once, num_gpus=num_gpus, warnings=tuple(warnings))


def _on_a_cpu(asked: int | None) -> tuple[str, ...]:
    if asked is None or asked == 1:
        return ()
    return (f"parallel_trials={asked}, but engines on one CPU would measure each other: 1 runs at a time",)
