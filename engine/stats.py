"""Counters a scrape can read, under vLLM's names, and the values in force under ours."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.config import ResolvedConfig
from engine.core import StepReport
from engine.request import FinishReason

_LABELS = ("model_name", "engine")
_ENGINE = "0"
_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS_S = (
    0.01,
    0.03,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    480.0,
)
_STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def engine_version() -> str:
    """The installed version; `unknown` when run from a source tree that is not installed."""
    try:
        return version("kneetune")
    except PackageNotFoundError:
        return "unknown"


class EngineStats:
    """All metrics of one engine, in a registry of their own."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        self._registry = CollectorRegistry()
        self._labels = (resolved.served_model_name, _ENGINE)
        self._num_preemptions_seen = 0
        self._running = self._gauge("vllm:num_requests_running", "Requests in the running list.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests waiting for admission, preempted ones too.")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all of them.")
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions since the start.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens prefilled, counted once a request.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT_BUCKETS_S)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Gap between two tokens.", _ITL_BUCKETS_S)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Whole request.", _REQUEST_BUCKETS_S)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Wait for admission.", _REQUEST_BUCKETS_S)
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens in a step.", _STEP_TOKENS_BUCKETS)
        success = Counter(
            "vllm:request_success", "Requests ended, by reason.", (*_LABELS, "finished_reason"), registry=self._registry
        )
        self._success = {reason: success.labels(*self._labels, reason.value) for reason in FinishReason}
        self._export_config(resolved)

    def observe_step(self, report: StepReport) -> None:
        """Take over how the engine stands after a step."""
        self._running.set(report.num_running)
        self._waiting.set(report.num_waiting)
        self._kv_usage.set(report.kv_cache_usage)
        self._preemptions.inc(report.num_preemptions - self._num_preemptions_seen)
        self._num_preemptions_seen = report.num_preemptions
        self._generation_tokens.inc(len(report.token_ids))
        if report.num_step_tokens:
            self._step_tokens.observe(report.num_step_tokens)

    def observe_admission(self, *, queue_s: float) -> None:
        """Count a request that was admitted for the first time."""
        self._queue.observe(queue_s)

    def observe_first_token(self, *, ttft_s: float, num_prompt_tokens: int) -> None:
        """Count a request's first token, and with it its prompt."""
        self._ttft.observe(ttft_s)
        self._prompt_tokens.inc(num_prompt_tokens)

    def observe_next_token(self, *, itl_s: float) -> None:
        """Count the gap before any later token."""
        self._itl.observe(itl_s)

    def observe_end(self, reason: FinishReason, *, e2e_s: float) -> None:
        """Count a request that ended; the latency of an aborted one says nothing and is left out."""
        self._success[reason].inc()
        if reason is not FinishReason.ABORT:
            self._e2e.observe(e2e_s)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _LABELS, registry=self._registry).labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self._registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, registry=self._registry, buckets=buckets).labels(*self._labels)

    def _export_config(self, resolved: ResolvedConfig) -> None:
        asked = resolved.asked
        cache = {
            "engine": _ENGINE,
            "num_gpu_blocks": resolved.num_gpu_blocks,
            "block_size": asked.block_size,
            "kv_cache_size_tokens": resolved.num_gpu_blocks * asked.block_size,
            "gpu_memory_utilization": asked.gpu_memory_utilization,
            "enable_prefix_caching": asked.enable_prefix_caching,
        }
        self._info("vllm:cache_config_info", "The KV cache in force.", cache)
        config = {
            "model": asked.model,
            "served_model_name": resolved.served_model_name,
            "max_num_seqs": asked.max_num_seqs,
            "max_num_batched_tokens": asked.max_num_batched_tokens,
            "gpu_memory_utilization": asked.gpu_memory_utilization,
            "max_model_len": resolved.max_model_len,
            "enable_chunked_prefill": asked.enable_chunked_prefill,
            "enable_prefix_caching": asked.enable_prefix_caching,
            "dtype": resolved.dtype,
            "device": resolved.device,
            "executor": asked.executor,
            "version": engine_version(),
        }
        self._info("engine:config_info", "The engine config in force.", config)
        memory = resolved.memory
        parts = {
            "total": memory.total_bytes,
            "free": memory.free_bytes,
            "requested": memory.requested_bytes,
            "weights": memory.weights_bytes,
            "activation_peak": memory.activation_peak_bytes,
            "request_buffers": memory.request_buffers_bytes,
            "non_torch": memory.non_torch_bytes,
            "kv_cache": memory.kv_cache_bytes,
            "kv_block": resolved.kv_block_bytes,
        }
        gauge = Gauge("engine:memory_bytes", "Where the device's memory goes.", ("part",), registry=self._registry)
        for part, value in parts.items():
            gauge.labels(part).set(value)

    def _info(self, name: str, text: str, labels: dict[str, object]) -> None:
        gauge = Gauge(name, text, tuple(labels), registry=self._registry)
        gauge.labels(**{key: str(value) for key, value in labels.items()}).set(1)
