"""Decode steps as a GPU takes them from captured graphs: padded, from fixed places. Here a replay just runs again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig, OutOfDeviceMemoryError
from engine.executor.blueprint import blueprint
from engine.executor.graphs import CudaCapture, DecodeGraphs, Run
from engine.executor.start_steps import small_steps
from engine.executor.torch import ModelRunner
from engine.kv_cache import KvCache
from engine.memory import DeviceMemory, DeviceShare
from engine.request import SamplingParams
from engine.step import ScheduledRequest, StepPlan
from kernels.tiles import num_splits

NUM_BLOCKS = 32
SIZES = (1, 2, 4, 8)
BEST = SamplingParams(max_tokens=8, temperature=0.0)
DRAWN = SamplingParams(max_tokens=8, temperature=1.0, seed=5, num_logprobs=2)


def _config(**changes: object) -> EngineConfig:
    asked: dict[str, object] = {"device": "cpu", "max_num_seqs": 9, "max_num_batched_tokens": 256, "max_model_len": 64}
    return EngineConfig(model="embedded", device_memory_bytes=64 * 2**20, **{**asked, **changes})  # type: ignore[arg-type]


class _Runs:
    """Counts the replays of each captured run."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, run: Run) -> Run:
        """As a capture: the run happens once, and again whenever it is replayed."""
        run()
        index = len(self.counts)
        self.counts.append(0)

        def replay() -> torch.Tensor:
            self.counts[index] += 1
            return run()

        return replay


def _request(index: int, tokens: Sequence[int], start: int, output_index: int) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=str(index),
        token_ids=tuple(tokens),
        start=start,
        block_ids=(2 * index + 1, 2 * index + 2),
        samples=True,
        output_index=output_index,
        sampling=DRAWN if index % 2 else BEST,
    )


def _answers(runner: ModelRunner, cache: KvCache, num_requests: int) -> list[object]:
    """Prompts of unequal lengths in one step, then three decodes of all."""
    starts = [3 + 5 * index % 17 for index in range(num_requests)]
    prompts = [_request(index, range(1, 1 + start), 0, 0) for index, start in enumerate(starts)]
    results = [runner.step(StepPlan(scheduled=tuple(prompts)), cache)]
    for step in range(3):
        drawn = results[-1].sampled_token_ids
        decodes = [
            _request(index, (drawn[str(index)],), start + step, step + 1)
            for index, start in reversed(list(enumerate(starts)))
        ]
        results.append(runner.step(StepPlan(scheduled=tuple(decodes)), cache))
    return [(sorted(result.sampled_token_ids.items()), sorted(result.logprobs)) for result in results]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_padded_batch_answers_as_one_of_its_own_size(kv_cache_dtype: str) -> None:
    """Padding that is read by others, or written where others' keys are, gives wrong answers under load alone."""
    runner = ModelRunner(blueprint(_config(kv_cache_dtype=kv_cache_dtype)))
    expected = []
    for num_requests in (1, 2, 3, 5, 8, 9):
        cache = runner.allocate_kv(NUM_BLOCKS)
        expected.append((_answers(runner, cache, num_requests), cache.data.clone()))

    for num_requests, (answers, data) in zip((1, 2, 3, 5, 8, 9), expected, strict=True):
        cache, runs = runner.allocate_kv(NUM_BLOCKS), _Runs()
        runner.capture(cache, SIZES, runs)
        assert _answers(runner, cache, num_requests) == answers
        seen, was = (each.to(torch.float32)[:, :, 1:] for each in (cache.data, data))
        torch.testing.assert_close(seen, was)  # what a capture has computed lies in the first block
        taken = dict(zip(sorted(SIZES, reverse=True), runs.counts, strict=True))
        fitting = next((size for size in SIZES if size >= num_requests), None)
        assert taken == {size: 3 if size == fitting else 0 for size in SIZES}


def _plan(*lens: int) -> StepPlan:
    return StepPlan(scheduled=tuple(_request(index, range(count), 4, 1) for index, count in enumerate(lens)))


