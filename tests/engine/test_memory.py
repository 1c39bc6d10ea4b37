"""The memory budget: its arithmetic, its errors, and that what is measured is what is there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import BatchBuffers
from engine.config import EngineConfig, MemoryBudget
from engine.device_ledger import Claim
from engine.device_memory import activation_peak_bytes, device_memory
from engine.memory import (
    DeviceMemory,
    KvLayout,
    NoKvMemoryError,
    NotEnoughMemoryError,
    memory_budget,
    num_blocks_of_ranks,
    num_kv_blocks,
    requested_bytes,
)
from engine.sampler import Sampler

GB, GIB, MIB = 10**9, 2**30, 2**20
CPU = torch.device("cpu")


def _budget(
    *,
    total: float,
    share: float,
    weights: float,
    activations: float = 0,
    buffers: float = 0,
    non_torch: float = 0,
    free: float | None = None,
) -> MemoryBudget:
    """A budget from figures in GiB; all is free unless told."""
    return memory_budget(
        total_bytes=int(total * GIB),
        free_bytes=int((total if free is None else free) * GIB),
        requested_bytes=int(int(total * GIB) * share),
        weights_bytes=int(weights * GIB),
        activation_peak_bytes=int(activations * GIB),
        request_buffers_bytes=int(buffers * GIB),
        non_torch_bytes=int(non_torch * GIB),
    )


def test_what_is_left_for_kv_is_the_seeds_example() -> None:
    """80 GB at a share of 0.9, 40 of weights and 8 of activations leave 24 GB for KV."""
    device = DeviceMemory(total_bytes=80 * GB, free_bytes=80 * GB)

    budget = memory_budget(
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        requested_bytes=requested_bytes(device, 0.9, least_bytes=0),
        weights_bytes=40 * GB,
        activation_peak_bytes=8 * GB,
        request_buffers_bytes=0,
        non_torch_bytes=0,
    )

    assert budget.kv_cache_bytes == 24 * GB


def test_a_buffer_of_every_token_of_every_request_is_the_seeds_example() -> None:
    """128 requests of 32,768 ids of 4 bytes take 16 MiB: buffers grow with the sequences and are counted so."""
    sizes = {
        "max_num_batched_tokens": 1,
        "max_model_len": 32768,
        "block_size": 1,
    }
    one, many = (BatchBuffers(max_num_seqs=n, device=CPU, **sizes).nbytes for n in (1, 129))
    per_request = 4 + 4 + 8  # context length, query start, sampled row

    assert many - one - 128 * per_request == 16 * MIB


def test_the_buffers_that_are_counted_are_all_the_buffers_there_are() -> None:
    """No buffer grows with the sequences or the budget behind the back of the calculation."""
    made: list[BatchBuffers | Sampler] = []

    def make() -> None:
        sizes = {"max_num_batched_tokens": 64, "max_model_len": 512, "block_size": 16}
        made.append(BatchBuffers(max_num_seqs=48, device=CPU, **sizes))
        made.append(Sampler(seed=0, max_num_seqs=48, eos_token_ids=(), device=CPU))

    assert activation_peak_bytes(make, CPU) == sum(each.nbytes for each in made)


def test_more_than_is_free_names_every_figure_and_the_highest_share_that_works() -> None:
    """Told that memory is short, a user knows by how much and what share to set."""
    device = DeviceMemory(total_bytes=int(22.05 * GIB), free_bytes=int(19.77 * GIB))

    with pytest.raises(NotEnoughMemoryError) as error:
        requested_bytes(device, 0.90, least_bytes=0)

    for figure in ("0.9 ", "22.05 GiB", "19.77 GiB", "19.84 GiB", "at most 0.89"):
        assert figure in str(error.value)
    assert requested_bytes(device, 0.89, least_bytes=0) <= device.free_bytes


def test_no_share_is_offered_where_nothing_is_free() -> None:
    """Nobody is told to set a share of 0."""
    with pytest.raises(NotEnoughMemoryError) as error:
        requested_bytes(DeviceMemory(total_bytes=GIB, free_bytes=MIB), 0.5, least_bytes=0)

    assert "at most" not in str(error.value)


def _refusal(
    *, share: float, least: float, held: Sequence[float] = (), elsewhere: float = 0.0, total: int = 10
) -> tuple[str, DeviceMemory]:
    """What a start is told on a device of so many GiB: engines with pids 1, 2 … hold some, others `elsewhere`."""
    claims = tuple(Claim(pid, "x", int(size * GIB)) for pid, size in enumerate(held, 1))
    free_bytes = int((total - sum(held) - elsewhere) * GIB)
    device = DeviceMemory(total_bytes=total * GIB, free_bytes=free_bytes, claims=claims)
    with pytest.raises(NotEnoughMemoryError) as error:
        requested_bytes(device, share, least_bytes=int(least * GIB))
    return str(error.value), device


def test_a_share_is_offered_only_where_it_may_hold_the_model() -> None:
    """3 of 10 GiB are free: a model of 2.9 is offered 0.30, one of 3.1 is told what to stop, never a dead end."""
    fits, device = _refusal(share=0.5, least=2.9, held=(7.0,))
    assert "stop pid 1, or set gpu_memory_utilization to at most 0.30" in fits
    assert requested_bytes(device, 0.30, least_bytes=int(2.9 * GIB)) >= 2.9 * GIB

    told, _ = _refusal(share=0.5, least=3.1, held=(7.0,))
    assert "at most" not in told
    assert "stop pid 1: what is free does not hold the model" in told
    assert "take 3.10 GiB at least" in told


@pytest.mark.parametrize(
    ("held", "elsewhere", "told"),
    [
        ((1.0, 5.0, 2.0), 0.0, "stop pid 2: "),
        ((3.0, 3.0, 3.0), 0.0, "stop pid 1 and pid 2: "),
        ((1.0, 1.0), 6.0, "stop pid 1 and pid 2 and what else holds the rest: "),
        ((), 8.0, "stop what else holds it: "),
    ],
)
def test_the_fewest_engines_are_named_whose_end_frees_what_is_missing(
    held: tuple[float, ...], elsewhere: float, told: str
) -> None:
    """A user who needs 6 of 10 GiB stops no engine in vain, and learns where stopping engines is not enough."""
    assert told in _refusal(share=0.6, least=5.0, held=held, elsewhere=elsewhere)[0]


def test_where_the_share_asked_for_is_too_small_as_well_the_one_needed_is_named() -> None:
    """Having stopped what was in the way, nobody is refused for the share."""
    told, _ = _refusal(share=0.4, least=5.25, held=(3.0, 4.0))
    assert "stop pid 2 and set gpu_memory_utilization to at least 0.53: " in told


def test_nothing_is_to_be_stopped_for_a_model_that_the_device_does_not_hold() -> None:
    """Nobody stops a running engine for a model that would not fit an empty device."""
    told, _ = _refusal(share=0.6, least=10.5, held=(7.0,))
    assert "stop" not in told
    assert "at most" not in told
    assert "no share of this device holds the model" in told


def test_a_share_too_small_for_one_request_names_the_share_and_the_length_that_would_do() -> None:
    """The way out is right: 24 GiB, share 0.25, 6.5 taken, half a GiB for one request: 0.30, not a guess."""
    budget = _budget(total=24, share=0.25, weights=5.0, activations=1.0, non_torch=0.5)
    layout = KvLayout(block_size=16, block_bytes=4 * MIB)

    with pytest.raises(NoKvMemoryError, match=r"smallest gpu_memory_utilization that would do is 0\.30"):
        num_kv_blocks(budget, layout, max_model_len=2048)


def test_the_largest_length_that_fits_is_named() -> None:
    """A user who cannot give more memory knows which length to ask for."""
    budget = _budget(total=8, share=0.5, weights=3.75)
    layout = KvLayout(block_size=16, block_bytes=4 * MIB)

    with pytest.raises(NoKvMemoryError, match="largest max_model_len that fits is 1024"):
        num_kv_blocks(budget, layout, max_model_len=1025)
    assert num_kv_blocks(budget, layout, max_model_len=1024) == 64


@pytest.mark.parametrize("weights", [23.0, 25.0])
def test_a_model_that_fits_at_no_share_is_not_answered_with_a_share(weights: float) -> None:
    """Nobody raises the share step by step for a model that the device cannot hold."""
    budget = _budget(total=24, share=0.9, weights=weights, activations=1.0, non_torch=0.5)

    with pytest.raises(NoKvMemoryError) as error:
        num_kv_blocks(budget, KvLayout(block_size=16, block_bytes=MIB), max_model_len=16)

    assert "at no gpu_memory_utilization" in str(error.value)
    assert "would do" not in str(error.value)
    assert "raise" not in str(error.value)
    assert ("max_num_batched_tokens" in str(error.value)) == (weights < 24)


def test_a_length_that_fits_at_no_share_is_answered_with_a_length() -> None:
    """Where only the length is too much, the largest one at a full share is named."""
    budget = _budget(total=1, share=0.5, weights=0.25)

    with pytest.raises(NoKvMemoryError, match=r"at 1\.00 max_model_len=12288 fits"):
        num_kv_blocks(budget, KvLayout(block_size=16, block_bytes=MIB), max_model_len=13000)


@given(
    total=st.integers(1 * MIB, 100 * GIB),
    free=st.floats(0.02, 1.0),
    share=st.floats(0.01, 1.0),
    weights=st.floats(0, 1.2),
    length=st.integers(1, 10**6),
    block_bytes=st.integers(1024, 4 * MIB),
)
def test_every_way_out_works(
    total: int, free: float, share: float, weights: float, length: int, block_bytes: int
) -> None:
    """Whatever the error offers, taking it starts the engine, on a device of which others hold a part too."""
    layout = KvLayout(block_size=16, block_bytes=block_bytes)
    device = DeviceMemory(total_bytes=total, free_bytes=int(free * total))
    share *= free

    def num_blocks(share: float, length: int) -> int:
        budget = memory_budget(
            total_bytes=total,
            free_bytes=device.free_bytes,
            requested_bytes=requested_bytes(device, share, least_bytes=0),
            weights_bytes=int(weights * total),
            activation_peak_bytes=0,
            request_buffers_bytes=0,
            non_torch_bytes=0,
        )
        return num_kv_blocks(budget, layout, max_model_len=length)

    try:
        num_blocks(share, length)
    except NoKvMemoryError as error:
        text = str(error)
        better = re.search(r"would do is (\d\.\d\d)", text)
        if better and "is free now" not in text:
            assert num_blocks(float(better[1]), length) > 0
        elif better:
            with pytest.raises(NotEnoughMemoryError):
                num_blocks(float(better[1]), length)
        if shorter := re.search(r"that fits is (\d+)", text):
            assert num_blocks(share, int(shorter[1])) > 0
        if at_most := re.search(r"at (\d\.\d\d) max_model_len=(\d+)", text):
            assert num_blocks(float(at_most[1]), int(at_most[2])) > 0
        assert better or at_most or "at no gpu_memory_utilization" in text or "is free now" in text


def test_a_share_that_others_hold_is_not_offered_without_saying_so() -> None:
    """A user who raises the share as told is not refused at the next start without having been warned."""
    budget = _budget(total=24, free=12, share=0.25, weights=11.75)
    layout = KvLayout(block_size=16, block_bytes=4 * MIB)

    with pytest.raises(NoKvMemoryError, match=r"would do is 0\.53, but only 12\.00 GiB of 24\.00 GiB is free now"):
        num_kv_blocks(budget, layout, max_model_len=3000)


def test_blocks_are_the_fewest_of_any_rank() -> None:
    """A second device with less room is not overrun by a count taken from the first."""
    assert num_blocks_of_ranks([1000, 620]) == 620


def test_the_activation_peak_is_every_byte_held_at_once() -> None:
    """Tensors released before the next is made do not add up; those held together do, as does an op's own scratch."""

    def run() -> None:
        held = torch.empty(3 * MIB, dtype=torch.uint8)
        torch.empty(8 * MIB, dtype=torch.uint8)
        torch.empty(5 * MIB, dtype=torch.uint8)
        del held

    peaks = {activation_peak_bytes(run, CPU) for _ in range(2)}

    assert peaks == {11 * MIB}


