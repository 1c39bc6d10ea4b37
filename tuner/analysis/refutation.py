"""Whether production's own launches bear its choice out, and what they teach about the next choice. Pure.

A choice is the best of many stages, and one that stands just inside a limit has often been lucky to: launched again, it
is outside. The next one is then chosen with as much room as this one was seen to lack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuner.analysis.combine import operating_point_of
from tuner.analysis.profiles import ProductionChoice
from tuner.analysis.slo import KV_HEADROOM, violations
from tuner.answer import Slo
from tuner.records import StageKind, StageRecord, TrialRecord
from tuner.wording import config_text, kv_use, preemptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedPair:
    """Production and the defaults, re-measured in turn at the same loads."""

    production: tuple[TrialRecord, ...]
    baseline: tuple[TrialRecord, ...]


def stages_of(trials: Sequence[TrialRecord], kind: StageKind, *, load: float | None = None) -> list[StageRecord]:
    """The valid stages of that kind, and of that load if one is given; of each measured trial the last one."""
    found = []
    for trial in trials:
        if trial.outcome.outcome == "measured":
            stages = [stage for stage in trial.outcome.stages if stage.kind is kind and stage.valid]
            found += [stage for stage in stages if load in (None, stage.load)][-1:]
    return found


def refutation(choice: ProductionChoice, pair: ConfirmedPair, slo: Slo) -> str | None:
    """Why the launches of production do not bear the choice out, or None."""
    stages = stages_of(pair.production, StageKind.OPERATING)
    if not stages:
        failures = [trial.outcome.detail for trial in pair.production if trial.outcome.outcome == "failed"]
        return (
            f"no launch of {config_text(choice.config)} gave a valid stage: {'; '.join(failures) or 'none was valid'}"
        )
    point = operating_point_of(stages)
    faults = []
    if not point.has_no_preemptions:
        faults.append(f"{preemptions(point)} preemptions")
    if point.is_unknown("kv_cache_usage_peak") or (point.kv_cache_usage_peak or 0.0) > 1 - KV_HEADROOM:
        faults.append(f"KV use {kv_use(point)}")
    faults += [fault for stage in stages for fault in _over(stage, slo)]
    if not faults:
        return None
    return f"{config_text(choice.config)} was refuted when re-measured at load {point.load}: {', '.join(faults)}"


def _over(stage: StageRecord, slo: Slo) -> Iterator[str]:
    """Which limits one launch did not keep: a mean over launches would hide the one that broke them."""
    over = violations(stage, slo)
    for name, key, measured, limit in (
        ("TTFT", "ttft_p95", stage.ttft_p95_ms, slo.ttft_p95_ms),
        ("ITL", "itl_p95", stage.itl_p95_ms, slo.itl_p95_ms),
    ):
        if over[key] > 0:
            few = "" if measured.has_interval else f" by {measured.num_samples} samples, too few"
            value = "unknown" if math.isnan(measured.value) else f"{measured.value:.4g}"
            yield f"p95 {name} {value} of {limit:.4g} ms{few}"


def with_room(limits: Slo, choice: ProductionChoice, pair: ConfirmedPair, *, slo: Slo) -> Slo:
    """Limits to choose the next by: one of `slo` that a launch broke, lower by how far that was above the search.

    Args:
        limits: what this one was chosen by; lower than `slo` where others were refuted before.
    """
    stages, seen = stages_of(pair.production, StageKind.OPERATING), choice.stage
    ttft = _lack(slo.ttft_p95_ms, seen.ttft_p95_ms.value, [stage.ttft_p95_ms.value for stage in stages])
    itl = _lack(slo.itl_p95_ms, seen.itl_p95_ms.value, [stage.itl_p95_ms.value for stage in stages])
    return limits.model_copy(update={"ttft_p95_ms": ttft * limits.ttft_p95_ms, "itl_p95_ms": itl * limits.itl_p95_ms})


def _lack(limit_ms: float, seen_ms: float, again_ms: Sequence[float]) -> float:
    """The share of what launches showed that the search had seen; 1 where none of them broke the limit."""
    worst_ms = max([each for each in again_ms if math.isfinite(each)], default=0.0)
    return 1.0 if worst_ms <= limit_ms or not seen_ms > 0 else min(1.0, seen_ms / worst_ms)
