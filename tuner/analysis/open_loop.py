"""The knee of an open loop, where a rate is offered and not a concurrency.

Throughput over rate is a straight line until capacity and flat from there on, whatever the engine. So
X = m min(rate, c) is fitted through all stages (least squares on logs; a collapse is held at the peak), and no single
stage's noise decides; m is 1 where completions per second are known. The bend is capacity, and capacity is where queues
grow without end, so it is no place to stand. Two rules, by what is known:

- *Power.* As in a closed loop the knee is where X^(1+r)/N is largest, with the fitted X and N, the mean number in
  flight, by Little's law: completions per second times mean E2E. Only rates that were kept up with are compared: past
  them N grows with the length of the stage and means nothing. Used where N is known of every stage. N cannot fall as
  the rate rises; where it was seen to, the stages between are levelled out (isotonic regression on logs).
- *Saturation.* Without N there is no latency, and nothing but the bend can be told: the last rate that was kept up
  with.

Kept up with is a rate whose X is 0.95 or more of what was sent: one within c / 0.95. What was sent, where it is known,
and not what was offered: random arrivals scatter around that by one over the root of their number. Over a window
completions and arrivals differ by what is in flight at its two ends, which scatters, too, by sqrt(2 N) over the number
that was sent (N at either end as a Poisson variable); 1.645 times that is allowed for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from tuner.analysis.cross_checks import kneedle, ten_percent_per_doubling
from tuner.analysis.curve import DEFAULT_RELATIVE_NOISE
from tuner.analysis.curve_family import FloatArray
from tuner.analysis.knee import DEFAULT_R, FEWEST_STAGES, LadderPoint, last_without_preemptions, point_of
from tuner.analysis.tail_onset import tail_onset
from tuner.answer import CrossChecks, KneeFinding, LadderVerdict
from tuner.records import StageRecord

KEPT_UP = 0.95
"""Share of the offered load that counts as kept up with."""

IN_FLIGHT_NOISE = 0.1
"""Standard deviation assumed of log N: queues differ more between reruns than throughput does."""

_ONE_SIDED_Z = 1.645
_NUM_CAPACITIES = 400
_CLEARLY = 1.25


class OpenLoopRule(StrEnum):
    """Which of the two rules gave an answer."""

    POWER = "power over the mean number in flight"
    SATURATION = "the last rate that was kept up with, as latencies are not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoopPoint:
    """A rate and what came of it."""

    point: LadderPoint
    """With its `rate_rps`; the load is the mean number in flight, NaN where that is not known."""

    request_throughput_rps: float | None = None
    sent_rps: float | None = None
    """What was sent of the rate; None: not known, and taken to be the rate."""

    noise: float = 0.0
    """Standard deviation of the logarithm of completions over arrivals, where the server keeps up."""

    @property
    def rate_rps(self) -> float:
        """As sent, where that is known; else as offered."""
        return self.sent_rps if self.sent_rps is not None and _is_known(self.sent_rps) else self.point.name


def open_loop_point(stage: StageRecord) -> OpenLoopPoint:
    """A stage under a rate, with what was sent of it and how completions scatter around that."""
    num_sent = 0.0 if stage.sent_rps is None else stage.sent_rps * stage.measured_s
    return OpenLoopPoint(
        point=point_of(stage),
        request_throughput_rps=stage.request_throughput_rps,
        sent_rps=stage.sent_rps,
        noise=completions_noise(stage.mean_in_flight, num_sent),
    )


def completions_noise(mean_in_flight: float, num_sent: float) -> float:
    """Standard deviation of log completions over arrivals; 0 where it is not known how many were sent."""
    return math.sqrt(2 * mean_in_flight) / num_sent if num_sent > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Ladder:
    """Usable stages in rising rate as offered; arrays of shape (stages,), natural logarithms."""

    points: list[LadderPoint]
    log_rates: FloatArray
    """As sent, where that is known."""

    slack: FloatArray
    """How far chance alone may put completions below arrivals."""

    log_served: FloatArray
    served_is_offered: bool
    """Whether what was served is in the rate's own unit, requests per second."""

    log_in_flight: FloatArray | None


