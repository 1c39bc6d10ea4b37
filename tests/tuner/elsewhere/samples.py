"""Results as other tools write them, cut down to what matters and a little more, on one batch server's curve.

The keys follow files that vLLM 0.32, GuideLLM 0.8.1 and AIPerf 0.13 wrote against a server of ours; the figures are a
step of 10 + 2.25 N ms and 64 output tokens, whose knee is at 20.
"""

from __future__ import annotations

from typing import Any

TOKENS = 64
CONCURRENCIES = (1, 2, 4, 8, 16, 20, 24, 32, 64)
KNEE = 20


def throughput(concurrency: float) -> float:
    """Output tokens per second."""
    return 1000 * concurrency / (10 + 2.25 * concurrency)


def e2e_ms(concurrency: float) -> float:
    """Mean end-to-end latency, by Little's law."""
    return 1000 * concurrency * TOKENS / throughput(concurrency)


def vllm(concurrency: int | None, **changed: Any) -> dict[str, Any]:
    """One result of `vllm bench serve`; no concurrency is an unlimited rate."""
    n = concurrency or 100
    return {
        "date": "20260101-120000",
        "backend": "openai",
        "model_id": "tiny",
        "num_prompts": 20 * n,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": concurrency,
        "duration": 30.0,
        "completed": 20 * n + 60,
        "failed": 0,
        "request_throughput": throughput(n) / TOKENS,
        "output_throughput": throughput(n),
        "total_token_throughput": 3 * throughput(n),
        "max_concurrent_requests": n,
        "mean_ttft_ms": 10.0 * n,
        "p95_ttft_ms": 20.0 * n,
        "p95_itl_ms": 10 + 2.25 * n,
        "mean_e2el_ms": e2e_ms(n),
        "p95_e2el_ms": 1.2 * e2e_ms(n),
    } | changed


def distribution(mean: float, *, p95: float | None = None, count: int = 200) -> dict[str, Any]:
    """GuideLLM's summary of a distribution."""
    tail = mean if p95 is None else p95
    return {"mean": mean, "count": count, "percentiles": {"p50": mean, "p95": tail, "p99": tail}}


def guidellm_benchmark(strategy: dict[str, Any], concurrency: float, *, errored: int = 0) -> dict[str, Any]:
    """One benchmark of a GuideLLM report, with `concurrency` in flight on average."""

    def by_status(summary: dict[str, Any]) -> dict[str, Any]:
        return {"successful": summary, "errored": None, "incomplete": None, "total": summary}

    return {
        "type_": "generative_benchmark",
        "config": {"strategy": strategy},
        "metrics": {
            "request_totals": {"successful": 200, "errored": errored, "incomplete": 3, "total": 203 + errored},
            "requests_per_second": by_status(distribution(throughput(concurrency) / TOKENS)),
            "request_concurrency": by_status(distribution(concurrency)),
            "request_latency": by_status(distribution(e2e_ms(concurrency) / 1000)),
            "request_scheduled_latency": None,
            "time_to_first_token_ms": by_status(distribution(10.0, p95=20 * concurrency)),
            "inter_token_latency_ms": by_status(distribution(5.0, p95=5.0)),
            "output_tokens_per_second": by_status(distribution(throughput(concurrency))),
        },
    }


def guidellm(*benchmarks: dict[str, Any], version: int = 2) -> dict[str, Any]:
    """A GuideLLM report."""
    return {
        "metadata": {"version": version, "guidellm_version": "0.8.1"},
        "config": {},
        "benchmarks": list(benchmarks),
        "conclusions": [],
    }


def aiperf(concurrency: int, phase: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    """AIPerf's export of one run."""
    requests, rate = 20 * concurrency + 60, throughput(concurrency)
    warm_up = {
        "name": "warmup",
        "kind": "warmup",
        "type": "concurrency",
        "concurrency": 1,
        "exclude_from_results": True,
    }
    measured = phase or {"type": "concurrency", "concurrency": concurrency}
    return {
        "schema_version": "1.4",
        "request_throughput": {"unit": "requests/sec", "avg": rate / TOKENS},
        "request_latency": {"unit": "ms", "avg": e2e_ms(concurrency), "p95": 1.2 * e2e_ms(concurrency)},
        "request_count": {"unit": "requests", "avg": float(requests)},
        "time_to_first_token": {"unit": "ms", "avg": 10.0, "p95": 20.0 * concurrency},
        "inter_token_latency": {"unit": "ms", "avg": 5.0, "p95": 5.0},
        "inter_chunk_latency": {"unit": "ms", "avg": 5.0, "p95": 30.0, "count": requests * (TOKENS - 1)},
        "output_token_throughput": {"unit": "tokens/sec", "avg": rate},
        "total_osl": {"unit": "tokens", "avg": float(requests * TOKENS)},
        "effective_concurrency": {"unit": "requests", "avg": 0.98 * concurrency},
        "input_config": {"phases": [warm_up, {"name": "profiling", "kind": "profiling", **measured}]},
        "was_cancelled": False,
        "is_complete": True,
    } | changed
