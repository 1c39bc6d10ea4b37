"""How many trials run at once: never more than devices, never a device twice, and nobody is left waiting for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engine_config import EngineConfig
from tuner.inputs import InputError
from tuner.job import EngineSpec
from tuner.placement import Placement, place

CUDA = EngineSpec(device="cuda")
ONE = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, gpu_memory_utilization=0.9)


def _place(
    num_gpus: int, *, size: int = 1, asked: int | None = None, cpus: int = 64, engine: EngineSpec = CUDA
) -> Placement:
    largest = ONE.model_copy(update={"tensor_parallel_size": size})
    return place(engine, largest=largest, num_gpus=num_gpus, num_cpus=cpus, asked=asked)


@pytest.mark.parametrize(
    ("num_gpus", "size", "asked", "at_once"),
    [(1, 1, None, 1), (4, 2, None, 2), (4, 1, None, 4), (4, 3, None, 1), (4, 1, 3, 3), (4, 2, 1, 1), (8, 8, None, 1)],
)
def test_as_many_run_as_fit_or_as_were_asked_for(num_gpus: int, size: int, asked: int | None, at_once: int) -> None:
    """Without a limit each GPU has one engine, not all trials at once on the first."""
    placement = _place(num_gpus, size=size, asked=asked)
    assert (placement.parallel_trials, placement.num_gpus, placement.warnings) == (at_once, num_gpus, ())


def test_every_core_and_stage_of_an_engine_takes_its_gpus() -> None:
    """Two cores of two GPUs each need four: counted as two, the second trial would wait for a GPU without end."""
    largest = ONE.model_copy(update={"tensor_parallel_size": 2, "data_parallel_size": 2})
    assert place(CUDA, largest=largest, num_gpus=8, num_cpus=64).parallel_trials == 2
    with pytest.raises(InputError, match=r"tensor_parallel_size=2 x data_parallel_size=2 takes 4 GPUs, and 3 can be"):
        place(CUDA, largest=largest, num_gpus=3, num_cpus=64)


def test_more_than_fit_are_cut_to_what_fits_with_both_numbers() -> None:
    """A wish that cannot be met is told, and costs no failed trial."""
    placement = _place(4, asked=8)
    assert placement.parallel_trials == 4
    (warning,) = placement.warnings
    assert "=8 " in warning
    assert " 4 GPUs" in warning


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_an_engine_that_takes_more_gpus_than_there_are_is_refused_with_both_numbers(device: str) -> None:
    """Ray would wait for the missing GPU for ever, without a word."""
    with pytest.raises(InputError, match=r"tensor_parallel_size=4 .* 2 can be used"):
        _place(2, size=4, engine=EngineSpec.model_validate({"device": device}))


def test_a_job_for_a_gpu_on_a_machine_without_one_is_refused() -> None:
    """It would be measured on the CPU, or wait for ever."""
    with pytest.raises(InputError, match=r"tensor_parallel_size=1 .* 0 can be used .*CUDA_VISIBLE_DEVICES"):
        _place(0)


@pytest.mark.parametrize(
    "engine", [{"device": "cpu"}, {"law": "h100-8b"}, {"device_memory": "1G"}, {"cpus": 1}, {"device": "auto"}]
)
def test_on_a_cpu_one_engine_runs_at_a_time(engine: dict[str, object]) -> None:
    """Two engines on one CPU measure each other."""
    num_gpus = 0 if engine == {"device": "auto"} else 4
    spec = EngineSpec.model_validate(engine)
    assert _place(num_gpus, engine=spec) == Placement(parallel_trials=1, num_gpus=0)
    placement = _place(num_gpus, engine=spec, asked=3)
    assert placement.parallel_trials == 1
    assert "parallel_trials=3" in placement.warnings[0]


def test_too_few_cpus_for_the_load_generators_are_told_and_change_nothing() -> None:
    """A client-bound night is announced before it begins."""
    placement = _place(8, cpus=8)
    assert placement.parallel_trials == 8
    (warning,) = placement.warnings
    assert "8 trials" in warning
    assert "parallel_trials=4" in warning


@given(
    num_gpus=st.integers(1, 64), size=st.integers(1, 64), asked=st.none() | st.integers(1, 99), cpus=st.integers(1, 256)
)
def test_what_runs_at_once_always_fits(num_gpus: int, size: int, asked: int | None, cpus: int) -> None:
    """No trial waits in Ray for a GPU that another one holds to the job's end."""
    if size > num_gpus:
        with pytest.raises(InputError):
            _place(num_gpus, size=size, asked=asked, cpus=cpus)
        return
    at_once = _place(num_gpus, size=size, asked=asked, cpus=cpus).parallel_trials
    assert at_once >= 1
    assert at_once * size <= num_gpus
    assert asked is None or at_once <= asked
