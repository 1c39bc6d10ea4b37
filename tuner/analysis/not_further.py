"""Why production stands no further right, where its knee lies further right: what keeps the next load from it. Pure."""

from __future__ import annotations

from tuner.analysis.profiles import ProductionChoice, open_stages
from tuner.analysis.slo import ITL_OVER_UNLOADED, TTFT_OVER_UNLOADED, keeps_headroom, violations
from tuner.answer import Slo
from tuner.records import Measured, StageRecord

_DERIVED = (
    f"limits derived from the unloaded engine ({TTFT_OVER_UNLOADED:g} times its median TTFT, {ITL_OVER_UNLOADED:g} "
    "times its median ITL): limits of your own, `slo: {ttft_p95: 500ms, itl_p95: 50ms}` in the job, may allow more"
)


def not_further(choice: ProductionChoice, slo: Slo) -> str | None:
    """What the next load of the choice's ladder broke; None where the knee itself is next."""
    if not isinstance(choice.trial.outcome, Measured) or choice.knee.load is None:
        return None
    further = [
        stage
        for stage in open_stages(choice.trial.outcome.stages)
        if choice.stage.load < stage.load < choice.knee.load
        and stage.output_throughput.value > choice.stage.output_throughput.value
    ]
    if not further:
        return None
    following = min(further, key=lambda stage: stage.load)
    broken = _broken(following, slo)
    if not broken:
        return None
    derived = f", of {_DERIVED}" if slo.derived and _over(following, slo) else ""
    return f"load {following.load:g} is left of the knee as well, but there {' and '.join(broken)}{derived}"


def _broken(stage: StageRecord, slo: Slo) -> list[str]:
    broken = _over(stage, slo)
    if not keeps_headroom(stage):
        broken.append("requests were preempted or the KV cache had too little room left")
    return broken


def _over(stage: StageRecord, slo: Slo) -> list[str]:
    over = violations(stage, slo)
    limits = (
        ("TTFT", stage.ttft_p95_ms, slo.ttft_p95_ms, "ttft_p95"),
        ("ITL", stage.itl_p95_ms, slo.itl_p95_ms, "itl_p95"),
    )
    return [
        f"p95 {name} is {p95.value:.4g} ms, above {limit:.4g} ms"
        if p95.value > limit
        else f"p95 {name} rests on too few samples"
        for name, p95, limit, key in limits
        if over[key] > 0
    ]
