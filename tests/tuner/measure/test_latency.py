"""Figures and their intervals, against values known from elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.measure.helpers import record
from tuner.measure import latency
from tuner.measure.latency import Window


@pytest.mark.parametrize(
    ("num_samples", "q", "ranks"),
    [
        (0, 0.5, None),
        (5, 0.5, None),
        (6, 0.5, (1, 6)),
        # As tables for the sign test have it: the median of 25 lies between the 8th and the 18th.
        (25, 0.5, (8, 18)),
        (40, 0.95, None),
        (58, 0.95, None),
        (59, 0.95, (50, 59)),
        (28, 0.9, None),
        (29, 0.9, (21, 29)),
        (298, 0.99, None),
        (299, 0.99, (289, 299)),
        (1000, 0.5, (470, 532)),
    ],
)
def test_ranks_of_order_statistics(num_samples: int, q: float, ranks: tuple[int, int] | None) -> None:
    """Under 59 samples the slowest one says nothing about a p95, and nobody may rank on it."""
    assert latency.order_statistics_interval(num_samples, q) == ranks


@given(st.integers(6, 400), st.sampled_from([0.5, 0.9, 0.95]))
def test_an_interval_covers_what_it_promises(num_samples: int, q: float) -> None:
    """The exact binomial probability between the ranks is at least 95 %: no interval is narrower than it says."""
    ranks = latency.order_statistics_interval(num_samples, q)
    inside = [math.comb(num_samples, k) * q**k * (1 - q) ** (num_samples - k) for k in range(num_samples + 1)]
    if ranks is None:
        assert inside[-1] > 0.05 or sum(inside[1:-1]) < 0.95
    else:
        assert 1 <= ranks[0] < ranks[1] <= num_samples
        assert sum(inside[ranks[0] : ranks[1]]) >= 0.95 - 1e-9


def test_too_few_samples_have_a_value_and_no_interval() -> None:
    """Such a stage still serves the throughput curve."""
    few = latency.percentile(range(40), 0.95)
    assert (few.value, few.low, few.high, few.num_samples) == (37, None, None, 40)
    none = latency.percentile([], 0.95)
    assert math.isnan(none.value)
    assert none.num_samples == 0


@given(st.lists(st.floats(0, 1e6), min_size=59, max_size=300), st.permutations([0, 1]))
def test_a_percentile_lies_in_its_interval_in_any_order(samples: list[float], order: list[int]) -> None:
    """The figure and its interval must never contradict each other."""
    found = latency.percentile(samples if order[0] else samples[::-1], 0.95)
    assert found.low is not None
    assert found.high is not None
    assert min(samples) <= found.low <= found.value <= found.high <= max(samples)


def test_gaps_count_as_one_sample_a_request() -> None:
    """Fifty thousand gaps of fifty requests are fifty samples: else a lucky minute looks like certainty."""
    rng = np.random.default_rng(0)
    window = Window(0.0, 1e9)
    records = [record(index=n, times_s=tuple(np.cumsum(rng.exponential(size=1000)) + 1.0)) for n in range(58)]
    assert latency.itl_percentile(records, window, 0.95).low is None
    records.append(record(index=59, times_s=tuple(np.cumsum(rng.exponential(size=1000)) + 1.0)))
    found = latency.itl_percentile(records, window, 0.95)
    assert found.num_samples == 59
    assert found.low is not None
    assert found.value == pytest.approx(-math.log(0.05), rel=0.05)


def test_tokens_that_came_with_the_first_have_no_gap() -> None:
    """An engine that packs its first chunk would show an ITL of zero."""
    packed = record(times_s=(1.0, 1.0, 1.0, 1.5, 2.0))
    assert latency.itl_gaps_s(packed, Window(0, 9)) == [0.5, 0.5]


def test_gaps_belong_to_the_window_they_end_in() -> None:
    """Each gap is counted once when windows follow each other."""
    stream = record(times_s=(1.0, 2.0, 3.0, 4.0))
    assert len(latency.itl_gaps_s(stream, Window(2.0, 4.0))) == 2
    assert len(latency.itl_gaps_s(stream, Window(4.0, 5.0))) == 1


def test_latencies_count_from_the_intended_send() -> None:
    """What a late sender hides, a user would have waited."""
    late = record(intended_s=1.0, sent_s=1.5, times_s=(2.0, 2.5, 3.0))
    assert latency.ttft_s(late) == 1.0
    assert latency.e2e_s(late) == 2.0
    assert latency.tpot_s(late) == 0.5
    assert latency.tpot_s(record(times_s=(2.0,))) is None


def test_requests_are_counted_where_they_finish() -> None:
    """Also those sent before the window: asking for whole ones would prefer the short."""
    inside = record(index=1, intended_s=0.0, times_s=(2.0, 3.0))
    before = record(index=2, intended_s=0.0, times_s=(0.5, 0.9))
    running = record(index=3, intended_s=0.0, times_s=(2.0,), unfinished=True, finished_s=3.0)
    assert latency.finished_inside([inside, before, running], Window(1.0, 4.0)) == [inside]


def test_throughput_counts_arrivals_not_finished_requests() -> None:
    """Tokens of requests still in flight are work done; those of failed requests are not."""
    finished = record(index=1, times_s=(0.5, 1.5, 2.5))
    running = record(index=2, times_s=(1.6, 1.7), unfinished=True, finished_s=9.0)
    failed = record(index=3, times_s=(1.8,), error="cut")
    assert sorted(latency.arrival_times_s([finished, running, failed], Window(1.0, 2.0))) == [1.5, 1.6, 1.7]


def test_student_t_is_the_table() -> None:
    """Known to three places from any statistics book."""
    assert latency.student_t_975(1) == 12.706
    assert latency.student_t_975(4) == 2.776
    assert latency.student_t_975(19) == 2.093


def test_batch_means_by_hand() -> None:
    """Five batches of 1, 2, 3, 4, 5 events a second: mean 3, deviation 1.581, half width 2.776 x 1.581 / sqrt 5."""
    times = [batch + (k + 0.5) / (batch + 1) for batch in range(5) for k in range(batch + 1)]
    found = latency.rate_estimate(times, Window(0.0, 5.0), correlation_s=1.0)
    assert found.value == pytest.approx(3.0)
    assert found.low == pytest.approx(3.0 - 2.776 * 2.5**0.5 / 5**0.5)
    assert found.high == pytest.approx(3.0 + 2.776 * 2.5**0.5 / 5**0.5)
    assert found.num_samples == 5


@pytest.mark.parametrize(("correlation_s", "num_batches"), [(0.0, 20), (0.1, 20), (1.0, 10), (9.0, 5)])
def test_batches_are_not_shorter_than_a_request_where_they_can(correlation_s: float, num_batches: int) -> None:
    """Short batches of one long request look alike and would feign precision."""
    found = latency.rate_estimate([], Window(0.0, 10.0), correlation_s=correlation_s)
    assert found.num_samples == num_batches


def test_batch_means_cover_the_true_rate() -> None:
    """On a Poisson stream of known rate about 95 of 100 intervals hold it."""
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(300):
        found = latency.rate_estimate(rng.uniform(0, 10, rng.poisson(1000)), Window(0, 10), correlation_s=0.3)
        hits += found.low is not None and found.high is not None and found.low <= 100 <= found.high
    assert 0.92 <= hits / 300 <= 0.98


def test_waiting_for_a_free_connection_counts_as_the_user_waits() -> None:
    """Eight arrivals 100 ms apart, one at a time, 500 ms each: users wait 1.9 s where a late clock shows 0.5."""
    window = Window(0.0, 10.0)
    records = [
        record(index=n, intended_s=0.1 * n, sent_s=0.5 * n, times_s=(0.5 * n + 0.1, 0.5 * n + 0.5)) for n in range(8)
    ]
    e2e_ms = [1e3 * latency.e2e_s(each) for each in latency.finished_inside(records, window)]
    assert (np.mean(e2e_ms), max(e2e_ms)) == (pytest.approx(1900), pytest.approx(3300))
    assert np.mean([1e3 * (each.sent_s - each.intended_s) for each in records]) == pytest.approx(1400)
    assert {round(1e3 * (each.finished_s - each.sent_s)) for each in records} == {500}
