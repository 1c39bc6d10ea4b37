"""The knee of one ladder: where more load stops buying throughput and starts buying latency.

Over valid, unfenced stages it is the load N where generalised power X^(1+r)/N is largest, X being the output
throughput smoothed over the ladder (`curve.py`). The answer is always a load that was measured: on a batch server's
curve the best stage of a doubling ladder keeps 95 % of the best power between stages, and where a curve bends more
sharply an interpolated load would be a guess; `suggest_bisection` asks for a stage there instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.analysis.cross_checks import SMALL_GAIN_PER_DOUBLING, cross_check
from tuner.analysis.curve import (
    DEFAULT_RELATIVE_NOISE,
    OUTLIER_Z,
    SMALLEST_OUTLIER,
    Curve,
    curve_through,
    relative_noise,
)
from tuner.analysis.curve_family import FloatArray
from tuner.analysis.graph_grid import COARSEST_STEP, is_on_grid
from tuner.analysis.tail_onset import tail_onset
from tuner.answer import KneeFinding, LadderVerdict
from tuner.records import CLIMB_KINDS, StageKind, StageRecord

DEFAULT_R = 4.5
"""On a batch server's curve the maximum then lies where one more doubling buys 10 %."""

FEWEST_STAGES = 5
"""Valid and unfenced."""

TIE = 0.02
"""Expected powers closer than this are equal; the stages' own figures decide between them."""

_PAST_POWER = 0.6
_POISSON_Z = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderPoint:
    """What the knee needs to know of one stage. None is unknown."""

    load: float
    """Concurrent requests; of an open loop, the mean number in flight."""

    throughput: float
    """Output tokens per second."""

    rate_rps: float | None = None
    """What an open loop's load was set by."""

    throughput_half_width: float | None = None
    """Half of the 95 % interval, in tokens per second."""

    ttft_p95_ms: float | None = None
    itl_p95_ms: float | None = None
    num_preemptions: int | None = None
    fenced: bool = False
    valid: bool = True
    kv_cache_usage_peak: float | None = None
    mean_running: float | None = None
    mean_waiting: float | None = None

    @property
    def name(self) -> float:
        """What an answer calls this stage: its rate in an open loop, its load in a closed one."""
        return self.load if self.rate_rps is None else self.rate_rps


def points_of(stages: Sequence[StageRecord]) -> list[LadderPoint]:
    """The stages that belong to a ladder; operating, double and burst stages answer other questions."""
    return [point_of(stage) for stage in stages if stage.kind in CLIMB_KINDS or stage.kind is StageKind.OVERLOAD]


def find_knee(
    points: Sequence[LadderPoint],
    *,
    fence: float | None = None,
    r: float = DEFAULT_R,
    seed: int = 0,
    num_bootstrap: int = 500,
) -> KneeFinding:
    """Say where the knee is, how sure that is, and what was seen around it.

    The order of the points does not matter, repeated loads are merged, and one seed gives one answer. Preemptions at a
    rate whose interval excludes zero (four or more: k - 1.96 sqrt(k) > 0) move the knee left to the last stage without.

    Args:
        points: the ladder.
        fence: `max_num_seqs`; a ladder that climbed to it without a knee is `fenced`. None: not known, and a fenced
            point is what tells that the fence was met.
        r: how small a gain counts as small.
        seed: of the bootstrap.
        num_bootstrap: how many ladders are resampled for the interval.
    """
    usable, warnings = _usable(points)
    open_points = [point for point in usable if not point.fenced]
    if len(open_points) < FEWEST_STAGES:
        warnings.append(f"too few stages: {len(open_points)} valid and unfenced, {FEWEST_STAGES} are needed")
        return KneeFinding(verdict=LadderVerdict.TOO_FEW_STAGES, warnings=tuple(warnings))
    curve = _curve_of(open_points)
    best = _best_index(curve, r)
    limit = last_without_preemptions(open_points)
    at_fence = len(open_points) < len(usable) if fence is None else open_points[-1].load >= fence
    verdict = _verdict(curve, best, limit, r=r, at_fence=at_fence)
    loads = np.array([point.load for point in open_points])
    throughput = np.exp(curve.log_measured)
    warnings += _verdict_warnings(verdict, open_points)
    is_knee = verdict is LadderVerdict.KNEE
    answer = min(best, limit)
    return KneeFinding(
        verdict=verdict,
        load=open_points[answer].load if is_knee else None,
        interval=_interval(curve, open_points, answer, limit, r, seed, num_bootstrap) if is_knee else None,
        cautious_load=open_points[_best_index(curve, 1.0)].load,
        signals=tuple(_signals(open_points, curve, best, limit)),
        dips=tuple(open_points[i].load for i in _falls(curve)[0]),
        cross_checks=cross_check(loads, throughput),
        warnings=tuple(warnings),
    )


