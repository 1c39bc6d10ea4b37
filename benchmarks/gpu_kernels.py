"""What the card can do, and what share of it each kernel does: for `gpu.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from triton.testing import do_bench

from kernels import dispatch, reference

Rows = list[dict[str, Any]]
Run = Callable[[], object]

BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
"""Of Llama-3-8B."""


def device_of(*, smoke: bool) -> torch.device:
    """The first GPU; a CPU for a smoke run."""
    return torch.device("cpu" if smoke else "cuda")


def seconds(run: Run, device: torch.device) -> float:
    """Median time of what one run launches on the device, which finds nothing of the run before in its cache."""
    if device.type == "cpu":
        return wall_s(run, repeats=3)
    milliseconds: float = do_bench(run, return_mode="median")
    return milliseconds / 1e3


def wall_s(run: Run, *, repeats: int) -> float:
    """Median time of a run that waits for what it has launched, after one for warm-up."""
    run()
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def copy_bytes_per_s(device: torch.device, *, smoke: bool) -> float:
    """Bytes read and written a second by a large copy on the device."""
    source = torch.empty(2**20 if smoke else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(partial(target.copy_, source), device)


def flops_per_s(device: torch.device, *, smoke: bool) -> float:
    """Of a large bfloat16 product of random matrices."""
    size = 128 if smoke else 8192
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(partial(torch.matmul, left, right), device)


def floors(*, smoke: bool) -> dict[str, Rows]:
    """Copy bandwidth and matrix product, measured here."""
    device = device_of(smoke=smoke)
    return {
        "Floors": [
            {"what": "copy on the device, read and written", "GB/s": copy_bytes_per_s(device, smoke=smoke) / 1e9},
            {"what": "bfloat16 product", "TFLOP/s": flops_per_s(device, smoke=smoke) / 1e12},
        ]
    }


def kernels(*, smoke: bool) -> dict[str, Rows]:
    """Every kernel beside the floor that binds it and beside torch's own way."""
    device = device_of(smoke=smoke)
    copy, peak_flops = copy_bytes_per_s(device, smoke=smoke), flops_per_s(device, smoke=smoke)
    return {
        "Decode attention, 64 requests": list(_decodes(device, copy, smoke=smoke)),
        "Prompt attention": [_prompt(device, peak_flops, smoke=smoke)],
        "Row kernels": _rows(device, copy, smoke=smoke),
    }


def _decodes(device: torch.device, copy: float, *, smoke: bool) -> Rows:
    num_requests, contexts = (2, (64,)) if smoke else (64, (512, 2048, 8192))
    dtypes = (torch.bfloat16, torch.float8_e4m3fn)
    return [_decode(device, num_requests, *each, copy) for each in product(contexts, dtypes)]


def _decode(device: torch.device, num_requests: int, context: int, dtype: torch.dtype, copy: float) -> dict[str, Any]:
    num_blocks = num_requests * context // BLOCK_SIZE
    caches = [_random(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, device=device).to(dtype) for _ in range(2)]
    query = _random(num_requests, HEADS, HEAD_SIZE, device=device)
    tables = torch.randperm(num_blocks, device=device).to(torch.int32).view(num_requests, -1)
    lens = torch.full((num_requests,), context, dtype=torch.int32, device=device)
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device)
    ours = partial(dispatch.paged_attention, query, *caches, tables, lens, starts, HEAD_SIZE**-0.5)
    num_bytes = 2 * caches[0].numel() * caches[0].element_size()
    our_s = seconds(ours, device)
    row = {"cache": str(dtype).removeprefix("torch."), "context": context, "ours us": our_s * 1e6}
    row |= {"GB/s": num_bytes / our_s / 1e9, "share of copy": num_bytes / our_s / copy}
    if dtype == torch.bfloat16:
        keys, values = (_random(num_requests, KV_HEADS, context, HEAD_SIZE, device=device) for _ in range(2))
        theirs = partial(F.scaled_dot_product_attention, query.unsqueeze(2), keys, values, enable_gqa=True)
        row["torch SDPA, contiguous, us"] = seconds(theirs, device) * 1e6
    return row


