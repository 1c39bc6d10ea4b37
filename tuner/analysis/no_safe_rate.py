"""Why no rate was shown to be safe, and how long a stage that stayed open would have to last to say more. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuner.analysis.rates import rate_stages
from tuner.analysis.safe_rate import RateStage, Told, highest_safe, told
from tuner.answer import Slo
from tuner.measure.shown_rate import ENOUGH_STATES
from tuner.records import Estimate, StageKind, StageRecord

_FEWEST = ENOUGH_STATES
"""Independent samples that the bound of a p95 needs: as many as states, by the same rule."""

OPEN_STRETCH = 2.0
"""A stage under a rate gets so many times the job's time while it is open whether its p95s are inside the limits."""

_ROUND_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRate:
    """A rate of which its stage could not tell whether it is inside the limits."""

    rate_rps: float
    why: str
    needed_s: float
    """About how long a stage must last to settle it, bounds narrowing with the root of the samples; inf: none does."""

    @property
    def time_option(self) -> str | None:
        """What to allow a stage, so that one that stays open lasts as long; None where that does not help."""
        if not math.isfinite(self.needed_s):
            return None
        return f"--time {_ROUND_S * math.ceil(self.needed_s / OPEN_STRETCH / _ROUND_S)}s"

    @property
    def text(self) -> str:
        """Why, and how much time would tell."""
        settles = (
            f"about {self.needed_s:.0f} s of it would settle it"
            if math.isfinite(self.needed_s)
            else "no time settles it"
        )
        return f"open, as {self.why}: {settles}"


def none_safe(stages: Sequence[StageRecord], slo: Slo) -> str | None:
    """Why no rate was shown to be safe; None where one was, or none was tried."""
    each = rate_stages(stages, slo)
    if not each or highest_safe(each, slo).stage is not None:
        return None
    parts = _of_all(_rates(each, slo, Told.OVER), "over a limit")
    parts += [f"{rate.rate_rps:.3g} requests/s: {rate.text}" for rate in open_rates(stages, slo)]
    parts += _of_all(_rates(each, slo, Told.NOTHING), "not measured validly")
    return f"no rate of arrivals was shown to be safe; {'; '.join(parts)}"


def _rates(stages: Iterable[RateStage], slo: Slo, says: Told) -> list[float]:
    return sorted({stage.rate_rps for stage in stages if told(stage, slo) is says})


def _of_all(rates_rps: Sequence[float], said: str) -> list[str]:
    return [f"{', '.join(f'{rate:.3g}' for rate in rates_rps)} requests/s: {said}"] if rates_rps else []


def open_rates(stages: Sequence[StageRecord], slo: Slo) -> list[OpenRate]:
    """Every rate whose last stage was open, the lowest first."""
    rated = [stage for stage in stages if stage.kind is StageKind.RATE]
    says = [told(each, slo) for each in rate_stages(rated, slo)]
    last = {stage.load: (stage, said) for stage, said in zip(rated, says, strict=True) if said is not Told.NOTHING}
    return [_of(stage, slo) for _, (stage, said) in sorted(last.items()) if said is Told.OPEN]


def _of(stage: StageRecord, slo: Slo) -> OpenRate:
    pairs = (("TTFT", stage.ttft_p95_ms, slo.ttft_p95_ms), ("ITL", stage.itl_p95_ms, slo.itl_p95_ms))
    causes = [cause for name, p95_ms, limit_ms in pairs if (cause := _cause(stage, name, p95_ms, limit_ms))]
    if not causes:
        seen = stage.num_states or 0
        said = f"it saw the server in {seen} independent states, and {ENOUGH_STATES} are needed"
        causes = [(said, ENOUGH_STATES / max(1, seen))]
    return OpenRate(
        rate_rps=stage.load,
        why=" and ".join(said for said, _ in causes),
        needed_s=stage.measured_s * max(times for _, times in causes),
    )


def _cause(stage: StageRecord, name: str, p95_ms: Estimate, limit_ms: float) -> tuple[str, float] | None:
    """What of a p95 is open, and how many times as many samples would settle it; None where it is inside its limit."""
    if p95_ms.num_samples == 0:
        return f"it has no {name}", math.inf
    if p95_ms.high is None:
        worth = f"its {stage.num_completed} requests are worth {p95_ms.num_samples} independent ones"
        return f"{worth} for the p95 {name}, and {_FEWEST} are needed", _FEWEST / p95_ms.num_samples
    if p95_ms.high <= limit_ms:
        return None
    said = f"the upper bound of its p95 {name}, {p95_ms.high:.3g} ms, is above the limit of {limit_ms:.3g} ms"
    room_ms = limit_ms - p95_ms.value
    return said, math.inf if room_ms <= 0 else ((p95_ms.high - p95_ms.value) / room_ms) ** 2