def suggest_bisection(points: Sequence[LadderPoint], *, on_graph_grid: bool = False) -> int | None:
    """The load where one more stage pins the knee best: inside the gap, next to the best stage, that holds the peak.

    Args:
        points: the stages so far; a load that was tried, valid or not, is not asked for again.
        on_graph_grid: take a load that may become a fence where graphs are captured, if the gap holds one.

    Returns:
        None where the gap holds no such load, or the maximum is at an end of the ladder with nothing beside it.
    """
    usable, _ = _usable(points)
    open_points = [point for point in usable if not point.fenced]
    if len(open_points) < 3:
        return None
    curve = _curve_of(open_points)
    best = min(_best_index(curve, DEFAULT_R), last_without_preemptions(open_points))
    if best < 0:
        return None
    left, right = (best - 1, best) if _peak_is_left_of(curve, best) else (best, best + 1)
    if left < 0 or right >= len(open_points):
        return None
    low, high = open_points[left].load, open_points[right].load
    tried = {point.load for point in points}
    middle = math.floor(math.sqrt(low) * math.sqrt(high))
    # One of the first whole loads around the middle is untried, however wide the gap is.
    reach = (len(tried) + 1) * (COARSEST_STEP if on_graph_grid else 1)
    near = range(middle - reach, middle + reach + 1)
    candidates = [load for load in near if low < load < high and load not in tried]
    if on_graph_grid:
        candidates = [load for load in candidates if is_on_grid(load)] or candidates
    return min(
        candidates, key=lambda load: (abs(math.log(load / (math.sqrt(low) * math.sqrt(high)))), load), default=None
    )


def past_the_knee(points: Sequence[LadderPoint]) -> bool:
    """Whether doubling may stop: at the highest stage power is below 0.6 of its best and a doubling buys under 10 %.

    Both are read off the smoothed curve, and never from fewer stages than a verdict needs.
    """
    usable, _ = _usable(points)
    open_points = [point for point in usable if not point.fenced]
    if len(open_points) < FEWEST_STAGES:
        return False
    curve = _curve_of(open_points)
    power = (1 + DEFAULT_R) * curve.log_smooth - curve.log_loads
    gain = (curve.log_smooth[-1] - curve.log_smooth[-2]) / (curve.log_loads[-1] - curve.log_loads[-2])
    return bool(power[-1] - power.max() < math.log(_PAST_POWER) and gain < math.log2(SMALL_GAIN_PER_DOUBLING))


