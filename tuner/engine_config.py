"""The engine parameters, listed once, under vLLM's names: what a study may move, a job may fix, a launch is given.

`docs/parameters.md` says of each why one would set it and which engine knows it.
"""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from tuner import extra_args
from tuner.frozen import Record
from tuner.inputs import SizeBytes, TokenCount

Setting = bool | int | float | str
"""What an engine parameter can be set to."""

Tokens = Annotated[TokenCount, Field(ge=1)]


def _json_object(value: object) -> object:
    """A mapping, or the JSON text of one, as one and the same text."""
    try:
        read = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f'not JSON ({error}): write an object such as {{"method": "ngram"}}') from None
    if value is None or isinstance(read, dict):
        return None if value is None else json.dumps(read, sort_keys=True)
    raise ValueError("write a JSON object, or keys and values")


JsonText = Annotated[str, BeforeValidator(_json_object)]
"""A JSON object as text, its keys sorted, so that equal ones are equal."""


class TunedParameters(Record):
    """The three that every launch is given and every study may move."""

    max_num_seqs: int = Field(ge=1)
    """The fence of one engine core: most requests it runs at once."""

    max_num_batched_tokens: Tokens
    """Token budget of one step."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of the device's memory; None where the engine has no such share."""


class EngineParameters(Record):
    """The parameters beside those three; None leaves `EngineConfig`'s, and where it says None the engine's own."""

    max_model_len: Tokens | None = None
    """Most tokens of one request; the engine's own is the model's length."""

    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    long_prefill_token_threshold: Annotated[TokenCount, Field(ge=0)] | None = None
    """Most tokens of one prompt a step; 0 is no limit."""

    max_num_active_seqs: int | None = Field(default=None, ge=1)
    """Most requests running at once, where `max_num_seqs` only sizes the buffers."""

    max_num_scheduled_tokens: Tokens | None = None
    """Most tokens a step schedules, where `max_num_batched_tokens` only sizes the buffers."""

    watermark: float | None = Field(default=None, ge=0, lt=1)
    """Share of the KV blocks that admission leaves free."""

    scheduler_reserve_full_isl: bool | None = None
    """Whether a request is admitted only if all of its prompt fits."""

    max_num_queued_reqs: int | None = Field(default=None, ge=1)
    """Most requests in flight over all cores; one more is refused with 503."""

    max_num_queued_tokens: Tokens | None = None
    """Prompt tokens of requests without a first token, over all cores, from which on requests are refused with 503."""

    block_size: int | None = Field(default=None, ge=1)
    """Tokens that one KV block holds."""

    num_gpu_blocks_override: int | None = Field(default=None, ge=1)
    """KV blocks of one core, instead of what the share leaves."""

    kv_cache_memory_bytes: SizeBytes | None = None
    """Bytes of one device's KV cache, instead of what the share leaves."""

    quantization: str | None = Field(default=None, min_length=1)
    """How the weights are kept; the engine's own is what the checkpoint says."""

    speculative_config: JsonText | None = None
    """Speculative decoding as the engine's JSON."""

    enforce_eager: bool | None = None
    """Whether steps run without captured graphs."""

    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Devices that share each layer of one core."""

    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    """Groups of devices that hold the layers of one core one after the other."""

    data_parallel_size: int | None = Field(default=None, ge=1)
    """Engine cores behind one address, each with weights, KV cache and limits of its own."""


class FixedParameters(EngineParameters):
    """Engine parameters that keep one value through a study."""

    extra_args: tuple[str, ...] = ()
    """Flags beyond these parameters, as the engine's command line takes them."""

    @field_validator("extra_args")
    @classmethod
    def _not_ours(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        extra_args.check(arguments, parameters=EngineConfig.model_fields)
        return arguments


class EngineConfig(FixedParameters, TunedParameters):
    """One value for each engine parameter: what a launch is given. None leaves the engine's own."""

    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = Field(default=1, ge=1)
    pipeline_parallel_size: int = Field(default=1, ge=1)
    data_parallel_size: int = Field(default=1, ge=1)

    @property
    def fence(self) -> int:
        """Most requests that run at once, over all engine cores, by whichever limit is the lower."""
        return min(self.max_num_seqs, self.max_num_active_seqs or self.max_num_seqs) * self.data_parallel_size

    @property
    def num_devices(self) -> int:
        """Devices that one launch takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def parallel_sizes(self) -> str:
        """What that number comes from, in words: `tensor_parallel_size=2 x data_parallel_size=4`."""
        names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        sizes = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) > 1]
        return " x ".join(sizes) or "tensor_parallel_size=1"

    @property
    def share(self) -> float:
        """The share of the device's memory that may be taken: all of it where the engine has no such limit."""
        return 1.0 if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    def fenced(self, load: int) -> EngineConfig:
        """This config with its fence at `load`, by `max_num_seqs` alone: a part of it for each core, rounded up."""
        share = -(-load // self.data_parallel_size)
        return self.model_copy(update={"max_num_seqs": share, "max_num_active_seqs": None})
