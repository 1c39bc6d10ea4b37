"""A ladder's throughput curve: what the stages say together about each of them.

Generalised power raises throughput to a high exponent, so a stage's noise of 5 % becomes 28 % of power. Neighbouring
stages carry the missing information: a closed loop rises in proportion to load, levels off, and may fall. The family

    X(N) = c N / ((1 + (N / k)^p)^(1/p) + (N / m)^2)

covers a straight line (k large), a constant (k small), the batch server N / (a + bN) (p = 1), a hard cap (p large) and
a decline (m finite; with p = 1 the Universal Scalability Law); batch servers with a hard cap are added to it. Each
member is weighed by how well it explains the stages. Power as a share of the best stage's does not depend on c, so its
expectation over the members is a plain weighted mean; the stage where it is largest is the choice of least expected
regret. A stage no likely member explains is left out, a collapse past the peak first of all, and where too many are,
the stages stand for themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

DEFAULT_RELATIVE_NOISE = 0.05
"""Standard deviation assumed of a throughput without an interval: about what reruns of one stage differ by."""

SMALLEST_RELATIVE_NOISE = 0.02
"""Drift between stages that a stage's own interval cannot see."""

OUTLIER_Z = 3.5
"""Noise widths beyond which a stage is no longer noise."""

SMALLEST_OUTLIER = 0.1
"""And how far in log throughput it must be off besides, to matter."""

_SHARPNESS = (1.0, 1.5, 2.5, 5.0, 12.0, 40.0)
_SHARPNESS_BEFORE_DECLINE = (1.0, 2.5, 20.0)
_BENDS_INSIDE, _BENDS_OUTSIDE = 80, 8
_NUM_DECLINES = 28
_NUM_SLOPES = 16
_CAP_SHARPNESS = 60.0
_REACH = math.log(32)
_HOPELESS = 40.0
"""Members this much worse than the best one, in chi-squared, weigh nothing and are dropped."""

_PRIOR_STAGES = 1.0
"""How many stages' worth of scatter the default noise counts for."""

_FREE_PARAMETERS = 3
_FEWEST_STAGES = 5


@dataclass(frozen=True, slots=True)
class Family:
    """Members on given loads with c = 1."""

    shapes: FloatArray
    """Log throughput: (members, stages)."""

    log_prior: FloatArray
    """How likely each is before anything was measured, up to a constant: (members,)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Stages in rising load, all arrays of shape (stages,), natural logarithms throughout."""

    log_loads: FloatArray
    log_measured: FloatArray
    noise: FloatArray
    """Standard deviation of the log throughput, no smaller than what the stages' scatter shows."""

    on_curve: BoolArray
    """Whether the family explains the stage; all False where the stages stand for themselves."""

    family: Family
    """The members that may explain the stages; of no use where the stages stand for themselves."""

    log_smooth: FloatArray
    """Expected log throughput; the measured one of a stage that fell below the curve, or stands for itself."""

    def power(self, r: float, log_throughput: FloatArray) -> FloatArray:
        """Expected power X^(1+r)/N as a share of the best stage's; rows are ladders on these loads: (rows, stages)."""
        if not self.on_curve.any():
            return _shares((1 + r) * log_throughput - self.log_loads)
        members = _shares((1 + r) * self.family.shapes - self.log_loads)
        fell = ~self.on_curve & (self.log_smooth == self.log_measured)
        weights = _weights(self.family, log_throughput, self.noise, self.on_curve)
        return np.where(fell, 0.0, weights @ members)

    def resampled(self, rng: np.random.Generator, num_samples: int) -> FloatArray:
        """Log throughputs of ladders that could as well have been measured: (samples, stages)."""
        return self.log_smooth + self.noise * rng.standard_normal((num_samples, self.log_loads.size))


def relative_noise(throughput: float, half_width: float | None) -> float | None:
    """Standard deviation of log throughput from the half-width of a 95 % interval; None where that is not known."""
    if half_width is None or not math.isfinite(half_width) or half_width < 0:
        return None
    return min(1.0, max(SMALLEST_RELATIVE_NOISE, half_width / 1.96 / throughput))


def curve_through(log_loads: FloatArray, log_throughput: FloatArray, noise: list[float | None]) -> Curve:
    """Weigh the family against the stages. Noise that is not known starts at the default and follows the scatter."""
    known = np.array([value is not None for value in noise])
    prior = np.array([value if value is not None else DEFAULT_RELATIVE_NOISE for value in noise])
    family = _family(log_loads)
    on_curve = _explained(family, log_throughput, prior)
    num_used = int(on_curve.sum())
    if num_used <= _FREE_PARAMETERS:
        return Curve(log_loads, log_throughput, prior, np.zeros_like(on_curve), family, log_throughput)
    row = log_throughput[None, :]
    closest = _misfit(family, row, prior, on_curve).min()
    freedom = num_used - _FREE_PARAMETERS
    scatter = np.where(known, max(1.0, closest / freedom), (_PRIOR_STAGES + closest) / (_PRIOR_STAGES + freedom))
    sigma = prior * np.sqrt(scatter)
    misfit = _misfit(family, row, sigma, on_curve)[0]
    hopeful = misfit < misfit.min() + _HOPELESS
    family = Family(family.shapes[hopeful], family.log_prior[hopeful])
    offsets = _mean(row, sigma, on_curve) - _mean(family.shapes, sigma, on_curve)
    smooth = _weights(family, row, sigma, on_curve)[0] @ (family.shapes + offsets[:, None])
    fell = ~on_curve & (log_throughput < smooth)
    return Curve(log_loads, log_throughput, sigma, on_curve, family, np.where(fell, log_throughput, smooth))