def point_of(stage: StageRecord) -> LadderPoint:
    """A stage as a point: of users, or of a rate with what it kept in flight."""
    throughput = stage.output_throughput
    known = throughput.low is not None and throughput.high is not None
    return LadderPoint(
        load=stage.mean_in_flight if stage.loop == "open" else stage.load,
        throughput=throughput.value,
        rate_rps=stage.load if stage.loop == "open" else None,
        throughput_half_width=((throughput.high or 0.0) - (throughput.low or 0.0)) / 2 if known else None,
        ttft_p95_ms=stage.ttft_p95_ms.value,
        itl_p95_ms=stage.itl_p95_ms.value,
        num_preemptions=stage.num_preemptions,
        fenced=stage.fenced,
        valid=stage.valid,
        kv_cache_usage_peak=stage.kv_cache_usage_peak,
        mean_running=stage.mean_running,
        mean_waiting=stage.mean_waiting,
    )


def _usable(points: Sequence[LadderPoint]) -> tuple[list[LadderPoint], list[str]]:
    """Valid points in rising load, one a load, and what was left out."""
    valid = [p for p in points if p.valid and math.isfinite(p.load) and math.isfinite(p.throughput) and p.load > 0]
    empty = sorted({point.load for point in valid if point.throughput <= 0})
    warnings = [f"no throughput at load {', '.join(f'{load:g}' for load in empty)}: left out"] if empty else []
    groups: dict[tuple[float, bool], list[LadderPoint]] = {}
    for point in sorted((p for p in valid if p.throughput > 0), key=_order):
        groups.setdefault((point.load, point.fenced), []).append(point)
    return [_merged(group) for group in groups.values()], warnings


def _order(point: LadderPoint) -> tuple[float, bool, float]:
    return point.load, point.fenced, point.throughput


def _merged(group: list[LadderPoint]) -> LadderPoint:
    """One point for repeats of a load: the geometric mean throughput, the worst of everything else that is known."""
    if len(group) == 1:
        return group[0]
    noises = [
        relative_noise(point.throughput, point.throughput_half_width) or DEFAULT_RELATIVE_NOISE for point in group
    ]
    throughput = math.exp(math.fsum(math.log(point.throughput) for point in group) / len(group))
    return LadderPoint(
        load=group[0].load,
        throughput=throughput,
        throughput_half_width=1.96 * throughput * math.hypot(*noises) / len(group),
        ttft_p95_ms=_worst([point.ttft_p95_ms for point in group]),
        itl_p95_ms=_worst([point.itl_p95_ms for point in group]),
        num_preemptions=max((p.num_preemptions for p in group if p.num_preemptions is not None), default=None),
        fenced=group[0].fenced,
        kv_cache_usage_peak=_worst([point.kv_cache_usage_peak for point in group]),
        mean_running=_worst([point.mean_running for point in group]),
        mean_waiting=_worst([point.mean_waiting for point in group]),
    )


