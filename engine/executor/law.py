"""The law of a simulated device: how long a step takes and what memory goes where, read from YAML.

A law is a small set of terms, each with its unit in its name. The presets beside this file, in `laws/`, say of every
constant whether it was published or derived, and from what.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.config import ConfigError
from engine.step import StepPlan
from engine.yaml_file import read_mapping

_FOLDER = Path(__file__).parent / "laws"
_SUFFIXES = (".yaml", ".yml")

MOST_BYTES = 2**60
"""No device has more; sums and products of such figures still are exact numbers."""

MOST_SECONDS = 3600.0
"""Of one term of a step."""

_MOST_POSITIONS = 2**31 - 1
_SHOWN = 60
"""Characters of a faulty value that an error shows."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StepTime(_Part):
    """How long one step takes. Every term in seconds, 0 leaves it out.

    step = base + combine(compute, memory) + sampled_token x tokens drawn, where

    - compute = prefill_token x prefill tokens + decode_token x decode tokens + attention_pair x prefill pairs
    - memory = weights_read + context_token x context tokens

    A request that computes one token is a decode, one that computes more a prefill. Its context is every token whose KV
    it reads, its own included. A prefill token makes a pair with each token it attends to, so that the pairs of a
    prompt grow with its square.
    """

    combine: Literal["max", "sum"]
    """`max`: compute and memory traffic overlap, the slower one decides (a roofline); `sum`: they do not."""

    base_s: float = Field(ge=0, le=MOST_SECONDS)
    """Every step, whatever is in it: launches, synchronisation, the engine's own work between two steps."""

    weights_read_s: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    """Reading all weights once."""

    context_token_s: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    """Reading the KV of one token."""

    prefill_token_s: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    """Computing one token of a prefill, attention aside."""

    decode_token_s: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    """Computing one token of a decode, attention aside."""

    attention_pair_s: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    """Attention of one prefill token to one token."""

    sampled_token_s: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    """The server's CPU, once a token drawn: what a slow host adds to every step, whatever the device does."""

    def step_s(self, plan: StepPlan, *, kv_scale: float) -> float:
        """Seconds the plan takes.

        Args:
            kv_scale: bytes of a token's KV over what they are in the law's own data type.
        """
        prefill_tokens = decode_tokens = context_tokens = prefill_pairs = sampled = 0
        for item in plan.scheduled:
            num_tokens = len(item.token_ids)
            context_tokens += item.start + num_tokens
            sampled += item.samples
            if num_tokens == 1:
                decode_tokens += 1
            else:
                prefill_tokens += num_tokens
                prefill_pairs += num_tokens * item.start + num_tokens * (num_tokens + 1) // 2
        compute_s = (
            self.prefill_token_s * prefill_tokens
            + self.decode_token_s * decode_tokens
            + self.attention_pair_s * prefill_pairs
        )
        memory_s = self.weights_read_s + self.context_token_s * kv_scale * context_tokens
        device_s = max(compute_s, memory_s) if self.combine == "max" else compute_s + memory_s
        return self.base_s + device_s + self.sampled_token_s * sampled


class Unprofiled(_Part):
    """Memory that is taken after the share was divided up, from what the share leaves free: where OOMs come from.

    All 0, and a device never runs out once it has started.
    """

    graph_bytes_per_size: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Capturing a graph, a captured batch size, beyond what was estimated: `oom_graph_capture`."""

    sampler_bytes_per_row: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Warming the sampler up, a row of `max_num_seqs`, beyond what was profiled: `oom_sampler_warmup`."""

    step_bytes_per_token: int = Field(default=0, ge=0, le=MOST_BYTES)
    """A step under load, a token it computes, beyond what was profiled (fragments, workspaces): `oom_runtime`."""


class Memory(_Part):
    """What the device has, and what takes it. Bytes."""

    total_bytes: int = Field(ge=1, le=MOST_BYTES)
    """The whole device."""

    used_by_others_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Held by someone else when the engine starts."""

    weights_bytes: int = Field(ge=0, le=MOST_BYTES)
    non_torch_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Context and libraries."""

    activation_bytes_per_token: int = Field(ge=0, le=MOST_BYTES)
    """Peak activations, a token of `max_num_batched_tokens`."""

    sampled_row_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Scores and the sampler's copies of them, a row of `max_num_seqs`: some values a vocabulary entry."""

    request_buffer_bytes_per_token: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Buffers of `max_num_seqs` x `max_model_len`: 4 for the token ids alone."""

    graph_bytes_per_size: int = Field(default=0, ge=0, le=MOST_BYTES)
    """Captured graphs as the engine estimates them before it divides the share, a captured batch size."""

    kv_bytes_per_token: int = Field(ge=1, le=MOST_BYTES)
    """KV of one token over all layers, in the law's own data type."""

    unprofiled: Unprofiled = Unprofiled()


class Graphs(_Part):
    """Captured graphs: batch sizes 1, 2, 4, multiples of 8 to 256 and of 16 to 512, none above `max_num_seqs`.

    A decode step of more requests than the largest captured size runs without a full graph. So the last few sizes below
    a `max_num_seqs` off that grid are slow, and throughput has a cliff there (vllm-project/vllm, pull request 57355).
    """

    without_graph_factor: float = Field(default=1.0, ge=1, le=MOST_SECONDS)
    """How many times longer a decode step without a graph takes."""


class Law(_Part):
    """A simulated device with a model on it."""

    name: str
    """The preset's name, or the file's."""

    description: str
    max_model_len: int = Field(ge=1, le=_MOST_POSITIONS)
    """Positions of the model. Unit: tokens."""

    dtype: Literal["float32", "bfloat16", "float16"]
    """What weights and KV are held in."""

    step_time: StepTime
    memory: Memory
    graphs: Graphs = Graphs()
    noise_sigma: float = Field(default=0.0, ge=0, le=1)
    """Spread of step times: the standard deviation of their logarithm, seeded, mean kept; 0 is none."""


def law_names() -> list[str]:
    """The presets."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_law(name: str) -> Law:
    """Read a preset by its name, or a law of one's own by its path, which ends in `.yaml` or `.yml`.

    Raises:
        ConfigError: for an unknown preset (listing those there are), a file that cannot be read, or a law that is none.
    """
    if not name.endswith(_SUFFIXES) and name not in law_names():
        raise ConfigError(f"law={name!r} is no preset: take one of {', '.join(law_names())}, or a path to a YAML file")
    try:
        path = Path(name).expanduser() if name.endswith(_SUFFIXES) else _FOLDER / f"{name}.yaml"
    except RuntimeError as error:  # ~ and no such user
        raise ConfigError(f"law={name!r} cannot be read: {error}") from error
    loaded = read_mapping(path, f"law={name!r}")
    try:
        return Law.model_validate({"name": path.stem, **loaded})
    except ValidationError as error:
        raise ConfigError(f"law={name!r} is no law: {'; '.join(_faults(error))}") from error


def _faults(error: ValidationError) -> list[str]:
    """Each fault with its place; YAML takes `1e-9` for text, which deserves a word."""
    faults = []
    for fault in error.errors(include_url=False):
        place, value = ".".join(str(part) for part in fault["loc"]), fault["input"]
        hint = " (YAML reads 1e-9 as text: write 1.0e-9)" if isinstance(value, str) and _is_number(value) else ""
        faults.append(f"{place}: {fault['msg']}, got {_shown(value)}{hint}")
    return faults


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
