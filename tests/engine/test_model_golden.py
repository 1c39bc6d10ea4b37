"""The engine's tokens and logits against transformers' own models, on tiny random checkpoints in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.llama import LlamaForCausalLM
from transformers.models.qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM

from engine.batch import BatchBuffers
from engine.config import EngineConfig
from engine.executor.torch import TorchExecutor
from engine.models.config import read_model_config
from engine.models.llama import Decoder
from engine.models.weights import checkpoint, load_weights
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.step import ScheduledRequest, StepPlan

VOCAB = 128
NUM_OUTPUTS = 24
PROMPT_LENS = (15, 16, 17, 32, 33, 1, 40)
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS: dict[str, tuple[type, PreTrainedConfig, str]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SHAPE, tie_word_embeddings=True), "5GB"),
    "llama3 rope, untied, sharded": (LlamaForCausalLM, LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE), "40KB"),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SHAPE), "5GB"),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SHAPE, head_dim=20, tie_word_embeddings=True), "5GB"),
}


@dataclass(frozen=True, kw_only=True)
class Golden:
    """A checkpoint on disk, prompts, and what transformers makes of them."""

    folder: Path
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[list[int], ...]
    logits: tuple[torch.Tensor, ...]
    """Of each prompt followed by its outputs: (tokens, VOCAB)."""


@pytest.fixture(scope="module", params=CHECKPOINTS)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    """Save a random checkpoint as a user's would be, and decode greedily with transformers."""
    architecture, config, shard_size = CHECKPOINTS[request.param]
    model = architecture(config).eval()
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    prompts = tuple(tuple(torch.randint(VOCAB, (n,), generator=generator).tolist()) for n in PROMPT_LENS)
    outputs, logits = [], []
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            # Drawn anew: transformers uses the global generator, leaves norms and biases flat, and its narrow
            # matrices make every output the same.
            spread = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(spread + 1.0 if "norm" in name else spread)
        model.save_pretrained(folder, max_shard_size=shard_size)
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(NUM_OUTPUTS):
                scores = model(torch.tensor([tokens])).logits[0]
                tokens.append(int(scores[-1].argmax()))
            outputs.append(tokens[len(prompt) :])
            logits.append(model(torch.tensor([tokens])).logits[0])
    return Golden(folder=folder, prompts=prompts, outputs=tuple(outputs), logits=tuple(logits))


def _serve(golden: Golden, config: EngineConfig) -> tuple[list[list[int]], int]:
    """Greedy outputs of all prompts, and how often a request was preempted."""
    executor = TorchExecutor(config)
    scheduler = Scheduler(executor.resolved)
    sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(golden.prompts):
        scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    outputs: list[list[int]] = [[] for _ in golden.prompts]
    while scheduler.num_running + scheduler.num_waiting:
        for token in scheduler.commit(executor.execute(scheduler.schedule())):
            outputs[int(token.request_id)].append(token.token_id)
    return outputs, scheduler.num_preemptions


@pytest.mark.parametrize("num_blocks", [200, 6], ids=["large cache", "small cache"])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 64, 2048])
@pytest.mark.parametrize("max_num_seqs", [1, 7])
def test_greedy_tokens_are_transformers_own(
    golden: Golden, max_num_seqs: int, max_num_batched_tokens: int, num_blocks: int
) -> None:
    """A user gets the model's answer whatever else is running, however prompts are cut, and after preemptions."""
    config = EngineConfig(
        model=str(golden.folder),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_gpu_blocks_override=num_blocks,
        device_memory_bytes=2**30,
        device="cpu",
    )

    outputs, num_preemptions = _serve(golden, config)

    assert list(golden.outputs) == outputs
    assert (num_preemptions > 0) == (max_num_seqs > 1 and num_blocks == 6)


def test_greedy_outputs_vary(golden: Golden) -> None:
    """The comparison above would be worth little if every token were the same."""
    assert len(set().union(*golden.outputs)) >= 20


def test_logits_are_close_to_transformers(golden: Golden) -> None:
    """Not just the best token: probabilities agree at every position, computed in two chunks."""
    config = read_model_config(golden.folder)
    cpu = torch.device("cpu")
    decoder = Decoder(config, load_weights(checkpoint(golden.folder), config, dtype=torch.float32, device=cpu))
    buffers = BatchBuffers(
        max_num_seqs=1,
        max_num_batched_tokens=128,
        max_model_len=128,
        block_size=16,
        windows=set(config.layer_windows),
        dtype=torch.float32,
        device=cpu,
    )
    cache = torch.full((config.num_layers, 2, 9, 16, config.num_kv_heads, config.head_dim), np.nan)
    tokens = (*golden.prompts[4], *golden.outputs[4])
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

    torch.testing.assert_close(torch.cat(ours), golden.logits[4], atol=2e-4, rtol=1e-4)


def test_the_sharded_checkpoint_is_sharded(golden: Golden, request: pytest.FixtureRequest) -> None:
    """The shard index is really read by the tests above."""
    index = golden.folder / "model.safetensors.index.json"
    if "sharded" not in request.node.callspec.id:
        assert not index.exists()
        return
    assert len(set(json.loads(index.read_text())["weight_map"].values())) > 1
