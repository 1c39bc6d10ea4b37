"""The real executor: weights, KV cache and forward pass in torch, on a CPU or a GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, BatchBuffers
from engine.config import (
    EngineConfig,
    ResolvedConfig,
)
from engine.device_memory import activation_peak_bytes, device_label, non_torch_bytes, take_share
from engine.executor.blueprint import DTYPES, Blueprint, blueprint
from engine.executor.graph_sizes import graph_sizes
from engine.executor.graphs import Capture, CudaCapture, DecodeGraphs
from engine.executor.least import kv_layout
from engine.executor.start_steps import first_token, largest_steps, small_steps, words
from engine.kv_cache import KvCache, KvScales, new_kv_cache
from engine.limits import read_limits
from engine.memory import (
    DeviceShare,
    KvLayout,
    MemoryReport,
    hopeless_report,
    human,
    kv_blocks_in_force,
    memory_budget,
    num_kv_blocks,
)
from engine.models.folder import EMBEDDED
from engine.models.llama import Decoder
from engine.models.weights import Checkpoint, Dummy, load_weights
from engine.request import SamplingParams
from engine.sampler import Sampler
from engine.step import ScheduledRequest, StepPlan, StepResult
from kernels.reference import FP8

logger = logging.getLogger(__name__)

_CALIBRATION_TOKENS = 256


class TorchExecutor:
    """Computes steps. Construction claims the share, loads the model, measures the largest step, allocates KV blocks.

    Between steps it keeps only the KV cache: a request is nothing but its tokens and block table in the plan.

    Raises:
        ConfigError: as `blueprint`; `NotEnoughMemoryError` and `NoKvMemoryError` for a memory share that cannot work.
    """

    resolved: ResolvedConfig

    def __init__(self, config: EngineConfig) -> None:
        plan = blueprint(config)
        limit_bytes = read_limits().memory_bytes
        share = take_share(config, plan.device, limit_bytes=limit_bytes, least_bytes=plan.least.total_bytes)
        hopeless = hopeless_report(plan.least, share, device=device_label(config, plan.device))
        if hopeless is not None:
            num_kv_blocks(hopeless.budget, hopeless.layout, max_model_len=plan.max_model_len)
        self._runner = ModelRunner(plan)
        report = self._runner.measure(share)
        num_blocks, overridden = kv_blocks_in_force(
            config, report.budget, report.layout, max_model_len=plan.max_model_len
        )
        size = human(num_blocks * report.layout.block_bytes)
        logger.info("taking %s for %d KV blocks; many gigabytes of RAM take a while", size, num_blocks)
        self._kv_cache = self._runner.allocate_kv(num_blocks)
        if plan.device.type == "cuda":
            self._runner.warm_up(self._kv_cache)
        if self._runner.graph_sizes:
            logger.info("capturing %d graphs for decode steps", len(self._runner.graph_sizes))
            self._runner.capture(self._kv_cache, self._runner.graph_sizes, CudaCapture(plan.device))
        self.resolved = ResolvedConfig(
            asked=config,
            served_model_name=config.served_model_name or config.model,
            max_model_len=plan.max_model_len,
            dtype=plan.dtype,
            device=report.device,
            num_gpu_blocks=num_blocks,
            kv_block_bytes=report.layout.block_bytes,
            memory=report.budget,
            eos_token_ids=plan.model.eos_token_ids,
            vocab_size=plan.model.vocab_size,
            captures_graphs=bool(self._runner.graph_sizes),
            warnings=(*plan.warnings, *overridden),
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, write their KV, and draw a token for each request that samples."""
        if not plan.scheduled:
            return StepResult(sampled_token_ids={})
        return self._runner.step(plan, self._kv_cache)


