"""From everything a stage saw to its record. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.load.log import LoadLog
from tuner.measure import latency, steady
from tuner.measure.cpu import OtherWork
from tuner.measure.latency import Window
from tuner.measure.memory import memory_figures
from tuner.measure.others import FEWEST_SCRAPES, foreign_ended, foreign_in_flight
from tuner.measure.past_fence import is_past_fence
from tuner.measure.prometheus import MetricsSnapshot, Number, increase
from tuner.measure.rate_judgement import arrivals_in, far_bounds
from tuner.measure.spec import StageSpec, Target
from tuner.measure.validity import Evidence, invalid_reasons
from tuner.records import EndedBy, Estimate, RequestRecord, StageRecord, StepFigures

_UNKNOWN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """How the stage went."""

    window: Window
    transient_s: float
    """Cut off between the end of warm-up and the window, because the stream of tokens had not settled yet."""

    ended_by: EndedBy
    is_filled: bool
    """Whether as many requests had ended by then as come in while one is served."""

    num_users_through: int
    """Users whose first request had ended when the window began."""

    before: MetricsSnapshot | None
    """Scraped as the window began; None: no answer."""

    after: MetricsSnapshot | None
    """Scraped as the window ended."""

    process_cpu_cores: tuple[float, ...] | None = None
    """CPU use of the engine's processes while it was measured; None: not ours to look at."""

    other_work: OtherWork | None = None
    """What others did on this machine meanwhile; None: the engine is not ours to look at."""

    def grown(self, counter: Callable[[MetricsSnapshot], Number | None]) -> Number | None:
        """How much one of the engine's counters grew over the window; None where that is unknown."""
        if self.before is None or self.after is None:
            return None
        return increase(counter(self.before), counter(self.after))


def settle(records: Sequence[RequestRecord], seen: Seen) -> list[RequestRecord]:
    """Mark what did not finish inside the window; in a stalled stage, what hung is a failure and counts."""
    if seen.ended_by == "stalled":
        given_up_s = math.nextafter(seen.window.end_s, 0.0)
        hung = {"unfinished": False, "error": "stalled: no token came any more", "finished_s": given_up_s}
        records = [record.model_copy(update=hung) if record.unfinished else record for record in records]
    return [record.model_copy(update={"warm_up": not seen.window.holds(record.finished_s)}) for record in records]


def mean_e2e_s(records: Sequence[RequestRecord]) -> float:
    """Mean duration of those that did not fail; 0 where there are none."""
    return _mean([latency.e2e_s(record) for record in records if record.error is None], empty=0.0)


def summarise(
    spec: StageSpec,
    target: Target,
    seen: Seen,
    log: LoadLog,
    *,
    records: Sequence[RequestRecord],
    samples: Sequence[MetricsSnapshot],
    device_peak_bytes: int | None,
) -> StageRecord:
    """Work out every figure of the stage and judge whether it is valid."""
    window = seen.window
    ended = [record for record in records if not record.warm_up]
    completed = [record for record in ended if record.error is None]
    inside = [sample for sample in samples if window.holds(sample.at_s)]
    kv_cache_usage_peak = _most([sample.kv_cache_usage for sample in inside])
    arrivals_s = latency.arrival_times_s(records, window)
    throughput = latency.rate_estimate(arrivals_s, window, correlation_s=mean_e2e_s(completed))
    trend = steady.has_trend(arrivals_s, window, tolerance=steady.UNSTEADY_TOLERANCE)
    evidence = _evidence(spec, seen, log, records=records, inside=inside, trend=trend)
    reasons = invalid_reasons(evidence)
    record = StageRecord(
        index=spec.index,
        kind=spec.kind,
        load=spec.load,
        loop=spec.workload.loop,
        thinks=spec.workload.thinks,
        fenced=False,
        **_arrivals(spec, log, window, records, completed),
        workload_hash=spec.workload.hash,
        warm_up_s=window.start_s,
        transient_s=seen.transient_s,
        measured_s=window.length_s,
        wall_s=window.end_s,
        ended_by=seen.ended_by,
        num_warm_up_requests=sum(record.finished_s < window.start_s for record in records),
        num_completed=evidence.num_completed,
        num_failed=evidence.num_failed,
        num_rejected=evidence.num_rejected,
        first_error=evidence.first_error,
        output_throughput=steady.widened(throughput) if seen.ended_by == "precise" else throughput,
        request_throughput_rps=len(completed) / window.length_s,
        **_latencies_ms(completed, records, window, are_dependent=spec.workload.loop == "open"),
        longest_stall_ms=_most([1e3 * record.longest_stall_s for record in completed]),
        mean_prompt_tokens=evidence.mean_prompt_tokens,
        mean_output_tokens=evidence.mean_output_tokens,
        mean_in_flight=evidence.mean_in_flight,
        littles_law_ratio=evidence.littles_law_ratio,
        send_slip_p95_ms=evidence.send_slip_p95_ms,
        send_slip_p99_ms=evidence.send_slip_p99_ms,
        num_left_out=_num_left_out(spec, target),
        mean_held_back=evidence.mean_held_back,
        loop_lag_p95_ms=evidence.loop_lag_p95_ms,
        client_cpu_share=evidence.client_cpu_share,
        client_events_per_s=evidence.client_events_per_s,
        num_preemptions=evidence.num_preemptions,
        kv_cache_usage_peak=kv_cache_usage_peak,
        mean_running=_mean_known([sample.running for sample in inside]),
        mean_waiting=_mean_known([sample.waiting for sample in inside]),
        mean_waiting_deferred=_mean_known([sample.waiting_deferred for sample in inside]),
        peak_running=_most([sample.running for sample in inside]),
        steps=_steps(seen),
        process_cpu_cores=seen.process_cpu_cores,
        other_cpu_cores=None if seen.other_work is None else seen.other_work.other_cores,
        idle_cpu_cores=None if seen.other_work is None else seen.other_work.idle_cores,
        memory=memory_figures(
            target.memory, kv_cache_usage_peak=kv_cache_usage_peak, device_peak_bytes=device_peak_bytes
        ),
        not_applicable=tuple(sorted(target.not_applicable & set(StageRecord.model_fields))),
        valid=not reasons,
        invalid_reasons=reasons,
    )
    return record.model_copy(update={"fenced": is_past_fence(record, spec.max_num_seqs)})


