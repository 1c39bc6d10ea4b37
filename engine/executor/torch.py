"""The real executor: weights, KV cache and forward pass in torch, on a CPU or a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import BatchBuffers
from engine.config import ConfigError, EngineConfig, MemoryBudget, ResolvedConfig, check_against_model
from engine.limits import read_limits
from engine.memory import (
    DeviceMemory,
    KvLayout,
    activation_peak_bytes,
    device_memory,
    memory_budget,
    non_torch_bytes,
    num_kv_blocks,
    requested_bytes,
)
from engine.models.config import ModelConfig, read_model_config
from engine.models.folder import EMBEDDED, model_folder
from engine.models.llama import Decoder
from engine.models.weights import checkpoint, dummy, load_weights
from engine.request import SamplingParams
from engine.sampler import Sampler
from engine.step import ScheduledRequest, StepPlan, StepResult

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchExecutor:
    """Computes steps. Construction loads the model, measures the largest step and allocates all KV blocks.

    Between steps it keeps only the KV cache: a request is nothing but its tokens and block table in the plan.

    Raises:
        ConfigError: for a model that is not there or not supported, a length beyond the model's, a device that is
            missing; `NotEnoughMemoryError` and `NoKvMemoryError` for a memory share that cannot work.
    """

    resolved: ResolvedConfig

    def __init__(self, config: EngineConfig) -> None:
        self._device = _device(config)
        folder = model_folder(config.model)
        model = read_model_config(folder)
        max_model_len = _max_model_len(config, model)
        warnings = check_against_model(config, max_model_len=max_model_len)
        memory = device_memory(config, self._device, limit_bytes=read_limits().memory_bytes)
        requested = requested_bytes(memory, config.gpu_memory_utilization)
        dtype = _dtype(config, model, self._device)
        made_up = config.load_format == "dummy" or (config.load_format == "auto" and config.model == EMBEDDED)
        source = dummy(config.seed) if made_up else checkpoint(folder)
        weights = load_weights(source, model, dtype=_DTYPES[dtype], device=self._device)
        self._decoder = Decoder(model, weights)
        self._sampler = Sampler(seed=config.seed, max_num_seqs=config.max_num_seqs, device=self._device)
        self._buffers = BatchBuffers(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=config.block_size,
            windows=set(model.layer_windows),
            dtype=_DTYPES[dtype],
            device=self._device,
        )
        budget = self._measure(config, memory, requested, max_model_len)
        layout = self._kv_layout(config.block_size)
        num_blocks, overridden = _num_blocks(config, budget, layout, max_model_len)
        self._kv_cache = self._allocate_kv(num_blocks, config.block_size)
        self.resolved = ResolvedConfig(
            asked=config,
            served_model_name=config.served_model_name or config.model,
            max_model_len=max_model_len,
            dtype=dtype,
            device=self._device.type,
            num_gpu_blocks=num_blocks,
            kv_block_bytes=layout.block_bytes,
            memory=budget,
            eos_token_ids=model.eos_token_ids,
            vocab_size=model.vocab_size,
            warnings=(*warnings, *overridden),
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, write their KV, and draw a token for each request that samples."""
        if not plan.scheduled:
            return StepResult(sampled_token_ids={})
        return self._step(plan, self._decoder, self._kv_cache)

    @torch.inference_mode()
    def _step(self, plan: StepPlan, decoder: Decoder, kv_cache: Tensor) -> StepResult:
        batch = self._buffers.fill(plan)
        hidden = decoder.forward(batch.token_ids, batch.positions, batch.attention, kv_cache)
        if not batch.sampled:
            return StepResult(sampled_token_ids={})
        logits = decoder.logits(hidden.index_select(0, batch.sampled_rows))
        drawn = self._sampler.draw(logits, batch.sampled)
        ids = (item.request_id for item in batch.sampled)
        return StepResult(sampled_token_ids=dict(zip(ids, drawn, strict=True)))

    def _kv_layout(self, block_size: int) -> KvLayout:
        model, itemsize = self._decoder.config, self._decoder.weights.embedding.itemsize
        token_bytes = model.num_layers * 2 * model.num_kv_heads * model.head_dim * itemsize
        return KvLayout(block_size=block_size, block_bytes=block_size * token_bytes)

    def _allocate_kv(self, num_blocks: int, block_size: int, *, num_layers: int | None = None) -> Tensor:
        """(layers, 2, blocks, block size, key/value heads, head size), every page touched."""
        model, like = self._decoder.config, self._decoder.weights.embedding
        layers = model.num_layers if num_layers is None else num_layers
        cache = like.new_empty(layers, 2, num_blocks, block_size, model.num_kv_heads, model.head_dim)
        return cache.zero_()

    def _measure(self, config: EngineConfig, memory: DeviceMemory, requested: int, max_model_len: int) -> MemoryBudget:
        """Run the largest steps and account for every byte.

        One layer is enough: layers have equal shapes, and what one computes is released before the next.
        """
        weights = self._decoder.weights
        model = self._decoder.config
        one_layer = Decoder(
            replace(model, layer_windows=model.layer_windows[:1]), replace(weights, layers=weights.layers[:1])
        )
        kv_cache = self._allocate_kv(1, config.block_size, num_layers=1)
        plans = largest_steps(config, max_model_len)
        peak = activation_peak_bytes(lambda: [self._step(plan, one_layer, kv_cache) for plan in plans], self._device)
        return memory_budget(
            total_bytes=memory.total_bytes,
            requested_bytes=requested,
            weights_bytes=weights.num_bytes(),
            activation_peak_bytes=peak,
            request_buffers_bytes=self._buffers.nbytes + self._sampler.nbytes,
            non_torch_bytes=non_torch_bytes(memory, self._device),
        )