class ModelRunner:
    """A loaded model and the buffers of its steps: all that is measured, and no KV blocks."""

    def __init__(self, plan: Blueprint) -> None:
        config, model, dtype = plan.config, plan.model, DTYPES[plan.dtype]
        if plan.device.type == "cuda":
            torch.cuda.set_device(plan.device)  # kernels are launched and graphs captured on the current one
        made_up = config.load_format == "dummy" or (config.load_format == "auto" and config.model == EMBEDDED)
        source = Dummy(config.seed, plan.model) if made_up else Checkpoint(plan.folder)
        self._plan = plan
        self._decoder = Decoder(model, load_weights(source, model, dtype=dtype, device=plan.device))
        self._sampler = Sampler(
            seed=config.seed,
            max_num_seqs=config.max_num_seqs,
            eos_token_ids=plan.model.eos_token_ids,
            device=plan.device,
        )
        self._buffers = BatchBuffers(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            block_size=config.block_size,
            device=plan.device,
        )
        self._graphs = DecodeGraphs({})
        self.graph_sizes = _graph_sizes(config, plan.device)
        """Batch sizes that graphs are captured for."""

        self._kv_dtype, self._kv_scales = dtype, (KvScales(),) * model.num_layers
        if config.kv_cache_dtype == "fp8":
            self._kv_scales = self._calibrated_scales()
            self._kv_dtype = FP8

    def step(self, plan: StepPlan, kv_cache: KvCache) -> StepResult:
        """Compute one step on the whole model, with the KV blocks of `allocate_kv`; graphs have captured theirs."""
        size = self._graphs.size_for(plan)
        return self._step(plan, self._decoder, kv_cache) if size is None else self._replay(plan, size)

    @torch.inference_mode()
    def _step(self, plan: StepPlan, decoder: Decoder, kv_cache: KvCache) -> StepResult:
        batch = self._buffers.fill(plan)
        hidden = decoder.forward(batch.token_ids, batch.positions, batch.attention, kv_cache)
        return self._draw(decoder, batch, hidden)

    @torch.inference_mode()
    def _replay(self, plan: StepPlan, size: int) -> StepResult:
        batch = self._buffers.fill(plan, num_rows=size)
        return self._draw(self._decoder, batch, self._graphs.replay(size))

    def _draw(self, decoder: Decoder, batch: Batch, hidden: Tensor) -> StepResult:
        if not batch.sampled:
            return StepResult(sampled_token_ids={})
        return self._sampler.draw(decoder.logits(hidden.index_select(0, batch.sampled_rows)), batch.sampled)

    @torch.inference_mode()
    def logits(self, plan: StepPlan, kv_cache: KvCache) -> Tensor:
        """Scores of the vocabulary after every token of a step: (tokens, vocabulary) float32."""
        batch = self._buffers.fill(plan)
        return self._decoder.logits(self._decoder.forward(batch.token_ids, batch.positions, batch.attention, kv_cache))

    def allocate_kv(self, num_blocks: int, *, num_layers: int | None = None) -> KvCache:
        """A cache of so many blocks; all layers unless told."""
        model, like = self._decoder.config, self._decoder.weights.embedding
        layers = model.num_layers if num_layers is None else num_layers
        block_size = self._plan.config.block_size
        shape = (layers, 2, num_blocks, block_size, model.num_kv_heads, model.head_dim)
        return new_kv_cache(shape, self._kv_scales[:layers], self._kv_dtype, like)

    def warm_up(self, kv_cache: KvCache) -> None:
        """Take the steps whose kernels neither the largest ones nor graphs launch.

        A kernel is compiled by its first launch, for a second or more, and requests would wait for it.
        """
        for step in small_steps(self._plan.config, self._plan.max_model_len, with_decodes=not self.graph_sizes):
            self.step(step, kv_cache)

    def capture(self, kv_cache: KvCache, sizes: Sequence[int], capture: Capture) -> None:
        """From now on take decode steps up to the largest of these sizes from graphs, which compute on this cache."""
        replays = {}
        for size in sorted(sizes, reverse=True):
            self._buffers.fill(StepPlan(scheduled=(first_token(),)), num_rows=size)
            replays[size] = capture(partial(self._decode, kv_cache, size))
        self._graphs = DecodeGraphs(replays)

    @torch.inference_mode()
    def _decode(self, kv_cache: KvCache, num_rows: int) -> Tensor:
        inputs = self._buffers.decodes(num_rows)
        return self._decoder.forward(inputs.token_ids, inputs.positions, inputs.attention, kv_cache)

    def _graph_bytes(self) -> int:
        """What capturing takes: found out with the two largest graphs, on a block of KV, and given back."""
        capture = CudaCapture(self._plan.device)
        self.capture(self.allocate_kv(1), sorted(self.graph_sizes)[-2:], capture)
        self._graphs = DecodeGraphs({})
        first, further = capture.taken_bytes[0], capture.taken_bytes[-1]
        return first + (len(self.graph_sizes) - 1) * further

    def _calibrated_scales(self) -> tuple[KvScales, ...]:
        """Scales for float8 by the keys and values of random tokens."""
        config = self._plan.config
        num_tokens = min(_CALIBRATION_TOKENS, config.max_num_batched_tokens, self._plan.max_model_len)
        drawn = np.random.Generator(np.random.PCG64(config.seed)).integers(self._plan.model.vocab_size, size=num_tokens)
        num_blocks = -(-num_tokens // config.block_size)
        tokens = ScheduledRequest(
            request_id="calibration",
            token_ids=tuple(drawn.tolist()),
            start=0,
            block_ids=tuple(range(num_blocks)),
            samples=False,
            output_index=0,
            sampling=SamplingParams(max_tokens=1),
        )
        cache = self.allocate_kv(num_blocks)
        self.step(StepPlan(scheduled=(tokens,)), cache)
        return cache.scales_for_fp8()

    def measure(self, share: DeviceShare) -> MemoryReport:
        """Run the largest steps and account for every byte of the share."""
        plan, config = self._plan, self._plan.config
        peak_bytes, peak_step = self._activation_peak()
        graph_bytes = self._graph_bytes() if self.graph_sizes else 0
        # Last: what was run before has loaded kernels, which stay.
        other_bytes = non_torch_bytes(share.memory, plan.device)
        budget = memory_budget(
            total_bytes=share.memory.total_bytes,
            free_bytes=share.memory.free_bytes,
            requested_bytes=share.requested_bytes,
            weights_bytes=self._decoder.weights.num_bytes(),
            activation_peak_bytes=peak_bytes,
            request_buffers_bytes=self._buffers.nbytes + self._sampler.nbytes,
            non_torch_bytes=other_bytes,
            graph_bytes=graph_bytes,
        )
        return MemoryReport(
            device=device_label(config, plan.device),
            budget=budget,
            layout=self._kv_layout(),
            max_model_len=plan.max_model_len,
            peak_step=peak_step,
        )

    def _activation_peak(self) -> tuple[int, str]:
        """The most a step holds beyond weights, buffers and KV, and which step that is.

        One layer of a kind is enough: layers of a kind have equal shapes, and what one computes is released before the
        next.
        """
        few_layers = self._decoder.one_layer_of_each_kind()
        one_request = self._kv_layout().blocks_for(self._plan.max_model_len)
        kv_cache = self.allocate_kv(one_request, num_layers=few_layers.config.num_layers)
        steps = largest_steps(self._plan.config, self._plan.max_model_len, vocab_size=few_layers.config.vocab_size)
        peaks = [
            (activation_peak_bytes(partial(self._step, step, few_layers, kv_cache), self._plan.device), words(step))
            for step in steps
        ]
        return max(peaks)

    def _kv_layout(self) -> KvLayout:
        return kv_layout(self._plan.config, self._decoder.config, itemsize=self._kv_dtype.itemsize)


def _graph_sizes(config: EngineConfig, device: torch.device) -> tuple[int, ...]:
    if device.type != "cuda" or config.enforce_eager:
        return ()
    return graph_sizes(min(config.max_num_seqs, config.max_num_batched_tokens))
