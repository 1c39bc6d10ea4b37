"""A ladder's throughput curve: what the stages say together about each of them.

Generalised power raises throughput to a high exponent, so a stage's noise of 5 % becomes 28 % of power. Neighbouring
stages carry the missing information: a closed loop rises in proportion to load, levels off, and may fall or break off.
Each member of a family of such curves (`curve_family.py`) is weighed by how well it explains the stages. Power as a
share of the best stage's does not depend on a curve's height, so its expectation over the members is a plain weighted
mean; the stage where it is largest is the choice of least expected regret. A stage no likely member explains is left
out, a collapse past the peak first of all, and where too many are, the stages stand for themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.analysis.curve_family import Family, FloatArray, family_on

BoolArray = npt.NDArray[np.bool_]

DEFAULT_RELATIVE_NOISE = 0.05
"""Standard deviation assumed of a throughput without an interval: about what reruns of one stage differ by."""

SMALLEST_RELATIVE_NOISE = 0.02
"""Drift between stages that a stage's own interval cannot see."""

OUTLIER_Z = 3.5
"""Noise widths beyond which a stage is no longer noise."""

SMALLEST_OUTLIER = 0.1
"""And how far in log throughput it must be off besides, to matter."""

_HOPELESS = 40.0
"""Members this much worse than the best one, in chi-squared, weigh nothing and are dropped."""

_PRIOR_STAGES = 1.0
"""How many stages' worth of scatter the default noise counts for."""

_FREE_PARAMETERS = 3
_BREAK_PARAMETERS = 2
"""What a break has besides: where, and how deep."""

_FEWEST_STAGES = 5


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
    family = family_on(log_loads)
    on_curve = _explained(family, log_throughput, prior)
    num_used = int(on_curve.sum())
    if num_used <= _FREE_PARAMETERS:
        return Curve(log_loads, log_throughput, prior, np.zeros_like(on_curve), family, log_throughput)
    row = log_throughput[None, :]
    misfit = _misfit(family, row, prior, on_curve)[0]
    freedom = num_used - _FREE_PARAMETERS
    by_smooth = _scatter(misfit[: family.num_smooth].min(), freedom, known)
    by_break = _scatter(misfit[family.num_smooth :].min(), max(1, freedom - _BREAK_PARAMETERS), known)
    scatter = by_smooth if freedom <= _BREAK_PARAMETERS else np.minimum(by_smooth, by_break)
    sigma = prior * np.sqrt(scatter)
    misfit = _misfit(family, row, sigma, on_curve)[0]
    hopeful = misfit < misfit.min() + _HOPELESS
    family = Family(family.shapes[hopeful], family.log_prior[hopeful], int(hopeful[: family.num_smooth].sum()))
    offsets = _mean(row, sigma, on_curve) - _mean(family.shapes, sigma, on_curve)
    smooth = _weights(family, row, sigma, on_curve)[0] @ (family.shapes + offsets[:, None])
    fell = ~on_curve & (log_throughput < smooth)
    return Curve(log_loads, log_throughput, sigma, on_curve, family, np.where(fell, log_throughput, smooth))


def _scatter(misfit: float, freedom: int, known: BoolArray) -> FloatArray:
    """How many times the noise's variance the stages scatter by: a known noise is never taken for less."""
    own, from_prior = max(1.0, misfit / freedom), (_PRIOR_STAGES + misfit) / (_PRIOR_STAGES + freedom)
    return np.where(known, own, from_prior)


def _shares(log_power: FloatArray) -> FloatArray:
    shares: FloatArray = np.exp(log_power - log_power.max(axis=-1, keepdims=True))
    return shares


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

    None of them can have the most power; fitted with the rest they would cost the stages left of them.
    """
    before = np.maximum.accumulate(log_throughput)
    from_here = np.maximum.accumulate(log_throughput[::-1])[::-1]
    collapsed: BoolArray = from_here < before - np.maximum(SMALLEST_OUTLIER, OUTLIER_Z * noise)
    return collapsed


def _explained(family: Family, log_throughput: FloatArray, noise: FloatArray) -> BoolArray:
    """Which stages the family explains, by a least-absolute fit that a minority of odd stages cannot pull.

    That fit has no break: a break beside an odd stage would explain one as the other.
    """
    for asked in (np.ones_like(log_throughput, dtype=np.bool_), ~_collapsed(log_throughput, noise)):
        num_stages = int(asked.sum())
        if num_stages < _FEWEST_STAGES or _misfit(family, log_throughput[None, :], noise, asked).min() < num_stages:
            return asked
    offsets = log_throughput - family.shapes[: family.num_smooth]
    residuals = np.abs(offsets - np.median(offsets[:, asked], axis=1, keepdims=True))
    residual = residuals[(residuals / noise)[:, asked].sum(axis=1).argmin()]
    lost = math.sqrt(num_stages / (num_stages - _FREE_PARAMETERS))
    scale = max(1.0, 1.4826 * lost * float(np.median((residual / noise)[asked])))
    explained = asked & ((residual <= OUTLIER_Z * scale * noise) | (residual <= SMALLEST_OUTLIER))
    return explained if int((asked & ~explained).sum()) <= num_stages // 3 else np.zeros_like(asked)
