"""`vllm bench serve` and `vllm bench sweep`: a result is one stage; files may hold one, one a line, or a list.

Keys as `vllm/benchmarks/serve.py` of 0.32 writes them. `request_rate` is a number or the text `inf`; a closed loop is
`inf` with a `max_concurrency`. p95s are there only where `--metric-percentiles` asked for 95. Its ITL is over all gaps.
A sweep adds the parameters it varied, and `run_number`, -1 for a warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tuner.elsewhere.document import Document
from tuner.elsewhere.stage import Axis, ElsewhereStage
from tuner.engine_config import EngineConfig
from tuner.inputs import InputError

ASK_FOR_P95 = "vllm bench serve writes p95s only with --metric-percentiles 95 (and E2E with --percentile-metrics e2el)"
_ENGINE_KEYS = (*EngineConfig.model_fields, "model_id")


def is_result(data: Mapping[str, object]) -> bool:
    """Whether this is one result."""
    return "output_throughput" in data and "completed" in data and "request_rate" in data


def is_failure(data: Mapping[str, object]) -> bool:
    """Whether this is what a sweep leaves of a run that failed."""
    return {"error_type", "error", "run_number"} <= data.keys()


def stages(results: Sequence[Document]) -> list[ElsewhereStage]:
    """One stage a result, warm-ups left out."""
    return [_stage(result) for result in results if result.maybe("run_number") != -1]


def _stage(result: Document) -> ElsewhereStage:
    rate, concurrency = _rate(result), result.maybe("max_concurrency")
    closed = math.isinf(rate) and concurrency is not None
    ramp = result.text("ramp_up_strategy")
    return ElsewhereStage(
        source=result.where,
        axis=Axis.CONCURRENCY if closed else Axis.REQUEST_RATE,
        load=concurrency if closed and concurrency is not None else rate,
        output_throughput=result.number("output_throughput"),
        request_throughput_rps=result.maybe("request_throughput"),
        mean_e2e_ms=result.maybe("mean_e2el_ms"),
        ttft_p95_ms=result.maybe("p95_ttft_ms"),
        itl_p95_ms=result.maybe("p95_itl_ms"),
        e2e_p95_ms=result.maybe("p95_e2el_ms"),
        num_completed=result.count("completed"),
        num_failed=result.count("failed"),
        cap=None if closed else concurrency,
        config=_config(result),
        unfit=(f"its rate was ramped up ({ramp})",) if ramp else (),
    )


def _config(result: Document) -> tuple[tuple[str, str], ...]:
    """The engine's parameters that a sweep varied, and the model."""
    named = {key.replace("-", "_"): value for key, value in result.data.items()}
    return tuple((key, str(named[key])) for key in _ENGINE_KEYS if named.get(key) is not None)


def _rate(result: Document) -> float:
    if result.data.get("request_rate") in ("inf", math.inf):
        return math.inf
    rate = result.number("request_rate", otherwise="a number of requests per second, or inf")
    if rate <= 0:
        raise InputError(f"{result.where}: request_rate is {rate:g}, not above 0")
    return rate
