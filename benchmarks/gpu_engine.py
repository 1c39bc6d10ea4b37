"""The engine on made-up weights: step times, tokens/s and whether its kernels choose the reference's tokens."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from checkpoints import save_tokenizer
from gpu_kernels import Rows, wall_s
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from engine.config import EngineConfig
from engine.executor.blueprint import blueprint
from engine.executor.torch import ModelRunner, TorchExecutor
from engine.llm import LLM
from engine.request import SamplingParams
from engine.step import ScheduledRequest, StepPlan
from kernels import reference

VOCAB_OF_TOKENIZER = 4096
"""Of the tokenizer beside the weights; ids beyond it are words without letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A published model's shape, or one that a CPU computes in no time."""

    name: str
    config: PreTrainedConfig
    max_model_len: int
    loads: tuple[int, ...]
    output_tokens: int
    prompt_tokens: int = 128
    given: dict[str, Any] = field(default_factory=dict)


def shape_of(name: str, *, smoke: bool) -> Shape:
    """`small` is Qwen3-0.6B's shape, `large` Llama-3-8B's."""
    common = {"dtype": "float32" if smoke else "bfloat16", "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if smoke:
        tiny = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB_OF_TOKENIZER}
        tiny |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
        kind = Qwen3Config if name == "small" else LlamaConfig
        given = {"device": "cpu", "device_memory_bytes": 2**28, "max_num_batched_tokens": 512}
        shape = {"max_model_len": 512, "loads": (1, 4), "output_tokens": 4, "prompt_tokens": 16}
        return Shape(name=f"{name}, tiny", config=kind(**common, **tiny), **shape, given=given)
    heads = {"num_key_value_heads": 8, "head_dim": 128}
    given = {"device": "cuda", "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.9}
    if name == "small":
        config: PreTrainedConfig = Qwen3Config(
            **common,
            **heads,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            vocab_size=151936,
            num_attention_heads=16,
            max_position_embeddings=40960,
            tie_word_embeddings=True,
        )
        return Shape(
            name="Qwen3-0.6B", config=config, max_model_len=4096, loads=(1, 8, 64, 256), output_tokens=128, given=given
        )
    config = LlamaConfig(
        **common,
        **heads,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        vocab_size=128256,
        num_attention_heads=32,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
    )
    return Shape(
        name="Llama-3-8B", config=config, max_model_len=4096, loads=(1, 8, 64, 256), output_tokens=128, given=given
    )


@contextmanager
def saved(shape: Shape) -> Iterator[str]:
    """A folder with the shape's config and a tokenizer, and no weights: those are made up."""
    with tempfile.TemporaryDirectory() as folder:
        shape.config.architectures = [
            "Qwen3ForCausalLM" if isinstance(shape.config, Qwen3Config) else "LlamaForCausalLM"
        ]
        shape.config.save_pretrained(folder)
        save_tokenizer(Path(folder), vocab_size=VOCAB_OF_TOKENIZER)
        yield folder


def config_of(shape: Shape, folder: str, **changes: Any) -> EngineConfig:
    """How it is started."""
    seats = {"max_num_seqs": max(shape.loads), "max_model_len": shape.max_model_len}
    return EngineConfig(model=folder, load_format="dummy", **{**seats, **shape.given, **changes})


def small(*, smoke: bool) -> dict[str, Rows]:
    """Step times with and without graphs, and tokens/s, of Qwen3-0.6B's shape."""
    shape = shape_of("small", smoke=smoke)
    with saved(shape) as folder:
        steps = [
            {"decode steps": "with graphs" if graphs else "kernel by kernel", **row}
            for graphs in (True, False)
            for row in _step_times(shape, config_of(shape, folder, enforce_eager=not graphs))
        ]
        return {f"Step times, {shape.name}": steps, f"Tokens/s, {shape.name}": _tokens_per_s(shape, folder)}


def large(*, smoke: bool) -> dict[str, Rows]:
    """Tokens/s of Llama-3-8B's shape."""
    shape = shape_of("large", smoke=smoke)
    with saved(shape) as folder:
        return {f"Tokens/s, {shape.name}": _tokens_per_s(shape, folder)}


def _step_times(shape: Shape, config: EngineConfig) -> Iterator[dict[str, Any]]:
    _give_back()
    began_s = time.perf_counter()
    executor = TorchExecutor(config)
    start_s = time.perf_counter() - began_s
    context = shape.prompt_tokens
    for load in shape.loads:
        plan = _decodes(load, context, config.block_size)
        step_s = wall_s(partial(executor.execute, plan), repeats=20)
        yield {"requests": load, "context": context, "ms": step_s * 1e3, "start s": start_s}


def _decodes(load: int, context: int, block_size: int) -> StepPlan:
    blocks = -(-(context + 1) // block_size)
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    return StepPlan(
        scheduled=tuple(
            ScheduledRequest(
                request_id=str(index),
                token_ids=(index,),
                start=context,
                block_ids=tuple(range(index * blocks, (index + 1) * blocks)),
                samples=True,
                output_index=1,
                sampling=greedy,
            )
            for index in range(load)
        )
    )


def _tokens_per_s(shape: Shape, folder: str) -> Rows:
    config = config_of(shape, folder)
    asked = {"max_num_seqs": config.max_num_seqs, "max_model_len": config.max_model_len, "load_format": "dummy"}
    _give_back()
    llm = LLM(folder, **{**asked, **shape.given})
    sampling = SamplingParams(max_tokens=shape.output_tokens, temperature=0.0, ignore_eos=True)
    found = []
    for load in shape.loads:
        # Others first: kernels are compiled for such a batch then, and the prefix cache knows none of the prompts.
        others = _prompts(load, shape.prompt_tokens, seed=1000 + load)
        llm.generate(others, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        prompts = _prompts(load, shape.prompt_tokens, seed=load)
        began_s = time.perf_counter()
        outputs = llm.generate(prompts, sampling)
        wall_s = time.perf_counter() - began_s
        tokens = sum(len(output.token_ids) for output in outputs)
        found.append({"requests at once": load, "prompt": shape.prompt_tokens, "output": shape.output_tokens})
        found[-1] |= {"output tokens/s": tokens / wall_s, "of one": tokens / wall_s / load}
    return found


def _give_back() -> None:
    """Return what an engine of before has held to the device, where a share is taken of what is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _prompts(count: int, length: int, *, seed: int) -> list[list[int]]:
    drawn = np.random.default_rng(seed).integers(VOCAB_OF_TOKENIZER, size=(count, length))
    return [[int(token) for token in row] for row in drawn]


def agreement(*, smoke: bool) -> dict[str, Rows]:
    """Whether the likeliest token after each of a text's is the reference's, and how far apart the scores are."""
    shape = shape_of("small", smoke=smoke)
    length = 64 if smoke else 512
    with saved(shape) as folder:
        runner = ModelRunner(blueprint(config_of(shape, folder)))
        rows = []
        for seed in range(2 if smoke else 8):
            (prompt,) = _prompts(1, length, seed=seed)
            plan = _whole(prompt)
            ours = runner.logits(plan, runner.allocate_kv(-(-length // 16)))
            with patch("kernels.dispatch._ops", lambda _: reference):
                theirs = runner.logits(plan, runner.allocate_kv(-(-length // 16)))
            same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
            off = (ours - theirs).abs().mean().item() / theirs.std().item()
            rows.append({"text": seed, "tokens": length, "same likeliest token": same, "mean error, of a spread": off})
    return {f"Kernels beside the reference, {shape.name}": rows}


def _whole(prompt: list[int]) -> StepPlan:
    item = ScheduledRequest(
        request_id="text",
        token_ids=tuple(prompt),
        start=0,
        block_ids=tuple(range(-(-len(prompt) // 16))),
        samples=False,
        output_index=0,
        sampling=SamplingParams(max_tokens=1),
    )
    return StepPlan(scheduled=(item,))