def _worst(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _curve_of(points: list[LadderPoint]) -> Curve:
    return curve_through(
        np.log([point.load for point in points]),
        np.log([point.throughput for point in points]),
        [relative_noise(point.throughput, point.throughput_half_width) for point in points],
    )


def _best_index(curve: Curve, r: float) -> int:
    return int(_best_indices(curve, r, curve.log_measured[None, :])[0])


def _best_indices(curve: Curve, r: float, log_throughput: FloatArray) -> npt.NDArray[np.intp]:
    """The stage of most power in each ladder (a row): of those the curve holds equal, the one measured best."""
    power = curve.power(r, log_throughput)
    own = (1 + r) * log_throughput - curve.log_loads
    near = power >= (1 - TIE) * power.max(axis=1, keepdims=True)
    best: npt.NDArray[np.intp] = np.where(near, own, -np.inf).argmax(axis=1)
    return best


def last_without_preemptions(points: Sequence[LadderPoint]) -> int:
    """Index of the stage before the first that surely preempts; -1 where the first one does."""
    for index, point in enumerate(points):
        count = point.num_preemptions or 0
        if count - _POISSON_Z * math.sqrt(max(count, 0)) > 0:
            return index - 1
    return len(points) - 1


def _verdict(curve: Curve, best: int, limit: int, *, r: float, at_fence: bool) -> LadderVerdict:
    last = curve.log_loads.size - 1
    if limit < 0 or (best == 0 and last > 0) or _is_flat(curve, r):
        return LadderVerdict.ALREADY_SATURATED
    if best == last and limit == last:
        return LadderVerdict.FENCED if at_fence else LadderVerdict.NOT_REACHED
    return LadderVerdict.KNEE


def _is_flat(curve: Curve, r: float) -> bool:
    """Whether a constant explains every stage, and the ladder is long enough for that to mean something."""
    if curve.log_loads.size < 3:
        return False
    offset = curve.log_measured - curve.log_measured.mean()
    spread = curve.log_loads - curve.log_loads.mean()
    slope = float(spread @ offset / (spread @ spread))
    return bool((np.abs(offset) <= 3 * curve.noise).all() and slope < 1 / (1 + r))


def _interval(
    curve: Curve, points: list[LadderPoint], answer: int, limit: int, r: float, seed: int, num_bootstrap: int
) -> tuple[float, float]:
    """The middle 95 % of the knees of resampled ladders, the answer included."""
    ladders = curve.resampled(np.random.default_rng(seed), max(1, num_bootstrap))
    answers = np.minimum(_best_indices(curve, r, ladders), limit)
    low, high = np.quantile(answers, (0.025, 0.975), method="nearest")
    return points[min(int(low), answer)].load, points[max(int(high), answer)].load


def _peak_is_left_of(curve: Curve, best: int) -> bool:
    """Whether the power maximum is to be sought left of the best stage: where the neighbour there has more power.

    An even choice goes left, where the operating point will stand.
    """
    if best in (0, curve.log_loads.size - 1):
        return best > 0
    power = curve.power(DEFAULT_R, curve.log_measured[None, :])[0]
    return bool(power[best - 1] >= 0.9 * power[best + 1])


def _verdict_warnings(verdict: LadderVerdict, points: list[LadderPoint]) -> list[str]:
    low, high = points[0].load, points[-1].load
    match verdict:
        case LadderVerdict.NOT_REACHED:
            return [f"no knee up to load {high:g}: extend the range"]
        case LadderVerdict.FENCED:
            return [f"no knee up to the fence, load {high:g}: raise max_num_seqs to see it"]
        case LadderVerdict.ALREADY_SATURATED:
            return [f"already saturated at the lowest load, {low:g}"]
    return []


def _signals(points: list[LadderPoint], curve: Curve, best: int, limit: int) -> list[str]:
    signals = []
    if limit < len(points) - 1:
        first = points[limit + 1]
        moved = f", so the knee moves left to {points[limit].load:g}" if 0 <= limit < best else ""
        signals.append(f"{first.num_preemptions} preemptions at load {first.load:g}{moved}")
    dips, collapsed = _falls(curve)
    peak = max(point.throughput for point in points)
    signals += [f"a dip at load {points[i].load:g}: {points[i].throughput:.4g} tokens/s" for i in dips]
    if collapsed:
        at = points[collapsed[0]]
        signals.append(f"throughput collapses at load {at.load:g}: {at.throughput:.4g} tokens/s after {peak:.4g}")
    signals += tail_onset("TTFT", [(point.load, point.ttft_p95_ms) for point in points])
    signals += tail_onset("ITL", [(point.load, point.itl_p95_ms) for point in points])
    return signals


def _falls(curve: Curve) -> tuple[list[int], list[int]]:
    """Stages clearly below an earlier one: those the ladder recovers from are dips, the others a collapse."""
    dips: list[int] = []
    collapsed: list[int] = []
    measured = curve.log_measured
    for index in range(1, measured.size):
        before, clear = float(measured[:index].max()), max(SMALLEST_OUTLIER, OUTLIER_Z * float(curve.noise[index]))
        if measured[index] < before - clear:
            recovers = float(measured[index:].max()) >= before - clear / 2
            (dips if recovers else collapsed).append(index)
    return dips, collapsed
