"""Throughput curves whose knee is known, and ladders measured on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tests.fakes import records
from tuner.analysis.knee import LadderPoint
from tuner.engine_config import EngineConfig
from tuner.records import StageKind, StageRecord

FloatArray = npt.NDArray[np.float64]
CurveOf = Callable[[FloatArray], FloatArray]

DOUBLING = (1, 2, 4, 8, 16, 32, 64, 128)


def batch_server(knee: float) -> CurveOf:
    """X = N / (a + bN), whose power with r = 4.5 is largest at 4.5 a / b."""
    return lambda loads: 1000 * loads / (knee / 4.5 + loads)


def capped_batch_server(knee: float, cap: float) -> CurveOf:
    """A batch server that stops gaining at load `cap`, left of its own knee."""
    return lambda loads: batch_server(knee)(np.minimum(loads, cap))


def universal_scalability(contention: float, crosstalk: float) -> CurveOf:
    """Gunther's law: throughput has a peak and falls."""
    return lambda loads: 100 * loads / (1 + contention * (loads - 1) + crosstalk * loads * (loads - 1))


def many_servers(num_servers: int, *, think: float) -> CurveOf:
    """Closed M/M/c with a think time, exactly: X(n) = G(n - 1) / G(n) by Buzen's convolution; service takes 1."""

    def normaliser(customers: int) -> float:
        served = np.cumprod([1.0, *(1 / min(k, num_servers) for k in range(1, customers + 1))])
        thinking = np.cumprod([1.0, *(think / k for k in range(1, customers + 1))])
        return float(served @ thinking[::-1])

    return lambda loads: np.array([100 * normaliser(int(n) - 1) / normaliser(int(n)) for n in loads])


def power(loads: FloatArray, throughput: FloatArray, r: float = 4.5) -> FloatArray:
    """Generalised power as a share of the best on these loads."""
    values = (1 + r) * np.log(throughput) - np.log(loads)
    return np.exp(values - values.max())


def points(
    loads: Sequence[float],
    throughput: Sequence[float] | FloatArray,
    *,
    noise: float | None = None,
    fence: float = np.inf,
) -> list[LadderPoint]:
    """A ladder; `noise` is a relative standard deviation that the stages' intervals admit to."""
    return [
        LadderPoint(
            load=float(load),
            throughput=float(rate),
            throughput_half_width=None if noise is None else 1.96 * noise * float(rate),
            fenced=load > fence,
        )
        for load, rate in zip(loads, throughput, strict=True)
    ]


def noisy(throughput: FloatArray, noise: float, seed: int) -> FloatArray:
    """The same curve as one run would measure it."""
    return throughput * np.exp(noise * np.random.default_rng(seed).standard_normal(throughput.size))


def climbed(
    config: EngineConfig = records.CHOSEN, loads: Sequence[int] = (1, 2, 4, 8, 16, 20, 24, 32, 64)
) -> tuple[StageRecord, ...]:
    """Stages of `config` at the loads its fence allows, and one at twice the fence."""
    steps = [(load, StageKind.LADDER) for load in loads if load <= config.max_num_seqs]
    steps.append((2 * config.max_num_seqs, StageKind.OVERLOAD))
    return tuple(records.stage(config, load, index=index, kind=kind) for index, (load, kind) in enumerate(steps))
