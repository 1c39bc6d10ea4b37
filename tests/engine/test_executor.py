"""The torch executor: what it decides at start, and steps that are built by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ConfigError, EngineConfig
from engine.device_memory import activation_peak_bytes
from engine.executor.blueprint import blueprint
from engine.executor.start_steps import largest_steps
from engine.executor.torch import ModelRunner, TorchExecutor
from engine.kv_cache import KvCache
from engine.limits import Limits
from engine.memory import NoKvMemoryError
from engine.models.config import read_model_config
from engine.models.folder import model_folder
from engine.models.llama import Decoder
from engine.models.weights import Dummy, load_weights
from engine.request import SamplingParams
from engine.sampler import Sampler
from engine.step import ScheduledRequest, StepPlan, StepResult
from kernels.linear import has_packed_product

MIB = 2**20
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def _config(**changes: Any) -> EngineConfig:
    asked: dict[str, Any] = {
        "model": "embedded",
        "device": "cpu",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "device_memory_bytes": 96 * MIB,
        "gpu_memory_utilization": 0.5,
    }
    return EngineConfig(**{**asked, **changes})


def _item(
    tokens: tuple[int, ...], *, start: int = 0, index: int = 0, name: str = "a", sampling: SamplingParams = GREEDY
) -> ScheduledRequest:
    blocks = {"a": (3, 0, 5, 7, 9, 11, 13, 15), "b": (1, 2, 4, 6, 8, 10, 12, 14)}
    return ScheduledRequest(
        request_id=name,
        token_ids=tokens,
        start=start,
        block_ids=blocks[name],
        samples=True,
        output_index=index,
        sampling=sampling,
    )


def _generate(executor: TorchExecutor, prompt: tuple[int, ...], count: int, sampling: SamplingParams) -> list[int]:
    tokens, start, outputs = prompt, 0, []
    for index in range(count):
        plan = StepPlan(scheduled=(_item(tokens, start=start, index=index, sampling=sampling),))
        drawn = executor.execute(plan).sampled_token_ids["a"]
        start += len(tokens)
        tokens = (drawn,)
        outputs.append(drawn)
    return outputs


@pytest.fixture(scope="module")
def executor() -> TorchExecutor:
    """The embedded model on a budget of 48 MiB."""
    return TorchExecutor(_config())


def test_every_byte_of_the_budget_is_accounted_for(executor: TorchExecutor) -> None:
    """The KV blocks that are reported are allocated, and with all else they stay inside the share."""
    resolved, memory = executor.resolved, executor.resolved.memory
    kv_bytes = resolved.num_gpu_blocks * resolved.kv_block_bytes

    assert memory.total_bytes == 96 * MIB
    assert memory.requested_bytes == 48 * MIB
    assert executor._kv_cache.data.nbytes == kv_bytes
    assert executor._kv_cache.data.shape[2] == resolved.num_gpu_blocks
    assert memory.kv_cache_bytes - resolved.kv_block_bytes < kv_bytes <= memory.kv_cache_bytes
    assert resolved.kv_block_bytes == 16 * 4 * 2 * 2 * 64 * 4
    assert memory.weights_bytes == 4 * (5_313_920 + has_packed_product() * 512 * 384)
    assert 0 < memory.activation_peak_bytes < 8 * MIB


def test_a_start_says_what_it_takes_before_it_takes_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many gigabytes take long on a busy machine: a silent start looks like one that hangs."""
    caplog.set_level("INFO", logger="engine")
    told: list[tuple[int, str]] = []
    allocate_kv = ModelRunner.allocate_kv

    def noted(runner: ModelRunner, num_blocks: int, **layers: int) -> KvCache:
        told.append((num_blocks, caplog.text))
        return allocate_kv(runner, num_blocks, **layers)

    monkeypatch.setattr(ModelRunner, "allocate_kv", noted)
    executor = TorchExecutor(_config())
    num_blocks, said = told[-1]
    assert num_blocks == executor.resolved.num_gpu_blocks
    assert f"MiB for {num_blocks} KV blocks" in said


def test_the_measured_peak_repeats(executor: TorchExecutor) -> None:
    """The same settings give the same number of blocks at every start."""
    again = TorchExecutor(_config())

    first, second = executor.resolved.memory, again.resolved.memory
    assert abs(first.activation_peak_bytes - second.activation_peak_bytes) <= 4096
    assert dataclasses.replace(first, activation_peak_bytes=0, kv_cache_bytes=0) == dataclasses.replace(
        second, activation_peak_bytes=0, kv_cache_bytes=0
    )


def test_larger_limits_take_memory_from_kv(executor: TorchExecutor) -> None:
    """A tuner sees what the token budget and the sequences really cost."""
    wider = TorchExecutor(_config(max_num_batched_tokens=512)).resolved.memory
    more = TorchExecutor(_config(max_num_seqs=64)).resolved.memory
    base = executor.resolved.memory

    assert wider.activation_peak_bytes > base.activation_peak_bytes + 448 * 2 * 768 * 4
    assert more.request_buffers_bytes > base.request_buffers_bytes
    assert wider.kv_cache_bytes < base.kv_cache_bytes


