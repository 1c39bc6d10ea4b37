"""An engine config: one value for each engine parameter, under vLLM's names."""

from __future__ import annotations

from pydantic import Field

from tuner.frozen import Record

Setting = bool | int | float | str
"""What an engine parameter can be set to."""


class EngineConfig(Record):
    """One value for each engine parameter, under vLLM's names: an engine config."""

    max_num_seqs: int = Field(ge=1)
    """The fence: most requests running at once."""

    max_num_batched_tokens: int = Field(ge=1)
    """Token budget of one step."""

    gpu_memory_utilization: float = Field(gt=0, le=1)
    """Share of the device's memory."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of one request; None leaves the model's own length."""

    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    long_prefill_token_threshold: int | None = Field(default=None, ge=0)
    """Most tokens of one prompt a step; 0 is no limit. None, here and below, leaves the engine's own."""

    max_num_active_seqs: int | None = Field(default=None, ge=1)
    """Most requests running at once, where `max_num_seqs` only sizes the buffers."""

    max_num_scheduled_tokens: int | None = Field(default=None, ge=1)
    """Most tokens a step schedules, where `max_num_batched_tokens` only sizes the buffers."""

    watermark: float | None = Field(default=None, ge=0, lt=1)
    """Share of the KV blocks that admission leaves free."""

    scheduler_reserve_full_isl: bool | None = None
    """Whether a request is admitted only if all of its prompt fits."""

    tensor_parallel_size: int = Field(default=1, ge=1)

    @property
    def fence(self) -> int:
        """Most requests that run at once, by whichever limit is the lower."""
        return min(self.max_num_seqs, self.max_num_active_seqs or self.max_num_seqs)

    def fenced(self, load: int) -> EngineConfig:
        """This config with its fence at `load`, by `max_num_seqs` alone."""
        return self.model_copy(update={"max_num_seqs": load, "max_num_active_seqs": None})
