"""Ladders harder than `held_out`'s: rungs as benchmarks choose them, lower caps, cliffs climbed again; and no knee."""

from __future__ import annotations

import numpy as np

from tests.tuner.analysis.curves import FloatArray
from tests.tuner.analysis.held_out import (
    Ladder,
    Truth,
    batch,
    bend_on,
    capped,
    many_servers,
    measured,
    scalability_law,
    stepping,
    unknown,
)


def cap_below_the_ceiling(loads: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """A batch server stopped at a load, or at 40 to 82 % of its ceiling, where it is about to bend by itself."""
    if rng.random() < 0.5:
        return capped(loads, rng)
    cap, share = bend_on(loads, rng), rng.uniform(0.4, 0.82)
    served = np.minimum(loads, cap)
    return served / (cap * (1 - share) / share + served), unknown(loads)


def climbed_cliff(loads: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """A batch server that loses a share of its throughput past some load and goes on rising, falls on, or stays low."""
    edge = bend_on(loads, rng)
    rates = loads / (4 * edge * rng.uniform(0.2, 2) / 4.5 + loads)
    after = [
        rates * rng.uniform(0.3, 0.8),
        rates * (edge / loads) ** rng.uniform(0.5, 1.5) * rng.uniform(0.6, 0.95),
        np.minimum(rates, rates.max() / rng.uniform(2, 7) * (edge / loads) ** 0.2),
    ][int(rng.integers(3))]
    return np.where(loads > edge, after, rates), unknown(loads)


def flat(loads: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Saturated from the first stage on."""
    return np.full(loads.size, rng.uniform(0.1, 1)), unknown(loads)


def straight(loads: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Every stage gains what its load promises."""
    return loads * rng.uniform(0.1, 1), unknown(loads)


def fenced(loads: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """A batch server whose `max_num_seqs` is the last stage and a half to a tenth of its knee."""
    return loads / (loads[-1] * rng.uniform(2, 10) / 4.5 + loads), unknown(loads)


HARDER: dict[str, Truth] = {
    "batch server": batch,
    "cap below the ceiling": cap_below_the_ceiling,
    "closed M/M/c": many_servers,
    "scalability law": scalability_law,
    "cliff climbed again": climbed_cliff,
}
NO_KNEE: dict[str, Truth] = {"flat": flat, "straight": straight, "fenced": fenced}


def draw_harder(family: str, seed: int, *, gaussian: bool = False) -> Ladder:
    """One ladder of 5 to 14 stages with rungs of one of five kinds and the noise of `held_out.draw`."""
    curves = HARDER | NO_KNEE
    rng = np.random.default_rng([seed, list(curves).index(family), 1])
    loads = _RUNGS[int(rng.integers(len(_RUNGS)))](rng)
    fence = float(loads[-1]) if family == "fenced" else None
    return measured(loads, *curves[family](loads, rng), rng, gaussian=gaussian, fence=fence)


def _doubling(rng: np.random.Generator) -> FloatArray:
    num_stages = int(rng.integers(5, 11))
    loads: FloatArray = 2.0 ** (rng.integers(0, 11 - num_stages) + np.arange(num_stages))
    return loads


def _bisected(rng: np.random.Generator) -> FloatArray:
    """Doublings with stages between some of them."""
    doublings = 2.0 ** np.arange(int(rng.integers(5, 10)))
    gaps = np.sqrt(doublings[1:] * doublings[:-1])
    between = np.floor(rng.choice(gaps[1:], size=int(rng.integers(1, 4)), replace=False))
    return np.union1d(doublings, between)


def _anywhere(rng: np.random.Generator) -> FloatArray:
    """Whole loads from 1 to 64 or more, even on a log axis."""
    highest, num_stages = int(rng.choice([64, 128, 256, 512])), int(rng.integers(5, 15))
    loads: set[float] = set()
    while len(loads) < num_stages:
        loads.add(float(np.rint(np.exp(rng.uniform(0, np.log(highest))))))
    return np.array(sorted(loads))


def _linear(rng: np.random.Generator) -> FloatArray:
    return float(rng.choice([4, 8, 16, 32])) * np.arange(1.0, rng.integers(5, 15) + 1)


_RUNGS = (_doubling, _bisected, _anywhere, stepping, _linear)
