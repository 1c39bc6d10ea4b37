"""Counters a scrape can read, under vLLM's names, and the values in force under ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.config import ResolvedConfig
from engine.core import StepReport
from engine.request import FinishReason
from engine.valves import VALVES

_LABELS = ("model_name", "engine")
_STEP_KINDS = ("prefill", "decode", "mixed")
# vLLM's boundaries (`vllm/v1/metrics/buckets.py`), and finer ones below for models that are small.
_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_BUCKETS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0),
)
_STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def engine_version() -> str:
    """The installed version; `unknown` when run from a source tree that is not installed."""
    try:
        return version("kneetune")
    except PackageNotFoundError:
        return "unknown"


class ServerStats:
    """All metrics of one server, in a registry of their own; each core has its series under a label `engine`."""

    def __init__(self, resolved: ResolvedConfig, cores: Sequence[ResolvedConfig]) -> None:
        """Make every series at once: one that is missing would read as unknown.

        Args:
            resolved: what the server refuses by.
            cores: what each core decided, in order of rank.
        """
        self._registry = CollectorRegistry()
        name = resolved.served_model_name
        rejections = Counter(
            "vllm:admission_rejections",
            "Refused with 503, by the valve that was full.",
            ("model_name", "reason"),
            registry=self._registry,
        )
        self._rejections = {reason: rejections.labels(name, reason) for reason in VALVES}
        families = _Families(self._registry)
        self.cores = tuple(CoreStats(families, name, rank) for rank in range(len(cores)))
        """In order of rank."""

        _export_config(self._registry, resolved)
        _export_cores(self._registry, cores)

    def observe_rejection(self, valve: str) -> None:
        """Count a request that a valve kept out."""
        self._rejections[valve].inc()

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Families:
    """The metrics that every core has a series of."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, _LABELS, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, (*_LABELS, *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, (*_LABELS, *labels), registry=registry, buckets=buckets)

        self.running = gauge("vllm:num_requests_running", "Requests in the running list.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests waiting for admission, preempted ones too.")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all of them.")
        self.preemptions = counter("vllm:num_preemptions", "Preemptions since the start.")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens prefilled, counted once a request.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.success = counter("vllm:request_success", "Requests ended, by reason.", "finished_reason")
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT_BUCKETS_S)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Gap between two tokens.", _ITL_BUCKETS_S)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Whole request.", _REQUEST_BUCKETS_S)
        self.queue = histogram("vllm:request_queue_time_seconds", "Wait for admission.", _REQUEST_BUCKETS_S)
        self.step_tokens = histogram("vllm:iteration_tokens_total", "Tokens in a step.", _STEP_TOKENS_BUCKETS)
        self.step_s = histogram(
            "engine:step_seconds", "A step in the model, by what it computed.", _STEP_BUCKETS_S, "kind"
        )
        self.step_context = counter("engine:context_tokens", "Tokens whose keys and values steps have read.")


class CoreStats:
    """One core's series."""

    def __init__(self, families: _Families, model_name: str, rank: int) -> None:
        labels = (model_name, str(rank))
        self._num_preemptions_seen = 0
        self._running = families.running.labels(*labels)
        self._waiting = families.waiting.labels(*labels)
        self._kv_usage = families.kv_usage.labels(*labels)
        self._preemptions = families.preemptions.labels(*labels)
        self._prompt_tokens = families.prompt_tokens.labels(*labels)
        self._generation_tokens = families.generation_tokens.labels(*labels)
        self._success = {reason: families.success.labels(*labels, reason.value) for reason in FinishReason}
        self._ttft = families.ttft.labels(*labels)
        self._itl = families.itl.labels(*labels)
        self._e2e = families.e2e.labels(*labels)
        self._queue = families.queue.labels(*labels)
        self._step_tokens = families.step_tokens.labels(*labels)
        self._step_s = {kind: families.step_s.labels(*labels, kind) for kind in _STEP_KINDS}
        self._step_context = families.step_context.labels(*labels)
        self._prefix_queries = families.prefix_queries.labels(*labels)
        self._prefix_hits = families.prefix_hits.labels(*labels)
        self._num_prefix_queries_seen = 0
        self._num_prefix_hits_seen = 0

    def observe_step(self, report: StepReport) -> None:
        """Take over how the core stands after a step."""
        self._running.set(report.num_running)
        self._waiting.set(report.num_waiting)
        self._kv_usage.set(report.kv_cache_usage)
        self._preemptions.inc(report.num_preemptions - self._num_preemptions_seen)
        self._num_preemptions_seen = report.num_preemptions
        self._prefix_queries.inc(report.num_prefix_queries_tokens - self._num_prefix_queries_seen)
        self._num_prefix_queries_seen = report.num_prefix_queries_tokens
        self._prefix_hits.inc(report.num_prefix_hits_tokens - self._num_prefix_hits_seen)
        self._num_prefix_hits_seen = report.num_prefix_hits_tokens
        self._generation_tokens.inc(len(report.token_ids))
        if report.num_step_tokens:
            self._step_tokens.observe(report.num_step_tokens)
            self._step_s[_step_kind(report)].observe(report.execute_s)
            self._step_context.inc(report.num_context_tokens)

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