def test_only_decodes_that_fit_have_a_graph() -> None:
    """A chunk of a prompt has another shape every time: a graph of it would compute another step's."""
    graphs = DecodeGraphs(dict.fromkeys((1, 2, 4), lambda: torch.zeros(1)))
    assert [graphs.size_for(_plan(*[1] * count)) for count in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    assert graphs.size_for(_plan(1, 2)) is None
    assert DecodeGraphs({}).size_for(_plan(1)) is None


def test_a_warm_up_writes_one_block_of_the_cache() -> None:
    """It runs on the cache that is served from, with any budget and any longest request."""
    for changes in ({}, {"max_num_seqs": 1, "max_num_batched_tokens": 1}, {"max_model_len": 1}):
        runner = ModelRunner(blueprint(_config(**changes)))
        cache = runner.allocate_kv(4)
        runner.warm_up(cache)
        assert cache.data[:, :, 0].abs().sum() > 0
        assert cache.data[:, :, 1:].abs().sum() == 0


def test_on_a_cpu_there_are_none() -> None:
    """Capturing there would be an error, and its memory a figure of nothing."""
    assert ModelRunner(blueprint(_config())).graph_sizes == ()


class _Device:
    """Stands for CUDA: what is free shrinks with every capture, until nothing is left."""

    def __init__(self, free: list[int]) -> None:
        self.free = free
        self.pools: list[object] = []

    def graph(self, graph: object, pool: object) -> _Device:
        """A capture's context."""
        assert isinstance(graph, _Graph)
        self.pools.append(pool)
        return self

    def __enter__(self) -> None:
        if len(self.free) > 1:
            self.free.pop(0)
            return
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    def __exit__(self, *_: object) -> None:
        pass


class _Graph:
    def pool(self) -> str:
        """Of memory."""
        return "pool"

    def replay(self) -> None:
        """Nothing."""


def test_what_a_capture_takes_is_seen_and_one_too_many_is_its_own_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made when the KV cache has the rest of the share: whoever lacks memory then must read what for."""
    device = _Device([100, 70, 65])
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (device.free[0], 1000))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_: None)
    monkeypatch.setattr("torch.cuda.CUDAGraph", _Graph)
    monkeypatch.setattr("torch.cuda.graph", device.graph)
    capture, out = CudaCapture(torch.device("cpu")), torch.ones(2)

    assert capture(lambda: out)() is out
    capture(lambda: out)
    assert capture.taken_bytes == [30, 5]
    assert device.pools == [None, "pool"]
    with pytest.raises(OutOfDeviceMemoryError, match="capturing a graph: CUDA out of memory") as raised:
        capture(lambda: out)
    assert raised.value.kind == "oom_graph_capture"


def test_the_run_before_a_capture_that_lacks_memory_is_a_capture_that_does() -> None:
    """Read as a crash it is launched again, at the same share, to the same end."""

    def run() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    with pytest.raises(OutOfDeviceMemoryError) as raised:
        CudaCapture(torch.device("cpu"))(run)
    assert raised.value.kind == "oom_graph_capture"


def test_what_capturing_loads_is_in_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that the run before a capture loads stay on the device: unseen they are taken from the KV cache's."""
    runner, loaded = ModelRunner(blueprint(_config())), [1000]
    runner.graph_sizes = (1, 2)

    def captured() -> int:
        loaded.append(5000)
        return 10

    monkeypatch.setattr(runner, "_graph_bytes", captured)
    monkeypatch.setattr("engine.executor.torch.non_torch_bytes", lambda *_: loaded[-1])
    device = DeviceMemory(total_bytes=2**30, free_bytes=2**30)
    budget = runner.measure(DeviceShare(memory=device, requested_bytes=2**29)).budget
    assert (budget.graph_bytes, budget.non_torch_bytes) == (10, 5000)


def test_another_gpu_than_the_first_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched on the current device: on the first one they would read addresses of the second."""
    chosen: list[torch.device] = []

    class _ChosenError(Exception):
        pass

    def choose(device: torch.device) -> None:
        chosen.append(device)
        raise _ChosenError

    monkeypatch.setattr("torch.cuda.set_device", choose)
    with pytest.raises(_ChosenError):
        ModelRunner(replace(blueprint(_config()), device=torch.device("cuda", 1)))
    assert chosen == [torch.device("cuda", 1)]


@pytest.mark.parametrize("with_decodes", [True, False])
def test_a_warm_up_takes_attention_in_one_part_and_in_splits(with_decodes: bool) -> None:  # noqa: FBT001 - a case
    """A kernel that only a request launches is compiled while it waits, and those beside it."""
    config = _config(max_model_len=4096, max_num_batched_tokens=512)
    seen = set()
    for step in small_steps(config, 4096, with_decodes=with_decodes):
        (request,) = step.scheduled
        keys = len(request.block_ids) * config.block_size
        assert request.start + len(request.token_ids) <= keys < request.start + len(request.token_ids) + 16
        splits = num_splits(num_tiles=1, num_kv_heads=8, most_keys=keys, num_sms=132)
        seen.add((len(request.token_ids) == 1, splits > 1))
    chunks = {(False, False), (False, True)}
    assert seen == (chunks | {(True, False), (True, True)} if with_decodes else chunks)
