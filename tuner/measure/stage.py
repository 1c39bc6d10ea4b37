"""Measures one stage: hold a load, wait until it is steady, measure until it is known well enough."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass

from tuner.load.generator import ClosedLoop
from tuner.measure import latency, saturation, stall, steady
from tuner.measure.cpu import cores_used, cpu_times, other_work
from tuner.measure.latency import Window
from tuner.measure.load import Generator, check_prompt_lengths, load_on
from tuner.measure.memory import PssSampler
from tuner.measure.prometheus import MetricsSnapshot, Scraper
from tuner.measure.rate_judgement import is_settled
from tuner.measure.spec import StageSpec, Target
from tuner.measure.summary import Seen, mean_e2e_s, settle, summarise
from tuner.measure.transient import transient_end_s
from tuner.records import EndedBy, RequestRecord, StageRecord

__all__ = ["MeasuredStage", "StageSpec", "Target", "measure_stage"]

_POLL_S = 0.1
_RECENT_REQUESTS = 20
"""More than half of this many latest requests failed: the stage is hopeless and ends."""


FEWEST_OF_FIRST_WAVE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStage:
    """A stage's record and everything it was made from."""

    record: StageRecord
    requests: tuple[RequestRecord, ...]
    samples: tuple[MetricsSnapshot, ...]


async def measure_stage(spec: StageSpec, target: Target) -> MeasuredStage:
    """Put the load on, measure, take it off again; whatever the server does, in bounded time.

    Raises:
        WorkloadError: where the workload does not fit the engine's `max_model_len` (nothing has been sent then), or
            the server counts its prompts otherwise than they were meant.
    """
    generator = await load_on(spec, target)
    async with AsyncExitStack() as stack:
        stack.enter_context(_old_objects_left_alone())
        pss = await stack.enter_async_context(PssSampler(target.root_pid))
        await stack.enter_async_context(generator)
        scraper = Scraper(target.endpoint, target.metrics, origin_s=generator.log.origin_s)
        await stack.enter_async_context(scraper)
        seen = await _Watch(spec, generator, scraper, root_pid=target.root_pid).run()
    records = settle(generator.log.records, seen)
    record = summarise(
        spec, target, seen, generator.log, records=records, samples=scraper.samples, device_peak_bytes=pss.peak_bytes
    )
    return MeasuredStage(record=record, requests=tuple(records), samples=tuple(scraper.samples))


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Whatever exists now is not looked through by the garbage collector.

    A full collection takes 20 ms and more where numpy and pandas are loaded, and no token is stamped meanwhile.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Successes:
    """Counts requests that ended well since a moment; a look costs what is new, however long the stage."""

    def __init__(self, records: Sequence[RequestRecord], *, since_s: float) -> None:
        self.count = 0
        self._records = records
        self._since_s = since_s
        self._num_seen = 0
        self._sum_s = 0.0

    def mean_e2e_s(self) -> float:
        """Mean duration up to now; 0 where there is none."""
        for record in self._records[self._num_seen :]:
            self._num_seen += 1
            if record.error is None and not record.unfinished and record.finished_s >= self._since_s:
                self.count += 1
                self._sum_s += latency.e2e_s(record)
        return self._sum_s / self.count if self.count else 0.0


