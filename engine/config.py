"""What was asked of the engine (`EngineConfig`) and what was decided from it (`ResolvedConfig`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

_SIZE = re.compile(r"(?P<number>\d{1,30}(?:\.\d{1,30})?)(?P<suffix>[kmgtKMGT]?)")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_DEVICE = re.compile(r"(?P<kind>auto|cpu|cuda)(?::(?P<number>[0-9]{1,4}))?")
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class ConfigError(ValueError):
    """A setting that can never work; the message names the setting, its value and the limit."""


class OutOfDeviceMemoryError(MemoryError):
    """The device ran out of memory in a phase that is known."""

    def __init__(self, kind: str, message: str) -> None:
        """Keep the failure class.

        Args:
            kind: one of the project's failure classes, such as `oom_graph_capture`.
        """
        super().__init__(message)
        self.kind = kind


def parse_size(text: str) -> int:
    """Read a whole number that may end in a suffix: `16k` is 16,000 and `16K` is 16,384.

    Lower case is decimal and may carry decimals, upper case is binary and may not
    (vLLM: `vllm/utils/argparse_utils.py`, `human_readable_int`).

    Raises:
        ConfigError: for anything else, naming the text.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write 16384, 16k (16,000) or 16K (16,384)")
    number, suffix = match["number"], match["suffix"]
    if suffix in _BINARY:
        if "." in number:
            raise ConfigError(f"{text!r}: a binary suffix takes a whole number; write {number}{suffix.lower()}")
        return int(number) * _BINARY[suffix]
    value = Decimal(number) * _DECIMAL[suffix]
    if value != int(value):
        raise ConfigError(f"{text!r} is not a whole number")
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every knob of the engine, under vLLM's names; what was asked for, never what was decided."""

    model: str
    """A local Hugging Face folder, a hub id where there is a network, or `embedded`: the model that ships with us."""

    served_model_name: str | None = None
    """The name clients use; None takes `model`."""

    max_num_seqs: int = 128
    """Most requests running at once: the fence. Unit: requests."""

    max_num_batched_tokens: int = 2048
    """Token budget of one step, prefill and decode together. Unit: tokens."""

    gpu_memory_utilization: float = 0.92
    """Share of the device's memory this instance may take: weights, activations and KV blocks. In (0, 1]."""

    max_model_len: int | None = None
    """Most tokens of one request, prompt and output together; None takes the model's own. Unit: tokens."""

    enable_chunked_prefill: bool = True
    """Whether a prompt may be split over several steps."""

    enable_prefix_caching: bool = True
    """Whether requests share the KV blocks of equal prefixes."""

    enforce_eager: bool = False
    """Whether decode steps on a GPU are launched kernel by kernel, and no graphs are captured for them. On a CPU there
    are none."""

    max_num_scheduled_tokens: int | None = None
    """Most tokens a step schedules, where that is to be below `max_num_batched_tokens`, which sizes the buffers; None
    takes the budget. Unit: tokens."""

    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt that a step takes while other requests run or wait; 0 is no limit. Unit: tokens."""

    max_num_active_seqs: int | None = None
    """Most requests running at once, where that is to be below `max_num_seqs`, which sizes buffers; None takes
    `max_num_seqs`. Unit: requests."""

    watermark: float = 0.0
    """Share of the KV blocks that admission leaves free for requests that run already. In [0, 1)."""

    scheduler_reserve_full_isl: bool = True
    """Whether a request is admitted only if all its known tokens fit the free blocks, not only its first chunk."""

    max_num_queued_reqs: int | None = None
    """Most requests in the engine at once, running or waiting, over all cores; one more is refused with 503. None is no
    limit. Unit: requests."""

    max_num_queued_tokens: int | None = None
    """Prompt tokens of requests without a first token, over all cores, from which on further requests are refused with
    503. None is no limit. Unit: tokens."""

    data_parallel_size: int = 1
    """Cores behind one server, each with weights, KV blocks and running list of its own. Unit: cores."""

    tensor_parallel_size: int = 1
    """Devices one core computes on. This engine computes on one; the value is checked and above 1 refused."""

    block_size: int = 16
    """Tokens that one KV block holds. Unit: tokens."""

    kv_cache_dtype: str = "auto"
    """`auto`, the model's own; or `fp8`, half the bytes a block of bfloat16, with a scale per layer."""

    num_gpu_blocks_override: int | None = None
    """Number of KV blocks to use instead of what the memory budget yields. Unit: blocks."""

    device_memory_bytes: int | None = None
    """On CPU, the device that `gpu_memory_utilization` is a share of, one for each core; None takes half the RAM, or
    half the control group's memory limit where that is less, for all cores together. Unit: bytes."""

    dtype: str = "auto"
    """`float32`, `bfloat16`, `float16`, or `auto`: float32 on CPU, the checkpoint's own on a GPU."""

    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: CUDA where there is one and no `device_memory_bytes` is asked for. A number may follow,
    as in `cuda:1`, and none is 0; `cpu:1` is a further virtual device on the same CPUs, with memory of its own.
    Where a law stands for the device it names nothing."""

    executor: str = "torch"
    """`torch` computes; `simulated` waits as long as `law` says and makes tokens up, and everything says so."""

    law: str | None = None
    """With `executor="simulated"`, the device to simulate: a preset's name, or the path of a YAML file."""

    load_format: str = "auto"
    """`safetensors`, `dummy` (seeded weights made up at start), or `auto`: dummy for `embedded`, else safetensors."""

    seed: int = 0
    """Seeds dummy weights and the sampling of requests that bring no seed."""

    cpu_omp_threads_bind: str = "auto"
    """CPUs the cores compute on: a list for each such as `0-3` or `0-3|4-7`; `count:4`, the next 4 this process may use
    for each; `auto`, equal shares of all it may use, by affinity and the control group's CPU quota, but the last;
    `nobind`, no pinning."""

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            if getattr(self, name) is not None:
                _require_within(name, getattr(self, name), least, most)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} is outside (0, 1]: "
                "it is a share of the device's memory"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a decode step needs one token per running request; raise the budget or lower the sequences"
            )
        self._check_scheduling()
        _require_one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _require_one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8"))
        split_device(self.device)
        _require_one_of("executor", self.executor, ("torch", "simulated"))
        if self.law is not None and self.executor != "simulated":
            raise ConfigError(f"law={self.law!r} is for executor='simulated', and executor={self.executor!r}: set both")
        _require_one_of("load_format", self.load_format, ("auto", "safetensors", "dummy"))

    def _check_scheduling(self) -> None:
        """The limits that narrow `max_num_seqs` and `max_num_batched_tokens`, and the share kept free."""
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > self.max_num_seqs:
            raise ConfigError(
                f"max_num_active_seqs={self.max_num_active_seqs} is above max_num_seqs={self.max_num_seqs}: "
                "it narrows that limit; lower it or raise max_num_seqs"
            )
        scheduled = self.max_num_scheduled_tokens
        if scheduled is not None and scheduled > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_scheduled_tokens={scheduled} is above max_num_batched_tokens={self.max_num_batched_tokens}: "
                "it narrows that budget; lower it or raise max_num_batched_tokens"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} is below 0: 0 is no limit"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark={self.watermark} is outside [0, 1): it is a share of the KV blocks")


