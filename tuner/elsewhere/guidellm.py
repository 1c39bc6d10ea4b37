"""GuideLLM's `benchmarks.json`, version 2 of its report: a list of benchmarks, each one stage.

`config.strategy.type_` says what the load is: `concurrent` (its `streams`), `synchronous` (a closed loop of one),
`constant` and `poisson` (their `rate`), `throughput` (unlimited). Latencies are in seconds unless their key ends in
`_ms`. `inter_token_latency_ms` is a mean over each request, so its p95 is none of ITL, which stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tuner.elsewhere.document import Document
from tuner.elsewhere.stage import Axis, ElsewhereStage
from tuner.inputs import InputError

VERSION = 2
NO_ITL = "GuideLLM's inter_token_latency_ms is a mean over each request, so p95 ITL is unknown"


def is_report(data: Mapping[str, object]) -> bool:
    """Whether this is a whole report."""
    return "benchmarks" in data and "metadata" in data


def stages(report: Document) -> list[ElsewhereStage]:
    """One stage a benchmark. The closed loop of one that a sweep over rates begins with is left out.

    Raises:
        InputError: for another version of the report, or a key that is missing.
    """
    version = report.at("metadata").maybe("version")
    if version != VERSION:
        raise InputError(
            f"{report.where}: version {version} of GuideLLM's report; this reads version {VERSION} (0.4 on)"
        )
    found = [_stage(benchmark) for benchmark in report.objects("benchmarks")]
    alone = [stage for stage in found if stage.axis is Axis.CONCURRENCY and stage.load == 1]
    paced = any(stage.axis is Axis.REQUEST_RATE and math.isfinite(stage.load) for stage in found)
    return [stage for stage in found if stage not in alone] if paced and len(alone) == 1 else found


def _stage(benchmark: Document) -> ElsewhereStage:
    axis, load = _load(benchmark.at("config").at("strategy"))
    metrics = benchmark.at("metrics")
    totals = metrics.at("request_totals")
    scheduled = metrics.data.get("request_scheduled_latency") is not None
    latency = _successful(metrics, "request_scheduled_latency" if scheduled else "request_latency")
    return ElsewhereStage(
        source=benchmark.where,
        axis=axis,
        load=load,
        output_throughput=metrics.at("output_tokens_per_second").at("total").number("mean"),
        request_throughput_rps=_mean(_successful(metrics, "requests_per_second")),
        mean_in_flight=metrics.at("request_concurrency").at("total").maybe("mean"),
        ttft_p95_ms=_p95(_successful(metrics, "time_to_first_token_ms")),
        e2e_p95_ms=_times(1000, _p95(latency)),
        num_completed=totals.count("successful"),
        num_failed=totals.count("errored"),
        cap=benchmark.at("config").at("strategy").maybe("max_concurrency") if axis is Axis.REQUEST_RATE else None,
    )


def _load(strategy: Document) -> tuple[Axis, float]:
    match strategy.text("type_"):
        case "synchronous":
            return Axis.CONCURRENCY, 1.0
        case "concurrent":
            return Axis.CONCURRENCY, strategy.number("streams")
        case "constant" | "poisson":
            return Axis.REQUEST_RATE, strategy.number("rate")
        case "throughput":
            return Axis.REQUEST_RATE, math.inf
        case other:
            known = "synchronous, concurrent, constant, poisson, throughput"
            raise InputError(f"{strategy.where}: type_ is {other!r}: no load to be read from it. Known: {known}")


def _successful(metrics: Document, key: str) -> Document | None:
    """The distribution over requests that succeeded; None where there was none."""
    return metrics.at(key).at("successful") if metrics.at(key).data.get("successful") is not None else None


def _mean(distribution: Document | None) -> float | None:
    return None if distribution is None else distribution.maybe("mean")


def _p95(distribution: Document | None) -> float | None:
    if distribution is None or not distribution.maybe("count"):
        return None
    return distribution.at("percentiles").maybe("p95")


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value
