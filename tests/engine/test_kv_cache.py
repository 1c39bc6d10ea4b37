"""The float8 KV cache: what it stores, in how many bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.executor.torch import TorchExecutor
from engine.kv_cache import FP8_HEADROOM, KvCache, KvScales, new_kv_cache
from engine.request import SamplingParams
from engine.step import ScheduledRequest, StepPlan
from kernels.reference import FP8, kv_write

MIB = 2**20
SHAPE = (1, 2, 3, 4, 2, 8)
ONES = (KvScales(),)


def _stored(key: torch.Tensor, scales: KvScales) -> torch.Tensor:
    """What is read back of one token's keys (1, 2, 8)."""
    (layer,) = new_kv_cache(SHAPE, (scales,), FP8, key).layers()
    kv_write(key, key, layer.keys, layer.values, torch.tensor([5]), scales.key, scales.value)
    assert torch.equal(layer.keys[1, 1].view(torch.uint8), layer.values[1, 1].view(torch.uint8))
    return layer.keys[1, 1].float() * scales.key


@given(
    numbers=st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16),
    power=st.integers(-10, 10),
)
def test_a_stored_number_is_off_by_a_sixteenth_at_most(numbers: list[float], power: int) -> None:
    """Half a unit of 3 bits of mantissa, or half the smallest step next to 0; beyond ±448 scales it is cut off."""
    scale = 2.0**power
    key = torch.tensor(numbers).view(1, 2, 8)
    inside = key.clamp(-448 * scale, 448 * scale)

    off = (_stored(key, KvScales(scale, scale)) - inside[0]).abs()

    assert (off <= (inside[0].abs() / 16).clamp(min=scale * 2.0**-10)).all()


@pytest.mark.parametrize("largest", [1e-3, 0.7, 56.0, 57.0, 5000.0])
def test_scales_leave_headroom_above_what_was_seen(largest: float) -> None:
    """Keys larger than any at start are still stored as they are, whatever a model's own scale."""
    data = torch.zeros(SHAPE)
    data[0, 0, 2, 1, 0, 3] = -largest
    data[0, 1] = 1.0
    ((scales),) = KvCache(data, ONES).scales_for_fp8()

    assert 448 * scales.key / 2 < largest * FP8_HEADROOM <= 448 * scales.key
    assert scales.value == 2.0**-5


def test_a_cache_of_nothing_gets_a_scale_of_one() -> None:
    """A model whose keys are 0, or have overflowed, still starts."""
    data = torch.zeros(SHAPE)
    data[0, 1, 0, 0, 0, 0] = torch.inf

    assert KvCache(data, ONES).scales_for_fp8() == ONES


def _executor(**changes: object) -> TorchExecutor:
    asked: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
    sizes = {"device_memory_bytes": 96 * MIB, "gpu_memory_utilization": 0.5}
    return TorchExecutor(EngineConfig(model="embedded", device="cpu", **{**asked, **sizes, **changes}))


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 4), ("bfloat16", 2)])
def test_fp8_holds_more_blocks_in_the_same_share(dtype: str, factor: int) -> None:
    """What fp8 is for: half the bytes a block of bfloat16, a quarter of float32, and so many more blocks."""
    own, fp8 = (_executor(dtype=dtype, kv_cache_dtype=kind) for kind in ("auto", "fp8"))

    assert own.resolved.kv_block_bytes == factor * fp8.resolved.kv_block_bytes
    assert fp8._kv_cache.data.nbytes == fp8.resolved.num_gpu_blocks * fp8.resolved.kv_block_bytes
    assert fp8.resolved.num_gpu_blocks > 0.9 * factor * own.resolved.num_gpu_blocks


def test_fp8_answers_do_not_depend_on_how_prompts_are_cut() -> None:
    """A token sees what is stored of the others, its own step's too, so that chunks change nothing."""
    executor = _executor(kv_cache_dtype="fp8")
    prompt = tuple(range(40, 73))

    def item(tokens: tuple[int, ...], start: int) -> StepPlan:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=0)
        return StepPlan(
            scheduled=(
                ScheduledRequest(
                    request_id="a",
                    token_ids=tokens,
                    start=start,
                    block_ids=(3, 0, 5),
                    samples=True,
                    output_index=0,
                    sampling=sampling,
                ),
            )
        )

    whole = executor.execute(item(prompt, 0))
    executor.execute(item(prompt[:20], 0))
    cut = executor.execute(item(prompt[20:], 20))

    assert whole.sampled_token_ids == cut.sampled_token_ids
    assert whole.logprobs["a"].logprob == pytest.approx(cut.logprobs["a"].logprob, abs=1e-3)