def _steps(seen: Seen) -> StepFigures | None:
    """What the engine's steps were like; None where it does not count them, or a scrape at an end failed."""
    if seen.before is None or seen.after is None or not seen.after.num_cores:
        return None
    steps, tokens = seen.grown(lambda metrics: metrics.steps), seen.grown(lambda metrics: metrics.step_tokens)
    between_s = seen.after.at_s - seen.before.at_s
    if not steps or tokens is None or between_s <= 0:
        return None
    model_s = seen.grown(lambda metrics: metrics.model_s)
    return StepFigures(
        mean_tokens=tokens / steps,
        per_s=steps / between_s / seen.after.num_cores,
        model_share=None if model_s is None else model_s / between_s / seen.after.num_cores,
    )


def _arrivals(
    spec: StageSpec,
    log: LoadLog,
    window: Window,
    records: Sequence[RequestRecord],
    completed: Sequence[RequestRecord],
) -> dict[str, float | int | None]:
    """What an open loop really sent and which rate that speaks for, by the fields of `StageRecord`."""
    if spec.workload.loop != "open":
        return {}
    seen = arrivals_in(log, window, [record.intended_s for record in records])
    far = far_bounds(completed, window, num_states=seen.num_states)
    return {
        "sent_rps": seen.sent_rps,
        "num_states": seen.num_states,
        "shown_rps": min(spec.load, seen.sent_rps) * seen.share_shown,
        "ttft_p95_far_ms": far.ttft_p95_ms,
        "itl_p95_far_ms": far.itl_p95_ms,
    }


def _latencies_ms(
    completed: Sequence[RequestRecord], records: Sequence[RequestRecord], window: Window, *, are_dependent: bool
) -> dict[str, Estimate]:
    """Every percentile of `StageRecord` by its field name; requests of an open loop depend on those before."""
    completed = sorted(completed, key=latency.by_time)
    of = latency.dependent_percentile if are_dependent else latency.percentile
    samples = {
        "ttft": [latency.ttft_s(record) for record in completed],
        "tpot": [tpot for record in completed if (tpot := latency.tpot_s(record)) is not None],
        "e2e": [latency.e2e_s(record) for record in completed],
    }
    found: dict[str, Estimate] = {}
    for name, q in (("p50", 0.5), ("p95", 0.95)):
        gaps = latency.itl_percentile(records, window, q, are_dependent=are_dependent)
        found[f"itl_{name}_ms"] = latency.scaled(gaps, 1e3)
        for metric, values in samples.items():
            found[f"{metric}_{name}_ms"] = latency.scaled(of(values, q), 1e3)
    return found


