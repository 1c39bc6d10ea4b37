"""What the server counts, and where a histogram's boundaries lie."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import EngineConfig
from engine.stats import ServerStats
from tests.fakes.executor import fake_resolved

_LONG = (1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


@pytest.mark.parametrize(
    ("name", "boundaries"),
    [
        ("vllm:time_to_first_token_seconds", (0.001, 0.005, 0.01, 0.08, 0.1, 0.75, 1, 7.5, 160, 640, 2560)),
        ("vllm:inter_token_latency_seconds", (0.01, 0.025, 0.05, 0.075, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)),
        ("vllm:e2e_request_latency_seconds", (0.3, 0.5, 0.8, *_LONG)),
        ("vllm:request_queue_time_seconds", (0.3, 0.5, 0.8, *_LONG)),
        ("vllm:iteration_tokens_total", (1, 8, 16, 2048, 8192, 16384)),
    ],
)
def test_a_dashboard_made_for_vllm_finds_its_boundaries(name: str, boundaries: tuple[float, ...]) -> None:
    """An alert on the share of requests above one of vLLM's boundaries would read nothing."""
    resolved = fake_resolved(EngineConfig(model="m"))
    page = ServerStats(resolved, [resolved]).render().decode()
    (family,) = (family for family in text_string_to_metric_families(page) if family.name == name)
    ours = {float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")}

    assert set(boundaries) - ours == set()