def test_no_step_takes_more_than_the_measured_peak(executor: TorchExecutor) -> None:
    """The budget holds under load: a step of any mix stays below what the start measured."""
    mixed = StepPlan(scheduled=(_item(tuple(range(63)), start=65), _item((1,), start=127, name="b")))
    whole = StepPlan(scheduled=(_item(tuple(range(32))), _item(tuple(range(32)), name="b")))
    for plan in (mixed, whole):
        peak = activation_peak_bytes(lambda plan=plan: executor.execute(plan), torch.device("cpu"))

        assert 0 < peak <= executor.resolved.memory.activation_peak_bytes


def test_the_largest_steps_spend_the_whole_budget() -> None:
    """What is measured is the worst case: all tokens, all seats sampling, contexts at their longest."""
    for config, tokens in ((_config(), [64, 64, 64]), (_config(max_num_batched_tokens=4096), [1024, 7 + 128, 7 + 128])):
        steps = largest_steps(config, 128, vocab_size=259)

        assert [step.num_scheduled_tokens for step in steps] == tokens
        assert len(steps[-1].scheduled) == 8
        for step in steps:
            assert all(item.start + len(item.token_ids) == 128 for item in step.scheduled)


def test_no_sampling_takes_more_than_the_largest_steps() -> None:
    """Sorting, penalties and log-probabilities of all seats fit the memory set aside at the start (no late OOM)."""
    from engine.device_memory import activation_peak_bytes

    vocab_size, config = 3000, _config(max_num_seqs=4, max_num_batched_tokens=4)
    sampler = Sampler(seed=0, max_num_seqs=4, eos_token_ids=(0,), device=torch.device("cpu"))

    def peak(requests: Sequence[ScheduledRequest]) -> int:
        logits = torch.randn((len(requests), vocab_size), generator=torch.Generator().manual_seed(0))
        return activation_peak_bytes(lambda: sampler.draw(logits, requests), torch.device("cpu"))

    steps = largest_steps(config, 128, vocab_size=vocab_size)
    measured = max(peak(step.scheduled) for step in steps)
    asked = [
        SamplingParams(max_tokens=9, top_p=0.99, min_p=0.001, num_logprobs=20),
        SamplingParams(max_tokens=9, top_k=50, repetition_penalty=1.1, frequency_penalty=1.0, min_tokens=5),
        SamplingParams(max_tokens=9, presence_penalty=1.0, num_logprobs=1),
        GREEDY,
    ]
    history = tuple(range(vocab_size))
    for batch in itertools.combinations_with_replacement(asked, 4):
        items = [
            dataclasses.replace(_item((0,)), request_id=str(index), sampling=sampling, prompt_token_ids=history)
            for index, sampling in enumerate(batch)
        ]
        assert peak(items) <= measured


def test_an_empty_plan_computes_nothing(executor: TorchExecutor) -> None:
    """An idle engine does not fail."""
    assert executor.execute(StepPlan(scheduled=())) == StepResult(sampled_token_ids={})


def test_a_chunk_that_does_not_catch_up_draws_nothing(executor: TorchExecutor) -> None:
    """No token is made up in the middle of a prompt."""
    item = dataclasses.replace(_item((1, 2, 3)), samples=False)

    assert executor.execute(StepPlan(scheduled=(item,))).sampled_token_ids == {}


@pytest.mark.parametrize("seed", [0, 1234])
def test_a_seeded_request_repeats_beside_another_and_in_chunks(executor: TorchExecutor, seed: int) -> None:
    """A seed gives the same text in a batch, with its prompt cut, and recomputed with its outputs known."""
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=seed)
    prompt = tuple(range(40, 73))
    alone = _generate(executor, prompt, 8, sampling)
    cut = dataclasses.replace(_item(prompt[:20]), samples=False)
    executor.execute(StepPlan(scheduled=(cut, _item((9, 8), name="b"))))
    plan = StepPlan(scheduled=(_item((9,), start=2, name="b"), _item(prompt[20:], start=20, sampling=sampling)))
    resumed = _item((*prompt, *alone[:5]), index=5, sampling=sampling)

    assert executor.execute(plan).sampled_token_ids["a"] == alone[0]
    assert executor.execute(StepPlan(scheduled=(resumed,))).sampled_token_ids["a"] == alone[5]
    assert len(set(alone)) > 2


def test_greedy_output_of_made_up_weights_is_varied(executor: TorchExecutor) -> None:
    """Load on the embedded model looks like text, not one token for ever."""
    outputs = _generate(executor, (5, 6, 7), 60, GREEDY)

    assert len(set(outputs[20:])) > 15


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")])
def test_the_dtype_asked_for_is_the_dtype_in_force(dtype: str, expected: str) -> None:
    """Weights and KV take the memory their dtype says."""
    executor = TorchExecutor(_config(dtype=dtype))
    size = 4 if expected == "float32" else 2

    assert executor.resolved.dtype == expected
    assert executor.resolved.kv_block_bytes == 16 * 4 * 2 * 2 * 64 * size
    packed_head = 512 * 384 if expected == "float32" and has_packed_product() else 0
    assert executor.resolved.memory.weights_bytes == size * (5_313_920 + packed_head)
    assert 0 <= _generate(executor, (1, 2, 3), 2, GREEDY)[1] < 512