class _Watch:
    """Looks at the load ten times a second and decides when the window begins and ends."""

    def __init__(self, spec: StageSpec, generator: Generator, scraper: Scraper, *, root_pid: int | None) -> None:
        self._spec = spec
        self._generator = generator
        self._log = generator.log
        self._scraper = scraper
        self._root_pid = root_pid

    async def run(self) -> Seen:
        """Warm up, measure, and say how it went."""
        stopped = None if self._spec.has_an_end else await self._warm_up()
        check_prompt_lengths(self._log)
        num_users_through, is_filled = self._first_wave(0.0)[0], self._is_filled()
        before = None if stopped else await self._scraper.scrape_end()
        cpu_before, cpu_from_s = await asyncio.to_thread(cpu_times, self._root_pid), self._log.now_s()
        warm_s = 0.0 if self._spec.has_an_end else self._log.now_s()
        ended_by = stopped or await self._measure(warm_s)
        span = Window(warm_s, max(self._log.now_s(), warm_s + 1e-3))
        window, before = (span, before) if self._spec.has_an_end else self._settled(span, before)
        cpu_after, cpu_to_s = await asyncio.to_thread(cpu_times, self._root_pid), self._log.now_s()
        after = None if ended_by == "stalled" else await self._scraper.scrape_end()
        if ended_by == "time" and self._never_moved(warm_s):
            ended_by = "stalled"
        return Seen(
            window=window,
            transient_s=window.start_s - warm_s,
            ended_by=ended_by,
            is_filled=is_filled,
            num_users_through=num_users_through,
            before=before,
            after=after,
            process_cpu_cores=cores_used(cpu_before, cpu_after, elapsed_s=cpu_to_s - cpu_from_s),
            other_work=other_work(cpu_before, cpu_after, elapsed_s=cpu_to_s - cpu_from_s),
        )

    async def _warm_up(self) -> EndedBy | None:
        ended = _Successes(self._log.records, since_s=0.0)
        while self._log.now_s() < self._spec.max_warm_up_s:
            await asyncio.sleep(_POLL_S)
            if stopped := self._hopeless():
                return stopped
            now_s, request_s = self._log.now_s(), ended.mean_e2e_s()
            num_through, num_needed = self._first_wave(request_s)
            if steady.is_warm(
                load=num_needed,
                num_users_through=num_through,
                times_s=self._log.events_since(now_s - request_s),
                now_s=now_s,
                request_s=request_s,
            ):
                return None
        return None

    def _first_wave(self, request_s: float) -> tuple[int, int]:
        """How many requests of the first wave have ended, and how many there are.

        A closed loop's is one request of every user; an open loop's is what comes while one request is served, since
        until then fewer are in flight than later.
        """
        if isinstance(self._generator, ClosedLoop):
            return self._generator.num_users_through, self._generator.load
        return len(self._log.records), max(FEWEST_OF_FIRST_WAVE, math.ceil(self._spec.load * request_s))

    def _is_filled(self) -> bool:
        """Whether as many requests have ended as come in while one is served: before, the engine still fills."""
        if self._spec.workload.loop != "open" or self._spec.has_an_end:
            return True
        # While none has ended, how long one takes is not known.
        return 0 < len(self._log.records) >= self._spec.load * mean_e2e_s(self._log.records)

    async def _measure(self, start_s: float) -> EndedBy:
        looks, saturation_looks = steady.Looks(self._spec.min_s), steady.Looks(saturation.FEWEST_S)
        ended = _Successes(self._log.records, since_s=start_s)
        while (elapsed_s := self._log.now_s() - start_s) < self._spec.max_s:
            await asyncio.sleep(min(_POLL_S, self._spec.max_s - elapsed_s))
            if stopped := self._hopeless():
                return stopped
            if self._spec.has_an_end:
                if self._generator.is_done:
                    return "complete"
                continue
            span = Window(start_s, self._log.now_s())
            if self._is_oversaturated(span, saturation_looks):
                return "oversaturated"
            if self._knows_enough(span, looks, ended):
                return "precise"
        return "time"

    def _is_oversaturated(self, span: Window, looks: steady.Looks) -> bool:
        # However long a request takes by now: that is what grows.
        if self._spec.workload.loop != "open" or not looks.is_due(span.length_s, request_s=0.0):
            return False
        return saturation.is_oversaturated(self._log, span)

    def _settled(self, span: Window, before: MetricsSnapshot | None) -> tuple[Window, MetricsSnapshot | None]:
        """The part of `span` after its transient, and the scrape it begins with: it begins with one, or is all."""
        request_s = mean_e2e_s(latency.finished_inside(self._log.records, span))
        settled_s = transient_end_s(self._log.events_since(span.start_s), span, request_s=request_s)
        first = next((sample for sample in self._scraper.samples if sample.at_s >= settled_s), None)
        if first is None or settled_s == span.start_s or first.at_s >= (span.start_s + span.end_s) / 2:
            return span, before
        return Window(first.at_s, span.end_s), first

    def _knows_enough(self, span: Window, looks: steady.Looks, ended: _Successes) -> bool:
        request_s = ended.mean_e2e_s()
        if ended.count < self._spec.min_requests or not looks.is_due(span.length_s, request_s=request_s):
            return False
        window, _ = self._settled(span, None)
        settled = [record for record in latency.finished_inside(self._log.records, window) if record.error is None]
        if len(settled) < self._spec.min_requests:
            return False
        # Events, not tokens: counting tokens means parsing every stream in flight. The two are proportional.
        rate = latency.rate_estimate(self._log.events_since(window.start_s), window, correlation_s=request_s)
        if not steady.is_precise(rate, target_relative_half_width=self._spec.target_relative_half_width):
            return False
        return not self._is_judgement_open(settled, window)

    def _is_judgement_open(self, settled: Sequence[RequestRecord], window: Window) -> bool:
        limits = self._spec.limits
        if limits is None:
            return False
        if self._spec.workload.loop == "open":
            return not is_settled(self._log, settled, window, limits)
        ttft_ms = latency.percentile([1e3 * latency.ttft_s(record) for record in settled], 0.95)
        itl_ms = latency.scaled(latency.itl_percentile(settled, window, 0.95), 1e3)
        return steady.is_open(ttft_ms, limits.ttft_p95_ms) or steady.is_open(itl_ms, limits.itl_p95_ms)

    def _hopeless(self) -> EndedBy | None:
        self._generator.check()
        recent = self._log.records[-_RECENT_REQUESTS:]
        num_failed = sum(record.error is not None and not record.rejected for record in recent)
        if len(recent) == _RECENT_REQUESTS and num_failed > _RECENT_REQUESTS / 2:
            return "failures"
        now_s = self._log.now_s()
        last_event_s = self._log.event_times_s[-1] if self._log.event_times_s else 0.0
        if now_s - last_event_s < self._spec.stall_s or self._log.num_in_flight == 0:
            return None
        samples = self._scraped_since(now_s - self._spec.stall_s)
        has_moved = stall.moved(samples)
        # A server may say that it is idle only because its core does not report any more: while requests of ours are in
        # flight, that excuses nobody whose counters stand still.
        excused = has_moved or (has_moved is None and stall.is_idle(samples))
        return None if excused else "stalled"

    def _never_moved(self, start_s: float) -> bool:
        """Whether no request of the stage got an answer, and the engine says it has work and does none of it.

        A stage shorter than `stall_s` ends before silence alone means anything; the engine's own word does.
        """
        silent = not self._log.event_times_s and not self._log.records and self._log.num_in_flight > 0
        return silent and stall.is_stuck(self._scraped_since(start_s))

    def _scraped_since(self, at_s: float) -> list[MetricsSnapshot]:
        return [sample for sample in self._scraper.samples if sample.at_s >= at_s]
