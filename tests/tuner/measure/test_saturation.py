"""A rate above what a server can serve is noticed, and one below is not blamed."""

from __future__ import annotations

import heapq
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.measure.helpers import record
from tuner.load.arrivals import poisson_s
from tuner.load.in_flight import InFlight
from tuner.load.log import LoadLog
from tuner.measure.latency import Window
from tuner.measure.saturation import is_oversaturated, mann_kendall_z

SLOTS, SERVICE_S, END_S = 8, 0.8, 40.0
CAPACITY_RPS = SLOTS / SERVICE_S


def served(rate_rps: float, seed: int) -> LoadLog:
    """What a sender sees of a server with eight slots, each taken for 0.8 s, by the end."""
    free = [0.0] * SLOTS
    steps: list[tuple[float, int]] = []
    log = LoadLog()
    for number, at_s in enumerate(
        takewhile(lambda at_s: at_s < END_S, poisson_s(rate_rps, np.random.default_rng(seed)))
    ):
        begun_s = max(at_s, heapq.heappop(free))
        heapq.heappush(free, begun_s + SERVICE_S)
        steps += [(at_s, +1), (begun_s + SERVICE_S, -1)]
        if begun_s + SERVICE_S < END_S:
            times = (begun_s + 0.1, begun_s + SERVICE_S)
            log.records.append(record(index=number, intended_s=at_s, times_s=times))
    for at_s, change in sorted(steps):
        log.num_in_flight += change
        log.in_flight.step(at_s, log.num_in_flight)
    return log


def share_found(load: float, *, window: Window, num_seeds: int = 100) -> float:
    """How often a stage at this share of capacity is called oversaturated."""
    return sum(is_oversaturated(served(load * CAPACITY_RPS, seed), window) for seed in range(num_seeds)) / num_seeds


WINDOW = Window(10.0, END_S)


@pytest.mark.parametrize("load", [1.3, 2.0, 5.0])
def test_a_rate_above_capacity_is_found(load: float) -> None:
    """A stage that will never be steady must not use up its whole time, and its p95 is no finding."""
    assert share_found(load, window=WINDOW) >= 0.9


@pytest.mark.parametrize("load", [0.3, 0.7, 0.85])
def test_a_rate_below_capacity_is_not_blamed(load: float) -> None:
    """A safe rate called unsafe buys hardware nobody needs."""
    assert share_found(load, window=WINDOW) <= 0.03


def test_a_short_look_says_nothing() -> None:
    """Two seconds of a burst are not a trend."""
    assert not is_oversaturated(served(2 * CAPACITY_RPS, 0), Window(10.0, 14.0))


def test_a_handful_of_requests_is_no_trend() -> None:
    """Each waits a little longer than the one before and overlaps it more: thirty such say nothing, 300 do."""

    def crowding(count: int) -> LoadLog:
        log = LoadLog()
        for number, at_s in enumerate(np.linspace(0.0, 20.0, count, endpoint=False).tolist()):
            times = (at_s + 0.05 + 0.02 * at_s, at_s + 0.1 + 0.2 * at_s)
            log.records.append(record(index=number, intended_s=at_s, times_s=times))
        ends = [(each.finished_s, -1) for each in log.records]
        for at_s, change in sorted([*((each.intended_s, +1) for each in log.records), *ends]):
            log.num_in_flight += change
            log.in_flight.step(at_s, log.num_in_flight)
        return log

    assert not is_oversaturated(crowding(30), Window(0.0, 20.0))
    assert is_oversaturated(crowding(300), Window(0.0, 20.0))


def test_one_rising_alone_is_not_it() -> None:
    """A queue that fills to its length, or a slower answer to the same load, is another matter."""
    log = served(2 * CAPACITY_RPS, 0)
    level = LoadLog(records=log.records, in_flight=InFlight([(0.0, 8)]))
    quick = [record(index=r.index, intended_s=r.intended_s, times_s=(r.intended_s + 0.1,)) for r in log.records]
    filling = LoadLog(records=quick, in_flight=log.in_flight)
    assert is_oversaturated(log, WINDOW)
    assert not is_oversaturated(level, WINDOW)
    assert not is_oversaturated(filling, WINDOW)
    assert not is_oversaturated(LoadLog(), WINDOW)


def test_the_statistic_is_the_textbooks() -> None:
    """Ten rising values: S = 45, variance 125, z = 44 / 11.18; ties shrink the variance."""
    assert mann_kendall_z(range(10)) == pytest.approx(44 / 125**0.5)
    assert mann_kendall_z([3, 3, 3, 3]) == 0.0
    assert mann_kendall_z([1, 1, 2, 2]) == pytest.approx(3 / ((4 * 3 * 13 - 2 * 2 * 9) / 18) ** 0.5)


@given(st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_backwards_is_the_opposite(values: list[float]) -> None:
    """A test of a rise is one of a fall the other way round, and never fails on what it is given."""
    assert mann_kendall_z(values) == pytest.approx(-mann_kendall_z(values[::-1]))