def test_a_length_beyond_the_models_is_refused() -> None:
    """Positions that the model has never seen are not served."""
    with pytest.raises(ConfigError, match=r"max_model_len=4096 is above the 2048 positions"):
        TorchExecutor(_config(max_model_len=4096))


def test_without_a_length_the_models_own_is_in_force() -> None:
    """A user who asks for nothing gets all the model can do, and its end tokens."""
    resolved = TorchExecutor(_config(max_model_len=None)).resolved

    assert (resolved.max_model_len, resolved.vocab_size, resolved.eos_token_ids) == (2048, 512, (258, 256))
    assert (resolved.device, resolved.served_model_name) == ("cpu", "embedded")


def test_a_share_without_room_for_one_request_is_refused() -> None:
    """The engine does not start only to refuse every request."""
    with pytest.raises(NoKvMemoryError, match=r"max_model_len=2048 .* smallest gpu_memory_utilization"):
        TorchExecutor(_config(max_model_len=None, gpu_memory_utilization=0.3))


def test_overridden_blocks_are_used_and_warned_of() -> None:
    """Tests and rehearsals get the cache they ask for, and hear what it cannot hold."""
    few = TorchExecutor(_config(num_gpu_blocks_override=5))
    many = TorchExecutor(_config(num_gpu_blocks_override=800))

    assert few._kv_cache.data.shape[2] == few.resolved.num_gpu_blocks == 5
    assert "num_gpu_blocks_override=5 is below the 8 blocks" in few.resolved.warnings[0]
    assert "num_gpu_blocks_override=800 is above the" in many.resolved.warnings[0]


def test_a_budget_no_step_can_reach_is_warned_of() -> None:
    """A token budget above all sequences at full length works, and is said to be too much."""
    (warning,) = TorchExecutor(_config(max_num_seqs=1, max_num_batched_tokens=256)).resolved.warnings

    assert "256 is above max_num_seqs x max_model_len = 128" in warning


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_gpu_is_not_replaced_by_the_cpu() -> None:
    """Nobody measures the wrong device."""
    with pytest.raises(ConfigError, match="no CUDA device"):
        TorchExecutor(_config(device="cuda"))


def test_a_containers_memory_limit_reaches_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine never plans with the host's memory where it may not use it."""
    limits = Limits(memory_bytes=2**30, cpus=None)
    monkeypatch.setattr("engine.executor.torch.read_limits", lambda: limits)
    executor = TorchExecutor(_config(device_memory_bytes=None, num_gpu_blocks_override=8))
    assert executor.resolved.memory.total_bytes == 2**29


@pytest.mark.parametrize(("size", "named"), [(4, "6 attention heads"), (2, "this engine computes on one device")])
def test_more_than_one_device_is_refused(size: int, named: str) -> None:
    """Nobody believes to measure two devices where one computes."""
    with pytest.raises(ConfigError, match=rf"{named}.*") as refused:
        TorchExecutor(_config(tensor_parallel_size=size))
    assert f"tensor_parallel_size={size}" in str(refused.value)


def test_a_size_of_the_device_means_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that is asked for and not kept would misstate every share of it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="device_memory_bytes=1024 is the size of a device on a CPU"):
        TorchExecutor(_config(device="cuda", device_memory_bytes=1024))
    assert blueprint(_config(device="auto")).device.type == "cpu"
    assert blueprint(_config(device="auto", device_memory_bytes=None)).device.type == "cuda"


def test_a_model_that_overflows_float16_is_not_served_in_it(tmp_path: Path) -> None:
    """A trained Gemma 3 in float16 answers nothing at all; nobody tunes that."""
    said = {"architectures": ["Gemma3ForCausalLM"], "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**said, "head_dim": 2, "intermediate_size": 8}))
    config = _config(model=str(tmp_path), load_format="dummy", max_num_seqs=2)

    with pytest.raises(ConfigError, match=r"float16.*overflows.*bfloat16 or float32"):
        TorchExecutor(dataclasses.replace(config, dtype="float16"))
    assert TorchExecutor(dataclasses.replace(config, dtype="bfloat16")).resolved.dtype == "bfloat16"


def test_a_layer_of_each_kind_is_measured() -> None:
    """A model that begins with windows is charged for its layers without."""
    windows = (4, 4, None, 4)
    config = dataclasses.replace(read_model_config(model_folder("embedded")), layer_windows=windows, vocab_size=8)
    cpu = torch.device("cpu")
    decoder = Decoder(config, load_weights(Dummy(0, config), config, dtype=torch.float32, device=cpu))

    few = decoder.one_layer_of_each_kind()

    assert (few.config.layer_windows, few.config.num_layers) == ((4, None), 2)
    assert few.weights.layers == (decoder.weights.layers[0], decoder.weights.layers[2])
