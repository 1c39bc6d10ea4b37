"""When a stage has settled, and whether its figures fit together."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.measure.helpers import record
from tuner.measure import steady
from tuner.measure.latency import Floats, Window, finished_inside, rate_estimate
from tuner.measure.transient import transient_end_s
from tuner.records import Estimate, RequestRecord


def test_warm_up_outlasts_the_first_wave() -> None:
    """First requests at a new load are many times slower; with one user still in its first, nothing is measured."""
    even = np.linspace(0, 10, 1000)
    first_wave = partial(steady.is_warm, load=4, times_s=even, now_s=10.0, request_s=2.0)
    assert not first_wave(num_users_through=3)
    assert first_wave(num_users_through=4)


def test_warm_up_outlasts_a_trend() -> None:
    """A rate that still climbs is not the load's own rate."""
    climbing = np.sqrt(np.linspace(0, 100, 1000))
    assert not steady.is_warm(load=1, num_users_through=1, times_s=climbing, now_s=10.0, request_s=10.0)
    assert steady.is_warm(load=1, num_users_through=1, times_s=climbing, now_s=10.0, request_s=1.0)


@given(st.integers(30, 2000), st.integers(0, 1))
def test_a_lasting_difference_is_a_trend_and_an_even_stream_is_none(count: int, fast_half: int) -> None:
    """One half three times as fast as the other is no steady state, whichever half it is."""
    even = np.linspace(0, 9.999, count)
    assert not steady.has_trend(even, Window(0, 10), tolerance=0.5)
    fast = (even >= 5) == bool(fast_half)
    lopsided = np.concatenate((even, even[fast], even[fast]))
    assert steady.has_trend(lopsided, Window(0, 10), tolerance=0.5)


def test_the_noise_of_a_few_events_is_no_trend() -> None:
    """Load 1 gives a few dozen tokens a second: a prefill in one half must not keep warm-up going for ever."""
    counts = (14, 22)
    times = np.concatenate([np.linspace(half, half + 0.99, count) for half, count in enumerate(counts)])
    assert not steady.has_trend(times, Window(0, 2), tolerance=0.25)
    assert steady.has_trend(np.repeat(times, 100), Window(0, 2), tolerance=0.25)


@pytest.mark.parametrize(("low", "high", "precise"), [(95.0, 105.0, True), (94.0, 106.0, False), (None, None, False)])
def test_precise_means_the_half_width_asked_for(low: float | None, high: float | None, precise: bool) -> None:  # noqa: FBT001 - a table's column
    """A stage ends early only when its throughput is known as well as was asked."""
    estimate = Estimate(value=100.0, low=low, high=high, num_samples=10)
    assert steady.is_precise(estimate, target_relative_half_width=0.05) is precise


def test_nothing_is_never_precise() -> None:
    """Zero tokens in every batch have no spread, and are no answer."""
    assert not steady.is_precise(Estimate(value=0, low=0, high=0, num_samples=10), target_relative_half_width=0.05)


def _back_to_back(num_users: int, *, request_s: float, until_s: float) -> list[RequestRecord]:
    """Requests of a closed loop whose users are spread evenly over a request's time."""
    return [
        record(index=num_users * n + user, intended_s=sent_s, times_s=(sent_s + request_s,))
        for n in range(round(until_s / request_s) + 2)
        for user in range(num_users)
        for sent_s in [(n + user / num_users) * request_s]
    ]


@given(st.integers(1, 12), st.floats(0.2, 3.0), st.floats(0.0, 5.0), st.floats(4.0, 40.0))
def test_littles_law_holds_for_a_full_house(num_users: int, request_s: float, start_s: float, length_s: float) -> None:
    """Users back to back, windows that cut through requests: off by no more than the cut requests explain."""
    window = Window(start_s, start_s + length_s)
    records = finished_inside(_back_to_back(num_users, request_s=request_s, until_s=window.end_s), window)
    ratio = steady.littles_law_ratio(records, window, mean_in_flight=float(num_users))
    if len(records) < 30 or length_s < 3 * request_s:
        assert ratio is None
    else:
        assert ratio == pytest.approx(1.0, abs=request_s / length_s + 1e-9)


def test_a_queue_that_grows_is_no_steady_state() -> None:
    """Throughput is flat while requests wait longer and longer: the p95 of such a window is of no load at all."""
    rng = np.random.default_rng(0)
    noise = rng.lognormal(0.0, 0.3, 200)
    assert steady.drifts((np.linspace(0.1, 2.0, 200) * noise).tolist())
    assert steady.drifts((np.linspace(2.0, 0.1, 200) * noise).tolist())
    assert not steady.drifts((np.linspace(1.0, 1.2, 200) * noise).tolist())