def find_open_loop_knee(
    points: Sequence[OpenLoopPoint],
    *,
    fence: float | None = None,
    r: float = DEFAULT_R,
    seed: int = 0,
    num_bootstrap: int = 500,
) -> tuple[KneeFinding, OpenLoopRule]:
    """The knee as a rate, in requests per second, and the rule that gave it.

    Args:
        points: stages in any order; repeats of a rate are merged.
        fence: `max_num_seqs`: a ladder whose number in flight came to it without a knee is `fenced`.
        r: how small a gain counts as small, where power is what decides.
        seed: of the bootstrap.
        num_bootstrap: how many ladders are resampled for the interval.
    """
    usable = [each for each in _merged(points) if not each.point.fenced]
    ladder = _ladder(usable)
    rule = OpenLoopRule.SATURATION if ladder.log_in_flight is None else OpenLoopRule.POWER
    if len(usable) < FEWEST_STAGES:
        warning = f"too few stages: {len(usable)} valid and unfenced, {FEWEST_STAGES} are needed"
        return KneeFinding(verdict=LadderVerdict.TOO_FEW_STAGES, warnings=(warning,)), rule
    limit = last_without_preemptions(ladder.points)
    best = int(_best(ladder, ladder.log_served[None, :], ladder.log_in_flight, r)[0])
    at_fence = fence is not None and any(each.point.fenced or each.point.load >= fence for each in _merged(points))
    verdict = _verdict(best, limit, last=len(usable) - 1, at_fence=at_fence)
    names = [point.name for point in ladder.points]
    finding = KneeFinding(
        verdict=verdict,
        cautious_load=names[max(0, int(_best(ladder, ladder.log_served[None, :], ladder.log_in_flight, 1.0)[0]))]
        if rule is OpenLoopRule.POWER
        else None,
        signals=tuple(_signals(ladder.points, best, limit)),
        cross_checks=_cross_checks(ladder.points),
        warnings=(*_verdict_warnings(verdict, names), *_fallen(ladder)),
    )
    if verdict is not LadderVerdict.KNEE:
        return finding, rule
    answer = min(best, limit)
    low, high = _interval(ladder, limit, r, seed, num_bootstrap)
    found = {"load": names[answer], "interval": (names[min(low, answer)], names[max(high, answer)])}
    return finding.model_copy(update=found), rule