def _evidence(
    spec: StageSpec,
    seen: Seen,
    log: LoadLog,
    *,
    records: Sequence[RequestRecord],
    inside: Sequence[MetricsSnapshot],
    trend: bool,
) -> Evidence:
    window = seen.window
    ended = [record for record in records if not record.warm_up]
    completed = [record for record in ended if record.error is None]
    failures = [record for record in ended if record.error is not None and not record.rejected]
    mean_in_flight = log.in_flight.mean(window.start_s, window.end_s)
    shares = [log.sent[record.index].shared_share for record in completed]
    sent_tokens = [log.sent[record.index].num_tokens for record in completed]
    lags_ms = [1e3 * lag_s for at_s, lag_s in log.loop_lags if window.holds(at_s)]
    return Evidence(
        load=spec.load,
        loop=spec.workload.loop,
        thinks=spec.workload.thinks,
        has_an_end=spec.has_an_end,
        ended_by=seen.ended_by,
        measured_s=window.length_s,
        num_users_through=seen.num_users_through,
        is_filled=seen.is_filled,
        trend=trend,
        ttft_drifts=steady.drifts([latency.ttft_s(record) for record in sorted(completed, key=_end)]),
        num_completed=len(completed),
        num_failed=len(failures),
        num_rejected=sum(record.rejected for record in ended),
        first_error=next((record.error for record in [*failures, *records] if record.error is not None), None),
        num_estimated=sum(record.token_source == "chunks" for record in completed),
        sent_prompt_tokens=_mean(sent_tokens),
        shared_prompt_share=float(np.average(shares, weights=sent_tokens)) if shares else 0.0,
        shared_prompt_share_error=2 * float(np.std(shares)) / len(shares) ** 0.5 if shares else 0.0,
        mean_prompt_tokens=_mean([record.num_prompt_tokens for record in completed]),
        asked_output_tokens=_mean([record.asked_output_tokens for record in completed]),
        mean_output_tokens=_mean([record.num_output_tokens for record in completed]),
        prefix_queries=seen.grown(lambda metrics: metrics.prefix_queries),
        prefix_hits=seen.grown(lambda metrics: metrics.prefix_hits),
        num_preemptions=seen.grown(lambda metrics: metrics.preemptions),
        mean_in_flight=mean_in_flight,
        littles_law_ratio=steady.littles_law_ratio(completed, window, mean_in_flight=mean_in_flight),
        mean_e2e_s=mean_e2e_s(completed),
        engine_in_flight=_engine_in_flight(inside),
        foreign_in_flight=foreign_in_flight(inside, log),
        foreign_ended=foreign_ended(seen.before, seen.after, records),
        send_slip_p95_ms=latency.percentile(_slips_ms(records, window), 0.95).value,
        send_slip_p99_ms=latency.percentile(_slips_ms(records, window), 0.99).value,
        mean_held_back=log.mean_held_back(window.start_s, window.end_s),
        loop_lag_p95_ms=latency.percentile(lags_ms, 0.95).value,
        client_cpu_share=log.cpu_share(window.start_s, window.end_s),
        client_events_per_s=log.event_rate(window.start_s, window.end_s),
        limits=spec.limits,
        ttft_p95_ms=latency.percentile([1e3 * latency.ttft_s(record) for record in completed], 0.95).value,
        itl_p50_ms=1e3 * latency.itl_percentile(records, window, 0.5).value,
    )


def _slips_ms(records: Sequence[RequestRecord], window: Window) -> list[float]:
    """How late each request of the window left."""
    return [1e3 * (record.sent_s - record.intended_s) for record in records if window.holds(record.intended_s)]


def _num_left_out(spec: StageSpec, target: Target) -> int:
    trace = spec.workload.fitting_trace(target.max_model_len)
    return 0 if trace is None else trace.num_left_out


def _engine_in_flight(samples: Sequence[MetricsSnapshot]) -> float | None:
    """Mean of running and waiting as the engine said; None where too few scrapes say both."""
    counts = [
        sample.running + sample.waiting
        for sample in samples
        if sample.running is not None and sample.waiting is not None
    ]
    return _mean(counts) if len(counts) >= FEWEST_SCRAPES else None


def _end(record: RequestRecord) -> float:
    return record.finished_s


def _mean(values: Sequence[float], *, empty: float = _UNKNOWN) -> float:
    return float(np.mean(values)) if values else empty


def _mean_known(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _most(values: Sequence[Number | None]) -> Number | None:
    return max((value for value in values if value is not None), default=None)
