"""AIPerf's `profile_export_aiperf.json`, schema 1: one run, so one stage; a sweep writes one a folder.

The load stands in `input_config.phases`, in the phase that is not left out of the results. Latencies are in `ms`.
`inter_token_latency` is a mean over each request; `inter_chunk_latency` is over all gaps, and is ITL only where every
chunk brought one token. Metrics that never occurred, such as `error_request_count`, are not written.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.elsewhere.document import Document
from tuner.elsewhere.stage import Axis, ElsewhereStage
from tuner.inputs import InputError

NO_ITL = (
    "AIPerf's inter_token_latency is a mean over each request, so p95 ITL is unknown where chunks hold several tokens"
)
_ONE_TOKEN_A_CHUNK = 0.02
"""Share by which the chunks may differ from the tokens."""


def is_export(data: Mapping[str, object]) -> bool:
    """Whether this is the export of one run."""
    return "input_config" in data and "output_token_throughput" in data


def is_sweep(data: Mapping[str, object]) -> bool:
    """Whether this is AIPerf's own summary of several runs, which has no percentiles of a single run."""
    return "aggregation_type" in data or "per_combination_metrics" in data


def stage(export: Document) -> ElsewhereStage:
    """The run as a stage.

    Raises:
        InputError: where its load cannot be told, or a metric has another unit than `ms` or `tokens/sec`.
    """
    axis, load, cap = _load(export)
    return ElsewhereStage(
        source=export.where,
        axis=axis,
        load=load,
        output_throughput=_metric(export, "output_token_throughput", "tokens/sec").number("avg"),
        request_throughput_rps=_value(export, "request_throughput", "avg", "requests/sec"),
        mean_in_flight=_value(export, "effective_concurrency", "avg", "requests"),
        mean_e2e_ms=_value(export, "request_latency", "avg", "ms"),
        ttft_p95_ms=_value(export, "time_to_first_token", "p95", "ms"),
        itl_p95_ms=_value(export, "inter_chunk_latency", "p95", "ms") if _one_token_a_chunk(export) else None,
        e2e_p95_ms=_value(export, "request_latency", "p95", "ms"),
        num_completed=_count(export, "request_count"),
        num_failed=_count(export, "error_request_count") or 0,
        cap=cap,
        unfit=_unfit(export),
    )


def _load(export: Document) -> tuple[Axis, float, float | None]:
    phases = export.at("input_config").objects("phases")
    counted = [
        phase for phase in phases if not phase.data.get("exclude_from_results") and phase.text("kind") != "warmup"
    ]
    if len(counted) != 1:
        raise InputError(f"{export.where}: input_config.phases has {len(counted)} measured phases, a stage is one")
    phase = counted[0]
    match phase.text("type"):
        case "concurrency":
            return Axis.CONCURRENCY, phase.number("concurrency"), None
        case "poisson" | "constant" | "gamma":
            rate = phase.number("rate", otherwise="a rate that changes during a run is no load")
            return Axis.REQUEST_RATE, rate, phase.maybe("concurrency")
        case other:
            known = "concurrency, constant, gamma, poisson"
            raise InputError(f"{phase.where}: type is {other!r}: no load to be read from it. Known: {known}")


def _unfit(export: Document) -> tuple[str, ...]:
    if export.data.get("was_cancelled") is True:
        return ("the run was cancelled",)
    if export.data.get("is_complete") is False:
        return (f"the run is incomplete: {export.text('incomplete_reason') or 'no reason given'}",)
    return ()


def _one_token_a_chunk(export: Document) -> bool:
    gaps = _value(export, "inter_chunk_latency", "count", "ms")
    tokens, requests = _value(export, "total_osl", "avg", "tokens"), _value(export, "request_count", "avg", "requests")
    if gaps is None or tokens is None or requests is None:
        return False
    return abs(gaps - (tokens - requests)) <= _ONE_TOKEN_A_CHUNK * tokens


def _metric(export: Document, key: str, unit: str) -> Document:
    metric = export.at(key)
    if metric.text("unit") != unit:
        raise InputError(f"{metric.where}: unit is {metric.text('unit')!r}, not {unit!r}")
    return metric


def _value(export: Document, key: str, statistic: str, unit: str) -> float | None:
    return None if export.data.get(key) is None else _metric(export, key, unit).maybe(statistic)


def _count(export: Document, key: str) -> int | None:
    value = _value(export, key, "avg", "requests")
    return None if value is None else round(value)
