"""Other people's requests are seen on the engine's page, and our own are never taken for them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.measure.helpers import record
from tuner.load.in_flight import InFlight
from tuner.load.log import LoadLog
from tuner.measure.others import FEWEST_SCRAPES, foreign_ended, foreign_in_flight
from tuner.measure.prometheus import MetricsSnapshot, parse_snapshot

FOUR = LoadLog(in_flight=InFlight([(0.0, 4)]))


def _scrape(at_s: float, running: int | None, waiting: int | None = 0, ended: int | None = None) -> MetricsSnapshot:
    unknown: dict[str, Any] = dict.fromkeys(
        ("kv_cache_usage", "preemptions", "prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits")
    )
    return MetricsSnapshot(at_s=at_s, running=running, waiting=waiting, requests_ended=ended, **unknown)


def test_someone_who_is_always_there_is_seen_at_the_scrapes() -> None:
    """One steady neighbour at load 1 halves what is called the unloaded engine."""
    seen = [_scrape(0.2 * n, 4, 1) for n in range(10)]
    assert foreign_in_flight(seen, FOUR) == 1
    assert foreign_in_flight(seen[: FEWEST_SCRAPES - 1], FOUR) is None
    assert foreign_in_flight([_scrape(each.at_s, None) for each in seen], FOUR) is None


def test_what_was_hung_up_on_before_the_stage_is_not_other_people() -> None:
    """The engine is rid of it soon; a stage that was thrown away for it would cost the ladder its next rung."""
    seen = [_scrape(0.2 * n, 4 + (60 if n < 4 else 0)) for n in range(10)]
    assert foreign_in_flight(seen, FOUR) == 0
    page = 'vllm:request_success_total{finished_reason="%s"} %d\n'
    ends = [parse_snapshot(page % ("length", n) + page % ("abort", 64 * n), at_s=float(n)) for n in (0, 1)]
    assert foreign_ended(*ends, [record(times_s=(0.4, 0.5))]) == 0


@given(st.lists(st.integers(0, 50), min_size=10, max_size=40), st.floats(0.0, 0.5))
def test_our_own_are_never_others_however_late_the_page_is(counts: list[int], late_s: float) -> None:
    """A gauge is as old as the engine's last step: what has ended since is still in it."""
    log = LoadLog(in_flight=InFlight([(0.3 * n, count) for n, count in enumerate(counts)]))
    seen = [_scrape(0.3 * n + late_s, count) for n, count in enumerate(counts)]
    assert foreign_in_flight(seen, log) == 0


def test_requests_that_ended_beyond_ours_are_others() -> None:
    """Many short ones are over between two scrapes."""
    ours = [record(index=n, intended_s=n / 10, times_s=(n / 10 + 0.05,)) for n in range(20)]
    assert foreign_ended(_scrape(0.0, 1, 0, 100), _scrape(2.0, 1, 0, 150), ours) == 30
    assert foreign_ended(_scrape(0.0, 1, 0, 100), _scrape(2.0, 1, 0, 110), ours) == 0
    assert foreign_ended(_scrape(0.0, 1, 0, 100), _scrape(2.0, 1, 0, 7), ours) is None
    assert foreign_ended(_scrape(0.0, 1, 0), _scrape(2.0, 1, 0, 7), ours) is None
    assert foreign_ended(None, _scrape(2.0, 1, 0, 7), ours) is None
