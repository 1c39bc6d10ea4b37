"""Reads an engine's /metrics: vLLM's names, old and new, and what our own engine adds to them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Self, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tuner.load.connection import Connection, Endpoint, connect, fetch_text

_RUNNING = ("vllm:num_requests_running",)
_WAITING = ("vllm:num_requests_waiting",)
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_PREEMPTIONS = ("vllm:num_preemptions_total",)
_PROMPT_TOKENS = ("vllm:prompt_tokens_total",)
_GENERATION_TOKENS = ("vllm:generation_tokens_total",)
_PREFIX_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_PREFIX_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_STEPS = ("vllm:iteration_tokens_total_count",)
_STEP_TOKENS = ("vllm:iteration_tokens_total_sum",)
_MODEL_S = ("engine:step_seconds_sum",)
_ENDED = ("vllm:request_success_total",)
_WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
_SNAPSHOT_NAMES = (
    *(*_RUNNING, *_WAITING, *_KV_USAGE, *_PREEMPTIONS),
    *(*_PROMPT_TOKENS, *_GENERATION_TOKENS, *_PREFIX_QUERIES, *_PREFIX_HITS),
    *(*_STEPS, *_STEP_TOKENS, *_MODEL_S, *_ENDED, _WAITING_BY_REASON),
)

_MEMORY_BYTES = "engine:memory_bytes"
_BLOCK_PART = "kv_block"
"""The size of one block, which is the same for all engines; the other parts are amounts."""

_SCRAPE_INTERVAL_S = 0.2
_SCRAPE_TIMEOUT_S = 2.0

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """One scrape, all engines of the server together. None: the server did not say."""

    at_s: float
    """When the answer arrived, in seconds from the origin that the reader was given."""

    running: int | None
    waiting: int | None
    kv_cache_usage: float | None
    """0 to 1; of several engines the fullest."""

    preemptions: int | None
    prompt_tokens: int | None
    generation_tokens: int | None
    prefix_queries: int | None
    prefix_hits: int | None
    waiting_deferred: int | None = None
    """Of those waiting, the ones that wait for something else than room."""

    requests_ended: int | None = None
    """Since the start, without those whose client went away."""

    num_cores: int | None = None
    """How many engine cores count steps."""

    steps: int | None = None
    """Steps since the start, all cores together."""

    step_tokens: int | None = None
    """Tokens that those steps computed."""

    model_s: float | None = None
    """Seconds that the steps took in the model, all cores together."""


def increase(before: Number | None, after: Number | None) -> Number | None:
    """How much a counter grew; None where either end is unknown or the counter was reset in between."""
    if before is None or after is None or after < before:
        return None
    return after - before


def parse_snapshot(text: str, *, at_s: float) -> MetricsSnapshot:
    """Read a page. Several engines' gauges and counters are summed; of a name's old and new spelling one is read."""
    values: dict[str, list[float]] = {}
    for sample in _samples(text, _SNAPSHOT_NAMES):
        if sample.labels.get("finished_reason") == "abort":
            continue
        deferred = sample.name == _WAITING_BY_REASON and sample.labels.get("reason") == "deferred"
        values.setdefault("deferred" if deferred else sample.name, []).append(sample.value)

    def series(names: tuple[str, ...]) -> list[float] | None:
        return next((values[name] for name in names if name in values), None)

    def total(names: tuple[str, ...]) -> int | None:
        found = series(names)
        return None if found is None else round(sum(found))

    usage, steps, model_s = series(_KV_USAGE), series(_STEPS), series(_MODEL_S)
    return MetricsSnapshot(
        at_s=at_s,
        running=total(_RUNNING),
        waiting=total(_WAITING),
        kv_cache_usage=None if usage is None else max(usage),
        preemptions=total(_PREEMPTIONS),
        prompt_tokens=total(_PROMPT_TOKENS),
        generation_tokens=total(_GENERATION_TOKENS),
        prefix_queries=total(_PREFIX_QUERIES),
        prefix_hits=total(_PREFIX_HITS),
        waiting_deferred=total(("deferred",)),
        requests_ended=total(_ENDED),
        num_cores=None if steps is None else len(steps),
        steps=total(_STEPS),
        step_tokens=total(_STEP_TOKENS),
        model_s=None if model_s is None else sum(model_s),
    )


def read_infos(text: str, name: str) -> list[dict[str, str]]:
    """The labels of an info metric such as `vllm:cache_config_info`, of each engine; empty where it is not there."""
    return [dict(sample.labels) for sample in _samples(text, (name,))]


def read_memory_bytes(text: str) -> dict[str, int]:
    """Our engine's `engine:memory_bytes` by its label `part`, all engines together; empty for one without it."""
    parts: dict[str, int] = {}
    for sample in _samples(text, (_MEMORY_BYTES,)):
        part, size = sample.labels["part"], round(sample.value)
        parts[part] = size if part == _BLOCK_PART else parts.get(part, 0) + size
    return parts


def _samples(text: str, names: Iterable[str]) -> Iterable[Sample]:
    # Only these lines are parsed: a page has hundreds, a parser takes 10 us for each, and the load generator
    # whose clock it would hold up shares this thread.
    starts = tuple(name + end for name in names for end in ("{", " "))
    kept = "\n".join(line for line in text.splitlines() if line.startswith(starts)) + "\n"
    for family in text_string_to_metric_families(kept):
        yield from family.samples


class Scraper:
    """Scrapes an engine five times a second while it is entered; what it saw is in `samples`.

    A scrape that fails is missing and the next one tried: it makes a figure unknown, it does not end a stage.
    """

    def __init__(self, endpoint: Endpoint, *, origin_s: float) -> None:
        self.samples: list[MetricsSnapshot] = []
        self._endpoint = endpoint
        self._origin_s = origin_s
        self._connection: Connection | None = None
        self._busy = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._connection is not None:
            self._connection.abort()

    async def scrape(self) -> MetricsSnapshot | None:
        """Scrape now; None where the engine does not answer within two seconds."""
        async with self._busy:
            try:
                if self._connection is None or not self._connection.is_open:
                    self._connection = await connect(self._endpoint)
                text = await fetch_text(self._connection, self._endpoint, "/metrics", timeout_s=_SCRAPE_TIMEOUT_S)
            except OSError:
                return None
        snapshot = parse_snapshot(text, at_s=perf_counter() - self._origin_s)
        self.samples.append(snapshot)
        return snapshot

    async def _run(self) -> None:
        due_s = perf_counter()
        while True:
            await self.scrape()
            due_s = max(due_s + _SCRAPE_INTERVAL_S, perf_counter())
            await asyncio.sleep(due_s - perf_counter())