_COUNT = (1, 2**31 - 1)
"""What torch, and int32 block tables, can count."""

_LIMITS = {
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_num_scheduled_tokens"), _COUNT),
    **dict.fromkeys(("max_num_active_seqs", "max_num_queued_reqs", "max_num_queued_tokens"), _COUNT),
    **dict.fromkeys(("tensor_parallel_size", "block_size", "num_gpu_blocks_override"), _COUNT),
    "data_parallel_size": (1, 64),  # each is a process, and all start at once
    "device_memory_bytes": (1, 2**63 - 1),
    "seed": (0, 2**63 - 1),
}
"""The least and the most of each number."""


def _require_within(name: str, value: int, least: int, most: int) -> None:
    if value < least:
        raise ConfigError(f"{name}={value} is below {least}")
    if value > most:
        raise ConfigError(f"{name}={value} is above {most}")


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(allowed)}")


def split_device(name: str) -> tuple[str, int]:
    """The kind of a device and its number: `cpu:1` is `("cpu", 1)`, `cuda` is `("cuda", 0)`.

    Raises:
        ConfigError: for anything else, naming it.
    """
    match = _DEVICE.fullmatch(name)
    if match is None:
        raise ConfigError(f"device={name!r} is not one of auto, cpu, cuda, alone or with a number as in cpu:1")
    return match["kind"], int(match["number"] or 0)


def device_of_rank(name: str, rank: int) -> str:
    """The device of a data-parallel rank, where rank 0 computes on `name`: `cpu` is `cpu:2` for rank 2."""
    kind, number = split_device(name)
    number += rank
    return f"{kind}:{number}" if number else kind