def largest_steps(config: EngineConfig, max_model_len: int) -> tuple[StepPlan, ...]:
    """The steps that take the most memory: the whole budget as long chunks, and with all other seats decoding.

    Every request stands at the end of a context of `max_model_len` tokens and samples with a temperature. All share
    one block, so that a KV cache of one block is enough.
    """
    budget, seats = config.max_num_batched_tokens, config.max_num_seqs
    steps = []
    for decodes in (0, seats - 1):
        lens = [1] * decodes
        while len(lens) < seats and sum(lens) < budget:
            # The last seats go to chunks as long as they come, so that the whole budget is spent where it can be.
            lens.append(min(max_model_len, budget - sum(lens)))
        table = (0,) * -(-max_model_len // config.block_size)
        sampling = SamplingParams(max_tokens=1, temperature=1.0, seed=0)
        scheduled = tuple(
            ScheduledRequest(
                request_id=str(index),
                token_ids=(0,) * length,
                start=max_model_len - length,
                block_ids=table,
                samples=True,
                output_index=0,
                sampling=sampling,
            )
            for index, length in enumerate(lens)
        )
        steps.append(StepPlan(scheduled=scheduled))
    return tuple(steps)


def _num_blocks(
    config: EngineConfig, budget: MemoryBudget, layout: KvLayout, max_model_len: int
) -> tuple[int, tuple[str, ...]]:
    """KV blocks in force, and warnings where an override breaks a rule that the budget would have kept."""
    asked = config.num_gpu_blocks_override
    if asked is None:
        return num_kv_blocks(budget, layout, max_model_len=max_model_len), ()
    warnings = []
    fitting = max(0, budget.kv_cache_bytes // layout.block_bytes)
    if asked > fitting:
        warnings.append(f"num_gpu_blocks_override={asked} is above the {fitting} blocks that the memory share leaves")
    needed = layout.blocks_for(max_model_len)
    if asked < needed:
        warnings.append(
            f"num_gpu_blocks_override={asked} is below the {needed} blocks that one request of "
            f"max_model_len={max_model_len} needs"
        )
    return asked, tuple(warnings)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    own = model.max_position_embeddings
    if config.max_model_len is None:
        return own
    if config.max_model_len > own:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is above the {own} positions of model {config.model!r}: "
            f"ask for at most {own}"
        )
    return config.max_model_len


def _device(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device='cuda', but torch finds no CUDA device: use device='cpu'")
    use_cuda = available and config.device in ("auto", "cuda")
    return torch.device("cuda" if use_cuda else "cpu")


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> str:
    """`auto` is float32 on a CPU, where the others are slower, and the checkpoint's own on a GPU."""
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cpu":
        return "float32"
    if model.checkpoint_dtype not in _DTYPES:
        raise ConfigError(
            f"dtype='auto' takes the checkpoint's own, {model.checkpoint_dtype}, which is not supported: "
            f"ask for one of {', '.join(_DTYPES)}"
        )
    return model.checkpoint_dtype
