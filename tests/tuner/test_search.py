"""What the search says of a setting before its figures are in."""

from __future__ import annotations

from typing import Any

from tests.fakes.records import facts
from tuner.engine_config import EngineConfig
from tuner.memory_model import MemoryModel
from tuner.search import preemption_warning


def _said(fence: int) -> str | None:
    """What is said of a fence over a cache of 77,088 tokens, 4818 blocks of 16, and requests of 1050."""
    config = EngineConfig(max_num_seqs=fence, max_num_batched_tokens=2048, gpu_memory_utilization=0.9)
    known: dict[str, Any] = {"num_gpu_blocks": 4818, "memory_total_bytes": 2**34}
    known["memory_reserved_bytes"] = round(0.9 * 2**34)
    memory = MemoryModel.calibrated(config, facts(config).model_copy(update=known))
    assert memory is not None
    return preemption_warning(config, memory, tokens_per_request=1050)


def test_a_fence_above_what_the_cache_holds_is_called_preemption_prone() -> None:
    """256 requests admitted where 73 fit: 480 preemptions and a TTFT of a minute, known before the first request."""
    said = _said(256)

    assert said is not None
    assert said.startswith("preemption-prone: 256 requests may run at once, but the KV cache holds about 73 ")
    assert _said(73) is None
