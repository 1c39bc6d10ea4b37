"""Hugging Face `generate` in a process of its own: one JSON line in, one out.

Run by `peers.py` as `python transformers_peer.py FOLDER CPU,CPU,…`. A batch is padded on the left, generated greedily
with the model's own KV cache to the longest output asked in it, and each request counts only the tokens it asked for.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter
from typing import Any


def main() -> None:
    """Answer requests until stdin ends."""
    folder, cpus = sys.argv[1], [int(cpu) for cpu in sys.argv[2].split(",")]
    os.sched_setaffinity(0, cpus)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(len(cpus))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    _reply({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        began = perf_counter()
        outputs: list[list[int]] = []
        for batch in request["batches"]:
            outputs += _generate(model, batch)
        seconds = perf_counter() - began
        _reply({"seconds": seconds, "first_text": tokenizer.decode(outputs[0])})


def _generate(model: Any, batch: list[dict[str, Any]]) -> list[list[int]]:
    """The new tokens of each request, cut to what it asked for."""
    import torch

    longest = max(len(item["prompt"]) for item in batch)
    steps = max(item["max_tokens"] for item in batch)
    ids = torch.tensor([[0] * (longest - len(item["prompt"])) + item["prompt"] for item in batch])
    mask = torch.tensor([[0] * (longest - len(item["prompt"])) + [1] * len(item["prompt"]) for item in batch])
    with torch.inference_mode():
        whole = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            eos_token_id=None,
        )
    new = whole[:, longest:].tolist()
    if any(len(tokens) != steps for tokens in new):
        raise RuntimeError(f"generate gave {[len(tokens) for tokens in new]} tokens, asked were {steps}")
    return [tokens[: item["max_tokens"]] for tokens, item in zip(new, batch, strict=True)]


def _reply(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