@given(st.lists(st.floats(1e-4, 1e3), max_size=60), st.integers(0, 1000))
def test_chance_is_no_drift(latencies: list[float], seed: int) -> None:
    """However latencies scatter, in a random order both halves are alike; too few say nothing."""
    shuffled = np.random.default_rng(seed).permutation(np.repeat(latencies, 20)).tolist()
    assert not steady.drifts(shuffled[:11])
    assert not steady.drifts([1.0] * len(shuffled))


def test_the_noise_of_latencies_is_seldom_a_drift() -> None:
    """A stage called unsteady is measured again: chance must not cost a fiftieth of all stages."""
    rng = np.random.default_rng(1)
    assert sum(steady.drifts(rng.exponential(1.0, 60).tolist()) for _ in range(1000)) <= 20


def test_littles_law_can_fail() -> None:
    """Completions that vanish, and latencies that hold time which was not spent in flight, each show."""
    window = Window(5.0, 25.0)
    records = finished_inside(_back_to_back(4, request_s=1.0, until_s=25.0), window)
    early = [sound.model_copy(update={"intended_s": sound.intended_s - 1.0}) for sound in records]
    assert steady.littles_law_ratio(records[::2], window, mean_in_flight=4.0) == pytest.approx(0.5, abs=0.03)
    assert steady.littles_law_ratio(early, window, mean_in_flight=4.0) == pytest.approx(2.0, abs=0.1)
    assert steady.littles_law_ratio(records, window, mean_in_flight=0.0) is None


def _correlated_events(rng: np.random.Generator, *, rate: float, request_s: float, length_s: float) -> Floats:
    """Events whose rate swings by 10 % and is correlated over a request's time and no longer: averaged noise."""
    step_s = 0.02
    num_steps, span = round(length_s / step_s), round(request_s / step_s)
    walk = np.concatenate(([0.0], np.cumsum(rng.standard_normal(num_steps + span))))
    swing = (walk[span : span + num_steps] - walk[:num_steps]) / span**0.5
    counts = rng.poisson(rate * step_s * np.maximum(0.0, 1 + 0.1 * swing))
    return np.repeat(np.arange(num_steps) * step_s, counts) + rng.uniform(0, step_s, counts.sum())


def _reported(times_s: Floats, *, request_s: float, max_s: float) -> Estimate:
    """The estimate of a stage that is polled ten times a second and ends when a look finds it precise."""
    looks = steady.Looks(1.0)
    for length_s in np.arange(0.1, max_s, 0.1):
        if not looks.is_due(length_s, request_s=request_s):
            continue
        found = rate_estimate(times_s, _settled(times_s, length_s, request_s), correlation_s=request_s)
        if steady.is_precise(found, target_relative_half_width=0.05):
            return steady.widened(found)
    return rate_estimate(times_s, _settled(times_s, max_s, request_s), correlation_s=request_s)


def _settled(times_s: Floats, length_s: float, request_s: float) -> Window:
    return Window(transient_end_s(times_s, Window(0.0, length_s), request_s=request_s), length_s)


@pytest.mark.parametrize("request_s", [0.3, 1.0, 2.0])
def test_a_stage_that_stops_when_it_is_sure_is_sure(request_s: float) -> None:
    """Stopping at the first narrow interval picks narrow ones by chance: those reported must still hold the rate."""
    covered = 0
    for seed in range(500):
        events = _correlated_events(np.random.default_rng(seed), rate=400.0, request_s=request_s, length_s=30.0)
        found = _reported(events, request_s=request_s, max_s=30.0)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 400.0 <= found.high
    assert covered >= 0.9 * 500


def test_looks_are_few() -> None:
    """Each look is a chance to stop at a fluke: each waits for a window a quarter longer than the last."""
    looks = steady.Looks(1.0)
    taken = [length_s for length_s in np.arange(0.1, 30.0, 0.1) if looks.is_due(length_s, request_s=0.4)]
    assert taken[0] >= 2.0
    assert all(after >= 1.25 * before for before, after in pairwise(taken))
    assert 5 <= len(taken) <= 13


def test_widening_keeps_the_figure() -> None:
    """Only the claim of how sure it is changes; an unknown interval stays unknown."""
    assert steady.widened(Estimate(value=100, low=90, high=110, num_samples=5)) == Estimate(
        value=100, low=86, high=114, num_samples=5
    )
    bare = Estimate(value=100, num_samples=5)
    assert steady.widened(bare) == bare
