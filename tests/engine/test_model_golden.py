"""The engine's tokens and logits against transformers' own models, on tiny random checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
)

from engine.batch import BatchBuffers
from engine.config import EngineConfig
from engine.executor.torch import TorchExecutor
from engine.kv_cache import KvCache, KvScales
from engine.models.config import read_model_config
from engine.models.llama import Decoder
from engine.models.weights import Checkpoint, load_weights
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig
from engine.step import ScheduledRequest, StepPlan

VOCAB = 128
NUM_OUTPUTS = 16
PROMPT_LENS = (15, 16, 17, 32, 33, 1, 40)
LONG = PROMPT_LENS.index(33)
BLOCK = 16
LOGIT_TOLERANCE = 1e-5
"""How far float32 logits may be from transformers', as a share of the largest."""

HALF_PRECISION_TOLERANCE = 1.25
"""How many times transformers' own error in 16 bits ours may be, on average: it is rounding, of the same ops in other
places."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_TRAINED = {"rope_theta": 500.0, "original_max_position_embeddings": 32}
_GEMMA: dict[str, Any] = {**_SHAPE, "head_dim": 20, "query_pre_attn_scalar": 30, "sliding_window": 9}
_GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_VISION = SiglipVisionConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint to save."""

    architecture: type
    config: PreTrainedConfig
    shard_size: str = "5GB"