def _shares(log_power: FloatArray) -> FloatArray:
    shares: FloatArray = np.exp(log_power - log_power.max(axis=-1, keepdims=True))
    return shares


def _family(log_loads: FloatArray) -> Family:
    """All members, each as likely as the others of its group.

    A cap counts double: KV blocks, the token budget and a server's own limits all make one.
    """
    first, last = log_loads[0], log_loads[-1]
    inside = np.linspace(first - math.log(2), last + math.log(2), _BENDS_INSIDE)
    below = np.linspace(first - _REACH, first - math.log(2), _BENDS_OUTSIDE, endpoint=False)
    above = np.linspace(last + _REACH, last + math.log(2), _BENDS_OUTSIDE, endpoint=False)
    bends = np.concatenate([below, inside, above])
    plain = _bent(log_loads, bends, _SHARPNESS)
    declines = np.linspace(first, last + math.log(8), _NUM_DECLINES)[:, None, None]
    gentle = _bent(log_loads, bends[::2], _SHARPNESS_BEFORE_DECLINE)
    declining = np.logaddexp(gentle, 2.0 * (log_loads - declines)).reshape(-1, log_loads.size)
    batch = np.logaddexp(0.0, log_loads - np.linspace(first, last + _REACH, _NUM_SLOPES)[:, None, None])
    caps = _CAP_SHARPNESS * (log_loads - inside[:, None])
    capped = (np.logaddexp(_CAP_SHARPNESS * batch, caps) / _CAP_SHARPNESS).reshape(-1, log_loads.size)
    groups = [(plain, 1.0), (declining, 1.0), (capped, 2.0)]
    log_prior = np.concatenate([np.full(len(group), math.log(weight / len(group))) for group, weight in groups])
    return Family(log_loads - np.concatenate([group for group, _ in groups]), log_prior)


def _bent(log_loads: FloatArray, log_bends: FloatArray, sharpness: tuple[float, ...]) -> FloatArray:
    """How far below the straight line each bend of each sharpness is, in logs: (bends x sharpness, stages)."""
    sharp = np.array(sharpness)[:, None]
    below: FloatArray = np.logaddexp(0.0, sharp * (log_loads - log_bends[:, None, None])) / sharp
    return below.reshape(-1, log_loads.size)


def _precision(noise: FloatArray, used: BoolArray) -> FloatArray:
    return np.where(used, noise**-2.0, 0.0)


def _mean(rows: FloatArray, noise: FloatArray, used: BoolArray) -> FloatArray:
    precision = _precision(noise, used)
    mean: FloatArray = rows @ (precision / precision.sum())
    return mean


def _misfit(family: Family, rows: FloatArray, noise: FloatArray, used: BoolArray) -> FloatArray:
    """Weighted sum of squares of each row about each member at its best c: (rows, members)."""
    precision = _precision(noise, used)
    members = family.shapes - _mean(family.shapes, noise, used)[:, None]
    centred = rows - _mean(rows, noise, used)[:, None]
    own = (centred**2 @ precision)[:, None] + (members**2 @ precision)[None, :]
    return np.maximum(own - 2.0 * (centred * precision) @ members.T, 0.0)


def _weights(family: Family, rows: FloatArray, noise: FloatArray, used: BoolArray) -> FloatArray:
    """How likely each member is for each row, adding up to 1: (rows, members)."""
    log_weights = family.log_prior - _misfit(family, rows, noise, used) / 2
    weights = _shares(log_weights)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def _collapsed(log_throughput: FloatArray, noise: FloatArray) -> BoolArray:
    """Stages from which on everything is clearly below what an earlier stage reached.

    None of them can have the most power, and a cliff is no member of the family: it would be fitted at the cost of the
    stages left of it.
    """
    before = np.maximum.accumulate(log_throughput)
    from_here = np.maximum.accumulate(log_throughput[::-1])[::-1]
    collapsed: BoolArray = from_here < before - np.maximum(SMALLEST_OUTLIER, OUTLIER_Z * noise)
    return collapsed


def _explained(family: Family, log_throughput: FloatArray, noise: FloatArray) -> BoolArray:
    """Which stages the family explains, by a least-absolute fit that a minority of odd stages cannot pull."""
    for asked in (np.ones_like(log_throughput, dtype=np.bool_), ~_collapsed(log_throughput, noise)):
        num_stages = int(asked.sum())
        if num_stages < _FEWEST_STAGES or _misfit(family, log_throughput[None, :], noise, asked).min() < num_stages:
            return asked
    offsets = log_throughput - family.shapes
    residuals = np.abs(offsets - np.median(offsets[:, asked], axis=1, keepdims=True))
    residual = residuals[(residuals / noise)[:, asked].sum(axis=1).argmin()]
    lost = math.sqrt(num_stages / (num_stages - _FREE_PARAMETERS))
    scale = max(1.0, 1.4826 * lost * float(np.median((residual / noise)[asked])))
    explained = asked & ((residual <= OUTLIER_Z * scale * noise) | (residual <= SMALLEST_OUTLIER))
    return explained if int((asked & ~explained).sum()) <= num_stages // 3 else np.zeros_like(asked)