def _prompt(device: torch.device, peak_flops: float, *, smoke: bool) -> dict[str, Any]:
    num_tokens = 64 if smoke else 4096
    num_blocks = num_tokens // BLOCK_SIZE
    caches = [_random(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, device=device) for _ in range(2)]
    query = _random(num_tokens, HEADS, HEAD_SIZE, device=device)
    tables = torch.arange(num_blocks, dtype=torch.int32, device=device).view(1, -1)
    lens = torch.tensor([num_tokens], dtype=torch.int32, device=device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    ours = partial(dispatch.paged_attention, query, *caches, tables, lens, starts, HEAD_SIZE**-0.5)
    keys, values = (cache.flatten(0, 1).transpose(0, 1).unsqueeze(0) for cache in caches)
    theirs = partial(
        F.scaled_dot_product_attention,
        query.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        is_causal=True,
        enable_gqa=True,
    )
    our_s, flops = seconds(ours, device), 2 * num_tokens**2 * HEADS * HEAD_SIZE
    row = {"tokens": num_tokens, "ours us": our_s * 1e6, "TFLOP/s": flops / our_s / 1e12}
    return row | {"share of product": flops / our_s / peak_flops, "torch SDPA us": seconds(theirs, device) * 1e6}


def _rows(device: torch.device, copy: float, *, smoke: bool) -> Rows:
    tokens, hidden, inner, vocab = (8, 64, 96, 320) if smoke else (4096, 4096, 14336, 151936)
    x, residual = (_random(tokens, hidden, device=device) for _ in range(2))
    weight, gated = torch.ones(hidden, dtype=x.dtype, device=device), _random(tokens, 2 * inner, device=device)
    heads = _random(tokens, HEADS + KV_HEADS, HEAD_SIZE, device=device)
    angles = torch.randn(tokens, 1, HEAD_SIZE, device=device)
    cache = [_random(tokens // BLOCK_SIZE + 1, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, device=device) for _ in range(2)]
    key, value = (heads[:, :KV_HEADS].contiguous() for _ in range(2))
    slots = torch.randperm(tokens, device=device)
    rows = min(tokens, 256)
    logits, ones = torch.randn(rows, vocab, device=device), torch.ones(rows, device=device)
    draws = torch.rand(rows, dtype=torch.float64, device=device)
    cuts = {"top_ks": torch.full((rows,), 50, device=device), "top_ps": torch.full_like(draws, 0.95)}
    cuts["min_ps"] = torch.zeros_like(ones)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Tensor], int]] = [
        ("rms_norm", (x, weight, 1e-6), {}, 2 * _size(x)),
        ("add_rms_norm", (x, residual, weight, 1e-6), {}, 4 * _size(x)),
        ("rotary_embedding", (heads, angles.cos(), angles.sin()), {}, 2 * _size(heads)),
        ("silu_mul", (gated,), {}, 3 * _size(gated) // 2),
        ("kv_write", (key, value, *cache, slots), {}, 4 * _size(key)),
        ("sample", (logits, ones, draws), {}, _size(logits)),
        ("sample_likely", (logits, ones, draws), cuts, _size(logits)),
    ]
    found = []
    for name, arguments, named, num_bytes in calls:
        our_s = seconds(partial(getattr(dispatch, name), *arguments, **named), device)
        their_s = seconds(partial(getattr(reference, name), *arguments, **named), device)
        row = {"kernel": name, "ours us": our_s * 1e6, "GB/s": num_bytes / our_s / 1e9}
        found.append(row | {"share of copy": num_bytes / our_s / copy, "torch ops us": their_s * 1e6})
    return found


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(torch.bfloat16)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
