"""Curves a ladder's throughput may follow: where a closed loop's rise bends, ends, falls back or breaks off.

    X(N) = c N / ((1 + (N / k)^p)^(1/p) + (N / m)^2)

covers a straight line (k large), a constant (k small), the batch server N / (a + bN) (p = 1), a hard cap (p large) and
a decline (m finite; with p = 1 the Universal Scalability Law). To it come batch servers with a hard cap, and curves
that lose a share of their throughput from some stage on, as where the KV cache runs full. The grids are fine: where a
likely curve lies between two members, every stage counts against both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_SHARPNESS = (1.0, 1.5, 2.5, 5.0, 12.0, 40.0)
_SHARPNESS_BEFORE_DECLINE = (2.5, 20.0)
_SHARPNESS_BEFORE_CLIFF = (1.0, 4.0)
_BENDS_INSIDE, _BENDS_OUTSIDE = 80, 8
_NUM_DECLINES = 112
_NUM_SLOPES = 32
_CAP_SHARPNESS = 60.0
_CLIFFS = np.linspace(0.15, 1.5, 8)
"""Drops in log throughput."""

_REACH = math.log(32)


@dataclass(frozen=True, slots=True)
class Family:
    """Members on given loads with c = 1."""

    shapes: FloatArray
    """Log throughput: (members, stages)."""

    log_prior: FloatArray
    """How likely each is before anything was measured, up to a constant: (members,)."""

    num_smooth: int
    """The first so many members have no break."""


def family_on(log_loads: FloatArray) -> Family:
    """All members, each as likely as the others of its group.

    A cap counts double: KV blocks, the token budget and a server's own limits all make one. A cliff counts a quarter:
    on few stages it explains noise as well.
    """
    first, last = log_loads[0], log_loads[-1]
    inside = np.linspace(first - math.log(2), last + math.log(2), _BENDS_INSIDE)
    below = np.linspace(first - _REACH, first - math.log(2), _BENDS_OUTSIDE, endpoint=False)
    above = np.linspace(last + _REACH, last + math.log(2), _BENDS_OUTSIDE, endpoint=False)
    bends = np.concatenate([below, inside, above])
    declines = np.linspace(first, last + math.log(8), _NUM_DECLINES)
    slopes = np.linspace(first, last + _REACH, _NUM_SLOPES)
    groups = [
        (_bent(log_loads, bends, _SHARPNESS), 1.0),
        (_declining(log_loads, bends[::2], declines), 1.0),
        (_capped(log_loads, slopes, inside), 2.0),
        (_broken_off(log_loads, bends[::2]), 0.25),
    ]
    log_prior = np.concatenate([np.full(len(group), math.log(weight / len(group))) for group, weight in groups])
    shapes = log_loads - np.concatenate([group for group, _ in groups])
    return Family(shapes, log_prior, num_smooth=len(shapes) - len(groups[-1][0]))


def _bent(log_loads: FloatArray, log_bends: FloatArray, sharpness: tuple[float, ...]) -> FloatArray:
    """How far below the straight line each bend of each sharpness is, in logs: (bends x sharpness, stages)."""
    sharp = np.array(sharpness)[:, None]
    below: FloatArray = np.logaddexp(0.0, sharp * (log_loads - log_bends[:, None, None])) / sharp
    return below.reshape(-1, log_loads.size)


def _declining(log_loads: FloatArray, log_bends: FloatArray, log_declines: FloatArray) -> FloatArray:
    """The same with a decline: fine for the scalability law, half as fine behind a sharper bend."""

    def decline(sharpness: tuple[float, ...], where: FloatArray) -> FloatArray:
        falling = 2.0 * (log_loads - where[:, None, None])
        below: FloatArray = np.logaddexp(_bent(log_loads, log_bends, sharpness), falling)
        return below.reshape(-1, log_loads.size)

    return np.concatenate([decline((1.0,), log_declines), decline(_SHARPNESS_BEFORE_DECLINE, log_declines[::2])])


def _capped(log_loads: FloatArray, log_slopes: FloatArray, log_caps: FloatArray) -> FloatArray:
    """Batch servers whose throughput stops at a hard cap."""
    batch = np.logaddexp(0.0, log_loads - log_slopes[:, None, None])
    caps = _CAP_SHARPNESS * (log_loads - log_caps[:, None])
    below: FloatArray = np.logaddexp(_CAP_SHARPNESS * batch, caps) / _CAP_SHARPNESS
    return below.reshape(-1, log_loads.size)


def _broken_off(log_loads: FloatArray, log_bends: FloatArray) -> FloatArray:
    """Bends that lose a share of their throughput from each stage but the first on."""
    stages = np.arange(log_loads.size)
    past = (stages >= stages[1:, None]).astype(np.float64)[:, None, None, :]
    bent = _bent(log_loads, log_bends, _SHARPNESS_BEFORE_CLIFF)
    below: FloatArray = bent + _CLIFFS[:, None, None] * past
    return below.reshape(-1, log_loads.size)