def _is_known(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _merged(points: Sequence[OpenLoopPoint]) -> list[OpenLoopPoint]:
    """Valid stages, one a rate, in rising order: means of what repeats say, the worst of their tails."""
    groups: dict[float, list[OpenLoopPoint]] = {}
    valid = [each for each in points if each.point.valid and _is_known(each.point.rate_rps)]
    known = [each for each in valid if _is_known(each.point.throughput)]
    for each in sorted(known, key=lambda each: (each.point.name, each.point.throughput)):
        groups.setdefault(each.point.name, []).append(each)
    return [_mean(group) for group in groups.values()]


def _mean(group: list[OpenLoopPoint]) -> OpenLoopPoint:
    points = [each.point for each in group]
    merged = replace(
        points[0],
        load=_geometric_mean([point.load for point in points]) or math.nan,
        throughput=_geometric_mean([point.throughput for point in points]) or math.nan,
        ttft_p95_ms=max((p.ttft_p95_ms for p in points if p.ttft_p95_ms is not None), default=None),
        itl_p95_ms=max((p.itl_p95_ms for p in points if p.itl_p95_ms is not None), default=None),
        num_preemptions=max((p.num_preemptions for p in points if p.num_preemptions is not None), default=None),
        fenced=any(point.fenced for point in points),
    )
    served = _geometric_mean([each.request_throughput_rps for each in group])
    return OpenLoopPoint(
        point=merged,
        request_throughput_rps=served,
        sent_rps=_geometric_mean([each.sent_rps for each in group]),
        noise=math.sqrt(math.fsum(each.noise**2 for each in group)) / len(group),
    )


def _geometric_mean(values: Sequence[float | None]) -> float | None:
    """None where one is not known."""
    logs = [math.log(value) for value in values if value is not None and _is_known(value)]
    return math.exp(math.fsum(logs) / len(logs)) if len(logs) == len(values) else None


def _ladder(usable: Sequence[OpenLoopPoint]) -> _Ladder:
    points = [each.point for each in usable]
    completions = [each.request_throughput_rps or 0.0 for each in usable]
    offered_known = all(map(_is_known, completions))
    in_flight = [point.load for point in points]
    return _Ladder(
        points=points,
        log_rates=np.log([each.rate_rps for each in usable]),
        slack=_ONE_SIDED_Z * np.array([each.noise for each in usable]),
        log_served=np.log(completions if offered_known else [point.throughput for point in points]),
        served_is_offered=offered_known,
        log_in_flight=np.log(in_flight) if all(map(_is_known, in_flight)) else None,
    )


def _best(ladder: _Ladder, log_served: FloatArray, log_in_flight: FloatArray | None, r: float) -> npt.NDArray[np.intp]:
    """Index of the knee by the rule that applies, -1 where nothing was kept up with; a row of `log_served` a ladder."""
    log_rates = ladder.log_rates
    capacity = _capacity(log_rates, log_served, served_is_offered=ladder.served_is_offered)
    # A stage of few requests is not known to be served less than it was sent.
    served = np.minimum(log_rates, capacity[:, None] + ladder.slack)
    kept_up = log_rates <= served - math.log(KEPT_UP) + 1e-9
    # The last one kept up with; what was sent need not rise with what was offered.
    last: npt.NDArray[np.intp] = np.where(kept_up.any(axis=1), len(log_rates) - 1 - kept_up[:, ::-1].argmax(axis=1), -1)
    if log_in_flight is None:
        return last
    level = np.array([isotonic_regression(row).x for row in np.atleast_2d(log_in_flight)])
    power = (1 + r) * served - level
    best: npt.NDArray[np.intp] = np.minimum(np.where(kept_up, power, -np.inf).argmax(axis=1), last)
    return best


def _capacity(log_rates: FloatArray, log_served: FloatArray, *, served_is_offered: bool) -> FloatArray:
    """Log of c in X = m min(rate, c); a row a ladder. Below the lowest rate or above the highest it is only that."""
    held = np.maximum.accumulate(log_served, axis=1)
    capacities = np.linspace(log_rates.min() - math.log(2), log_rates.max() + math.log(2), _NUM_CAPACITIES)
    gaps = held[:, None, :] - np.minimum(log_rates, capacities[:, None])
    if not served_is_offered:
        gaps = gaps - gaps.mean(axis=2, keepdims=True)
    errors = (gaps**2).sum(axis=2)
    # Capacities beyond an end of the ladder fit alike: the middle of equal ones stands for them.
    best = np.isclose(errors, errors.min(axis=1, keepdims=True), rtol=1e-9, atol=1e-12)
    return np.array([np.median(capacities[row]) for row in best])


def _verdict(best: int, limit: int, *, last: int, at_fence: bool) -> LadderVerdict:
    if min(best, limit) < 0:
        return LadderVerdict.ALREADY_SATURATED
    if best == last == limit:
        return LadderVerdict.FENCED if at_fence else LadderVerdict.NOT_REACHED
    return LadderVerdict.KNEE


def _interval(ladder: _Ladder, limit: int, r: float, seed: int, num_bootstrap: int) -> tuple[int, int]:
    """Indices of the middle 95 % of the knees of ladders that could as well have been measured."""
    rng = np.random.default_rng(seed)
    shape = max(1, num_bootstrap), len(ladder.points)
    served = ladder.log_served + DEFAULT_RELATIVE_NOISE * rng.standard_normal(shape)
    in_flight = ladder.log_in_flight
    if in_flight is not None:
        in_flight = in_flight + IN_FLIGHT_NOISE * rng.standard_normal(shape)
    answers = np.clip(_best(ladder, served, in_flight, r), 0, limit)
    low, high = np.quantile(answers, (0.025, 0.975), method="nearest")
    return int(low), int(high)


def _signals(points: Sequence[LadderPoint], best: int, limit: int) -> list[str]:
    signals = []
    if limit < len(points) - 1:
        first = points[limit + 1]
        moved = f", so the knee moves left to {points[limit].name:g}" if 0 <= limit < best else ""
        signals.append(f"{first.num_preemptions} preemptions at {first.name:g} requests/s{moved}")
    signals += tail_onset("TTFT", [(point.name, point.ttft_p95_ms) for point in points])
    return signals + tail_onset("ITL", [(point.name, point.itl_p95_ms) for point in points])


def _verdict_warnings(verdict: LadderVerdict, names: Sequence[float]) -> list[str]:
    match verdict:
        case LadderVerdict.NOT_REACHED:
            return [f"no knee up to {names[-1]:g} requests/s: extend the range"]
        case LadderVerdict.FENCED:
            return [f"no knee up to the fence, at {names[-1]:g} requests/s: raise max_num_seqs to see it"]
        case LadderVerdict.ALREADY_SATURATED:
            return [f"already saturated at the lowest rate, {names[0]:g} requests/s"]
        case _:
            return []


def _fallen(ladder: _Ladder) -> list[str]:
    """A warning where the number in flight fell clearly as the rate rose."""
    if ladder.log_in_flight is None:
        return []
    off = np.abs(isotonic_regression(ladder.log_in_flight).x - ladder.log_in_flight).max()
    if off <= math.log(_CLEARLY):
        return []
    return ["requests in flight do not rise with the rate: something else was on the server, or stages were too short"]


def _cross_checks(points: Sequence[LadderPoint]) -> CrossChecks:
    """Rules that mean something on an axis of rates."""
    if len(points) < 3:
        return CrossChecks()
    rates = np.array([point.name for point in points])
    throughput = np.array([point.throughput for point in points])
    return CrossChecks(
        kneedle=kneedle(rates, throughput), ten_percent_per_doubling=ten_percent_per_doubling(rates, throughput)
    )