def test_the_device_on_cpu_is_the_budget_asked_for() -> None:
    """`device_memory_bytes` sets the total, and no more than that counts as free."""
    config = EngineConfig(model="embedded", device_memory_bytes=64 * MIB)

    assert device_memory(config, CPU, limit_bytes=None) == DeviceMemory(total_bytes=64 * MIB, free_bytes=64 * MIB)


def test_the_device_on_cpu_is_half_the_ram_by_default() -> None:
    """Unasked, the engine leaves half the machine alone."""
    ram = psutil.virtual_memory().total

    for limit in (None, 2 * ram):
        assert device_memory(EngineConfig(model="embedded"), CPU, limit_bytes=limit).total_bytes == ram // 2


def test_two_cores_share_the_half() -> None:
    """Each with a half of its own, they would take the whole machine."""
    one, two = (EngineConfig(model="embedded", data_parallel_size=size) for size in (1, 2))
    totals = [device_memory(config, CPU, limit_bytes=None).total_bytes for config in (one, two)]
    assert totals[1] == totals[0] // 2


def test_a_containers_memory_limit_is_its_ram() -> None:
    """A small container on a large host takes half of its own memory; asked for more, it is told what there is."""
    half = DeviceMemory(total_bytes=32 * MIB, free_bytes=32 * MIB)
    assert device_memory(EngineConfig(model="embedded"), CPU, limit_bytes=64 * MIB) == half

    asked = EngineConfig(model="embedded", device_memory_bytes=96 * MIB)
    assert device_memory(asked, CPU, limit_bytes=64 * MIB) == DeviceMemory(total_bytes=96 * MIB, free_bytes=64 * MIB)


def test_a_budget_adds_up() -> None:
    """Every byte requested is accounted for."""
    budget = _budget(total=10, share=0.8, weights=1, activations=2, buffers=0.5, non_torch=0.25)
    parts = dataclasses.asdict(budget)
    requested = parts.pop("requested_bytes")
    for outside in ("total_bytes", "free_bytes"):
        parts.pop(outside)

    assert sum(parts.values()) == requested