def _step_kind(report: StepReport) -> str:
    if not report.num_decodes:
        return "prefill"
    return "mixed" if report.num_prefill_tokens else "decode"


def _export_cores(registry: CollectorRegistry, cores: Sequence[ResolvedConfig]) -> None:
    """What each core found on its own device: its KV cache and its memory."""
    _info(registry, "vllm:cache_config_info", "The KV cache in force.", map(_cache_labels, range(len(cores)), cores))
    gauge = Gauge(
        "engine:memory_bytes", "Where the memory of a core's device goes.", ("engine", "part"), registry=registry
    )
    for rank, resolved in enumerate(cores):
        memory = resolved.memory
        parts = {
            "total": memory.total_bytes,
            "free": memory.free_bytes,
            "requested": memory.requested_bytes,
            "weights": memory.weights_bytes,
            "activation_peak": memory.activation_peak_bytes,
            "request_buffers": memory.request_buffers_bytes,
            "non_torch": memory.non_torch_bytes,
            "graphs": memory.graph_bytes,
            "kv_cache": memory.kv_cache_bytes,
            "kv_block": resolved.kv_block_bytes,
        }
        for part, value in parts.items():
            gauge.labels(str(rank), part).set(value)


def _cache_labels(rank: int, resolved: ResolvedConfig) -> dict[str, object]:
    asked = resolved.asked
    return {
        "engine": rank,
        "num_gpu_blocks": resolved.num_gpu_blocks,
        "block_size": asked.block_size,
        "kv_cache_size_tokens": resolved.num_gpu_blocks * asked.block_size,
        "gpu_memory_utilization": asked.gpu_memory_utilization,
        "enable_prefix_caching": asked.enable_prefix_caching,
    }


def _export_config(registry: CollectorRegistry, resolved: ResolvedConfig) -> None:
    asked = resolved.asked
    config = {
        "model": asked.model,
        "served_model_name": resolved.served_model_name,
        "max_num_seqs": asked.max_num_seqs,
        "max_num_batched_tokens": asked.max_num_batched_tokens,
        "gpu_memory_utilization": asked.gpu_memory_utilization,
        "max_model_len": resolved.max_model_len,
        "enable_chunked_prefill": asked.enable_chunked_prefill,
        "enable_prefix_caching": asked.enable_prefix_caching,
        "enforce_eager": asked.enforce_eager,
        "long_prefill_token_threshold": asked.long_prefill_token_threshold,
        "max_num_active_seqs": asked.max_num_active_seqs or asked.max_num_seqs,
        "max_num_scheduled_tokens": asked.max_num_scheduled_tokens or asked.max_num_batched_tokens,
        "watermark": float(asked.watermark),
        "scheduler_reserve_full_isl": asked.scheduler_reserve_full_isl,
        "kv_cache_dtype": asked.kv_cache_dtype,
        "data_parallel_size": asked.data_parallel_size,
        "max_num_queued_reqs": asked.max_num_queued_reqs,
        "max_num_queued_tokens": asked.max_num_queued_tokens,
        "num_gpu_blocks_override": asked.num_gpu_blocks_override,
        "dtype": resolved.dtype,
        "device": resolved.device,
        "executor": asked.executor,
        "captures_graphs": resolved.captures_graphs,
        "version": engine_version(),
    }
    _info(registry, "engine:config_info", "The engine config in force.", [config])


def _info(registry: CollectorRegistry, name: str, text: str, rows: Iterable[dict[str, object]]) -> None:
    """A gauge of 1 for each row, which is what its labels say."""
    first, *others = rows
    gauge = Gauge(name, text, tuple(first), registry=registry)
    for row in (first, *others):
        gauge.labels(**{key: str(value) for key, value in row.items()}).set(1)
