"""Reads an engine's /metrics: by vLLM's names and what our own engine adds to them, or by those of another engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from types import TracebackType
from typing import Self, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tuner.frozen import Record
from tuner.load.connection import Connection, Endpoint, connect, fetch_text


class MetricNames(Record):
    """What an engine's page calls each figure: of several spellings the first that is there is read; none: not told."""

    running: tuple[str, ...] = ()
    """Gauge: requests that run."""

    waiting: tuple[str, ...] = ()
    """Gauge: requests in the queue."""

    kv_cache_usage: tuple[str, ...] = ()
    """Gauge, 0 to 1."""

    preemptions: tuple[str, ...] = ()
    prompt_tokens: tuple[str, ...] = ()
    generation_tokens: tuple[str, ...] = ()
    prefix_queries: tuple[str, ...] = ()
    """Counter: prompt tokens that were looked up in the prefix cache."""

    prefix_hits: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    """Counter: steps of the engine's core."""

    step_tokens: tuple[str, ...] = ()
    """Counter: tokens that those steps computed."""

    model_s: tuple[str, ...] = ()
    """Counter: seconds of them in the model."""

    requests_ended: tuple[str, ...] = ()
    """Counter: requests that were answered to their end; those with the label `finished_reason="abort"` were not."""

    waiting_by_reason: tuple[str, ...] = ()
    """Gauge with the label `reason`; those `deferred` wait for something else than room."""

    @cached_property
    def all(self) -> tuple[str, ...]:
        """Every name there is to look for."""
        return tuple(name for field in type(self).model_fields for name in getattr(self, field))


VLLM_METRICS = MetricNames(
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    kv_cache_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    preemptions=("vllm:num_preemptions_total",),
    prompt_tokens=("vllm:prompt_tokens_total",),
    generation_tokens=("vllm:generation_tokens_total",),
    prefix_queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    prefix_hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    steps=("vllm:iteration_tokens_total_count",),
    step_tokens=("vllm:iteration_tokens_total_sum",),
    model_s=("engine:step_seconds_sum",),
    requests_ended=("vllm:request_success_total",),
    waiting_by_reason=("vllm:num_requests_waiting_by_reason",),
)
"""Old spellings and new; our own engine speaks the same, and adds its own."""

_MEMORY_BYTES = "engine:memory_bytes"
_BLOCK_PART = "kv_block"
"""The size of one block, which is the same for all engines; the other parts are amounts."""

_SCRAPE_INTERVAL_S = 0.2
_SCRAPE_TIMEOUT_S = 2.0
_END_TIMEOUT_S = 10.0

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


def parse_snapshot(text: str, names: MetricNames = VLLM_METRICS, *, at_s: float) -> MetricsSnapshot:
    """Read a page. Several engines' gauges and counters are summed; of a name's old and new spelling one is read."""
    values: dict[str, list[float]] = {}
    for sample in _samples(text, names.all):
        if sample.labels.get("finished_reason") == "abort":
            continue
        deferred = sample.name in names.waiting_by_reason and sample.labels.get("reason") == "deferred"
        values.setdefault("deferred" if deferred else sample.name, []).append(sample.value)

    def series(spellings: tuple[str, ...]) -> list[float] | None:
        return next((values[name] for name in spellings if name in values), None)

    def total(spellings: tuple[str, ...]) -> int | None:
        found = series(spellings)
        return None if found is None else round(sum(found))

    usage, steps, model_s = series(names.kv_cache_usage), series(names.steps), series(names.model_s)
    return MetricsSnapshot(
        at_s=at_s,
        running=total(names.running),
        waiting=total(names.waiting),
        kv_cache_usage=None if usage is None else max(usage),
        preemptions=total(names.preemptions),
        prompt_tokens=total(names.prompt_tokens),
        generation_tokens=total(names.generation_tokens),
        prefix_queries=total(names.prefix_queries),
        prefix_hits=total(names.prefix_hits),
        waiting_deferred=total(("deferred",)),
        requests_ended=total(names.requests_ended),
        num_cores=None if steps is None else len(steps),
        steps=total(names.steps),
        step_tokens=total(names.step_tokens),
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

    def __init__(self, endpoint: Endpoint, names: MetricNames = VLLM_METRICS, *, origin_s: float) -> None:
        self.samples: list[MetricsSnapshot] = []
        self._endpoint = endpoint
        self._names = names
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

    async def scrape_end(self) -> MetricsSnapshot | None:
        """Scrape at an end of a window, and once more if that fails: without it no counter of the stage is known.

        None where the engine does not answer within ten seconds, which a machine out of breath may need for a page.
        """
        return await self.scrape(timeout_s=_END_TIMEOUT_S) or await self.scrape(timeout_s=_SCRAPE_TIMEOUT_S)

    async def scrape(self, *, timeout_s: float = _SCRAPE_TIMEOUT_S) -> MetricsSnapshot | None:
        """Scrape now; None where the engine does not answer in time."""
        async with self._busy:
            try:
                if self._connection is None or not self._connection.is_open:
                    self._connection = await connect(self._endpoint)
                text = await fetch_text(self._connection, self._endpoint, "/metrics", timeout_s=timeout_s)
            except OSError:
                return None
        snapshot = parse_snapshot(text, self._names, at_s=perf_counter() - self._origin_s)
        self.samples.append(snapshot)
        return snapshot

    async def _run(self) -> None:
        due_s = perf_counter()
        while True:
            await self.scrape()
            due_s = max(due_s + _SCRAPE_INTERVAL_S, perf_counter())
            await asyncio.sleep(due_s - perf_counter())