def check_against_model(config: EngineConfig, *, max_model_len: int) -> list[str]:
    """Check the rules that need the model's length; returns warnings.

    Args:
        max_model_len: the length in force, asked for or the model's own. Unit: tokens.

    Raises:
        ConfigError: with chunked prefill off and a step that one whole prompt does not fit into, or for a prefill
            threshold above the length (vLLM: `vllm/config/scheduler.py`, `verify_max_model_len`).
    """
    budget, threshold = config.max_num_batched_tokens, config.long_prefill_token_threshold
    if threshold > max_model_len:
        raise ConfigError(
            f"long_prefill_token_threshold={threshold} is above max_model_len={max_model_len}: "
            "no prompt is that long; lower it, or set 0 for no limit"
        )
    for name, most in (
        ("max_num_batched_tokens", budget),
        ("max_num_scheduled_tokens", config.max_num_scheduled_tokens),
    ):
        if not config.enable_chunked_prefill and most is not None and most < max_model_len:
            raise ConfigError(
                f"{name}={most} is below max_model_len={max_model_len} with chunked prefill off: "
                "a whole prompt must fit one step; raise it, lower max_model_len or turn chunked prefill on"
            )
    most = config.max_num_seqs * max_model_len
    if budget > most:
        return [
            f"max_num_batched_tokens={budget} is above max_num_seqs x max_model_len = {most}: no step can be that large"
        ]
    return []


def check_tensor_parallel(tensor_parallel_size: int, *, num_heads: int, num_kv_heads: int) -> None:
    """Check that a model's heads divide over that many devices; fewer key/value heads than devices are repeated.

    Raises:
        ConfigError: where they do not (vLLM: `vllm/config/model.py`, `verify_with_parallel_config`).
    """
    if num_heads % tensor_parallel_size:
        raise ConfigError(
            f"the model's {num_heads} attention heads are not divisible by tensor_parallel_size={tensor_parallel_size}"
        )
    if num_kv_heads % tensor_parallel_size and tensor_parallel_size % num_kv_heads:
        raise ConfigError(
            f"the model's {num_kv_heads} key/value heads neither divide over tensor_parallel_size="
            f"{tensor_parallel_size} devices nor repeat on them"
        )


def check_one_device(tensor_parallel_size: int) -> None:
    """Check that no more is asked for than executors here do.

    Raises:
        ConfigError: for more than one device.
    """
    if tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size}: this engine computes on one device; supported: 1"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Where the device's memory goes. Every field in bytes.

    `kv_cache_bytes = requested_bytes - weights_bytes - activation_peak_bytes - request_buffers_bytes - non_torch_bytes
    - graph_bytes` (vLLM: `vllm/v1/worker/gpu_worker.py`, `determine_available_memory`).
    """

    total_bytes: int
    """The whole device; on CPU the byte budget."""

    free_bytes: int
    """What was free when this instance took its share."""

    requested_bytes: int
    """`total_bytes x gpu_memory_utilization`: what this instance may take."""

    weights_bytes: int
    activation_peak_bytes: int
    """Measured by a profiling pass of the largest step."""

    request_buffers_bytes: int
    """What a step is laid out in and sampled with, allocated once: a block table of `max_model_len` for each of
    `max_num_seqs`, ids and positions for `max_num_batched_tokens`. All token ids of a request, for which vLLM keeps
    `max_num_seqs x max_model_len x 4` bytes, are Python objects here, and those are not counted."""

    non_torch_bytes: int
    """What libraries took outside torch's tensors, by difference."""

    graph_bytes: int = 0
    """What capturing graphs takes: two are captured to find out, and the others are reckoned to take what the second
    did. 0 where none are captured."""

    kv_cache_bytes: int
    """What is left for KV blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What the engine decided from an `EngineConfig`, a model and a device: the values in force."""

    asked: EngineConfig
    served_model_name: str
    max_model_len: int
    dtype: str
    device: str
    """`cpu`, `cuda`, or with a number above 0, as `cpu:1`; `simulated:h100-8b` where a law stands in for a device."""

    num_gpu_blocks: int
    """KV blocks there are, all of them usable. Unit: blocks."""

    kv_block_bytes: int
    """Bytes of one KV block over all layers."""

    memory: MemoryBudget
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    captures_graphs: bool
    """Whether decode steps of some batch sizes run from captured graphs, and are faster for it."""

    warnings: tuple[str, ...] = ()