CASES = {
    "llama": Case(architecture=LlamaForCausalLM, config=LlamaConfig(**_SHAPE, tie_word_embeddings=True)),
    "llama, biased, linear rope": Case(
        architecture=LlamaForCausalLM,
        config=LlamaConfig(
            **{**_SHAPE, "num_key_value_heads": 4},
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        ),
    ),
    "llama, llama3 rope, sharded": Case(
        architecture=LlamaForCausalLM,
        config=LlamaConfig(**_SHAPE, rope_parameters={**_LLAMA3, **_TRAINED}),
        shard_size="40KB",
    ),
    "mistral": Case(architecture=MistralForCausalLM, config=MistralConfig(**_SHAPE, sliding_window=9, head_dim=20)),
    "qwen2": Case(architecture=Qwen2ForCausalLM, config=Qwen2Config(**_SHAPE)),
    "qwen2, window in later layers, yarn": Case(
        architecture=Qwen2ForCausalLM,
        config=Qwen2Config(
            **_SHAPE,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=BLOCK,
            max_window_layers=1,
            rope_parameters={"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, **_TRAINED},
        ),
    ),
    "qwen3": Case(architecture=Qwen3ForCausalLM, config=Qwen3Config(**_SHAPE, head_dim=20, tie_word_embeddings=True)),
    "qwen3, mixed layers, biased, sharded": Case(
        architecture=Qwen3ForCausalLM,
        config=Qwen3Config(
            **_SHAPE,
            head_dim=12,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        shard_size="40KB",
    ),
    "gemma3": Case(architecture=Gemma3ForCausalLM, config=Gemma3TextConfig(**_GEMMA, sliding_window_pattern=2)),
    "gemma3, ropes by layer, biased, untied": Case(
        architecture=Gemma3ForCausalLM,
        config=Gemma3TextConfig(
            **_GEMMA,
            tie_word_embeddings=False,
            attention_bias=True,
            rope_parameters=_GEMMA_ROPES,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "gemma3 with vision": Case(
        architecture=Gemma3ForConditionalGeneration,
        config=Gemma3Config(
            text_config=Gemma3TextConfig(**_GEMMA, sliding_window_pattern=3),
            vision_config=_VISION,
            mm_tokens_per_image=4,
        ),
    ),
}
SERVINGS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1, "max_num_batched_tokens": 2048},
    "all at once": {"max_num_seqs": 7, "max_num_batched_tokens": 2048},
    "in odd chunks": {"max_num_seqs": 7, "max_num_batched_tokens": 13},
    "preempted": {"max_num_seqs": 7, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 5},
    "cached, in odd chunks": {"max_num_seqs": 7, "max_num_batched_tokens": 13, "enable_prefix_caching": True},
    "cached, preempted": {
        "max_num_seqs": 7,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 5,
        "enable_prefix_caching": True,
    },
}


@dataclass(frozen=True, kw_only=True)
class Golden:
    """A checkpoint on disk, prompts, and what transformers makes of them in float32."""

    name: str
    folder: Path
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[list[int], ...]
    logits: tuple[Tensor, ...]
    """Of each prompt followed by its outputs: (tokens, VOCAB)."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    """Save a random checkpoint as a user's would be, and decode greedily with transformers."""
    case = CASES[request.param]
    model = case.architecture(case.config).eval()
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    prompts = tuple(tuple(torch.randint(VOCAB, (n,), generator=generator).tolist()) for n in PROMPT_LENS)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            # Drawn anew: transformers uses the global generator, leaves norms and biases flat, and its narrow
            # matrices make every output the same.
            spread = torch.randn(parameter.shape, generator=generator) * 0.3
            if "embed_tokens" in name:
                # Gemma multiplies them; left so large they would decide every output.
                spread /= getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
            parameter.copy_(parameter + spread if "norm" in name else spread)
        model.save_pretrained(folder, max_shard_size=case.shard_size)
        outputs = tuple(_generate(model, prompt) for prompt in prompts)
        tokens = [torch.tensor([[*prompt, *output]]) for prompt, output in zip(prompts, outputs, strict=True)]
        logits = tuple(model(ids).logits[0] for ids in tokens)
    return Golden(name=request.param, folder=folder, prompts=prompts, outputs=outputs, logits=logits)


def _generate(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """Greedy tokens by transformers' `generate`, its KV cache included, with no end."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_OUTPUTS, do_sample=False)
    generated: list[int] = tokens[0, len(prompt) :].tolist()
    return generated


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the engine made of all prompts."""

    rounds: list[list[list[int]]]
    """Greedy outputs of each prompt, each time they were served."""

    num_preemptions: int
    num_hits: int
    """Prompt tokens found in the prefix cache."""


def _serve(golden: Golden, **changes: Any) -> Served:
    """Serve all prompts together; with prefix caching once more, so that there is something to find."""
    asked = {"device": "cpu", "device_memory_bytes": 2**30, "num_gpu_blocks_override": 200, "max_model_len": 128}
    config = EngineConfig(model=str(golden.folder), **{**asked, **changes})
    executor = TorchExecutor(config)
    scheduler = Scheduler(SchedulerConfig.from_resolved(executor.resolved))
    sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True)
    rounds = []
    for _ in range(1 + config.enable_prefix_caching):
        for index, prompt in enumerate(golden.prompts):
            scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
        outputs: list[list[int]] = [[] for _ in golden.prompts]
        while scheduler.num_running + scheduler.num_waiting:
            for token in scheduler.commit(executor.execute(scheduler.schedule())):
                outputs[int(token.request_id)].append(token.token_id)
        rounds.append(outputs)
    return Served(rounds=rounds, num_preemptions=scheduler.num_preemptions, num_hits=scheduler.num_prefix_hits_tokens)


@pytest.mark.parametrize("serving", SERVINGS)
def test_greedy_tokens_are_transformers_own(golden: Golden, serving: str) -> None:
    """A user gets the model's answer whatever else is running, however prompts are cut, cached or preempted."""
    served = _serve(golden, **SERVINGS[serving])

    assert all(outputs == list(golden.outputs) for outputs in served.rounds)
    assert (served.num_preemptions > 0) == ("preempted" in serving)
    assert served.num_hits > 0 or serving != "cached, in odd chunks"


def test_blocks_shared_within_the_step_that_fills_them_change_no_token(golden: Golden) -> None:
    """Two equal prompts that arrive together get the same answer: the second reads what the first is just writing."""
    twice = replace(
        golden,
        prompts=tuple(prompt for prompt in golden.prompts for _ in range(2)),
        outputs=tuple(output for output in golden.outputs for _ in range(2)),
    )
    served = _serve(twice, max_num_seqs=14, max_num_batched_tokens=2048, enable_prefix_caching=True)

    assert served.rounds[0] == list(twice.outputs)


def test_the_comparison_of_tokens_means_something(golden: Golden) -> None:
    """No choice is so close that rounding makes it, and not every token is the same."""
    margins = []
    for prompt, logits in zip(golden.prompts, golden.logits, strict=True):
        best = logits[len(prompt) - 1 : -1].topk(2).values
        margins.append(((best[:, 0] - best[:, 1]) / logits.abs().max()).min())

    assert min(margins) > LOGIT_TOLERANCE
    assert len(set().union(*golden.outputs)) >= 20


def _logits(folder: Path, tokens: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Our logits of more than 34 tokens, computed in three chunks."""
    config = read_model_config(folder)
    cpu = torch.device("cpu")
    decoder = Decoder(config, load_weights(Checkpoint(folder), config, dtype=dtype, device=cpu))
    buffers = BatchBuffers(
        max_num_seqs=1,
        max_num_batched_tokens=128,
        max_model_len=128,
        block_size=BLOCK,
        device=cpu,
    )
    shape = (config.num_layers, 2, 9, BLOCK, config.num_kv_heads, config.head_dim)
    cache = KvCache(torch.full(shape, np.nan, dtype=dtype), (KvScales(),) * config.num_layers)
    ours = []
    with torch.inference_mode():
        for start, stop in ((0, 33), (33, 34), (34, len(tokens))):
            item = ScheduledRequest(
                request_id="0",
                token_ids=tokens[start:stop],
                start=start,
                block_ids=(3, 1, 4, 8),
                samples=False,
                output_index=0,
                sampling=SamplingParams(max_tokens=1),
            )
            batch = buffers.fill(StepPlan(scheduled=(item,)))
            ours.append(decoder.logits(decoder.forward(batch.token_ids, batch.positions, batch.attention, cache)))
    return torch.cat(ours)


def test_logits_are_close_to_transformers(golden: Golden) -> None:
    """Not just the best token: scores agree at every position."""
    theirs = golden.logits[LONG]
    ours = _logits(golden.folder, (*golden.prompts[LONG], *golden.outputs[LONG]), torch.float32)

    torch.testing.assert_close(ours, theirs, atol=LOGIT_TOLERANCE * theirs.abs().max().item(), rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_as_accurate_as_transformers(golden: Golden, dtype: torch.dtype) -> None:
    """In 16 bits log-probabilities are about as far from float32's as transformers' own, no further."""
    tokens = (*golden.prompts[LONG], *golden.outputs[LONG])
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(golden.folder, dtype=dtype)(torch.tensor([tokens])).logits[0]
    exact = golden.logits[LONG].log_softmax(-1)
    our_error, their_error = (
        (scores.float().log_softmax(-1) - exact).abs().mean()
        for scores in (_logits(golden.folder, tokens, dtype), theirs)
    )

    assert our_error < HALF_PRECISION_TOLERANCE * their_error


def test_a_window_ends_where_transformers_ends_it(tmp_path: Path) -> None:
    """With a window of 9 the last token sees itself and 8 before it: not one more, not one less."""
    model = MistralForCausalLM(MistralConfig(**{**_SHAPE, "num_hidden_layers": 1}, sliding_window=9)).eval()
    model.save_pretrained(tmp_path)
    tokens = tuple(range(40))

    def last_logits(tokens: tuple[int, ...]) -> list[Tensor]:
        with torch.inference_mode():
            return [_logits(tmp_path, tokens, torch.float32)[-1], model(torch.tensor([tokens])).logits[0, -1]]

    before = last_logits(tokens)
    for distance, is_seen in ((9, False), (8, True)):
        changed = (*tokens[: 39 - distance], 100, *tokens[40 - distance :])
        for ours_or_theirs, was in zip(last_logits(changed), before, strict=True):
            assert torch.equal(ours_or_theirs, was) != is_seen


def test_the_sharded_checkpoint_is_sharded(golden: Golden) -> None:
    """The shard index is really read by the tests above."""
    index = golden.folder / "model.safetensors.index.json"

    assert index.exists() == ("sharded" in golden.name)
    if index.exists():
        assert len(set(json.loads(index.read_text())["weight_map"].values())) > 1
