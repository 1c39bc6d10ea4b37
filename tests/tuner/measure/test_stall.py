"""A quiet engine is stuck only where its own figures say so."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.measure.prometheus import MetricsSnapshot
from tuner.measure.stall import is_idle, is_stuck, moved


def scrape(**said: Any) -> MetricsSnapshot:
    """A scrape of an engine that waits with six requests, unless told otherwise; None is what it did not say."""
    names = ("preemptions", "prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits")
    unknown: dict[str, Any] = dict.fromkeys(names)
    return MetricsSnapshot(**{"at_s": 0.0, "running": 0, "waiting": 6, "kv_cache_usage": 0.0, **unknown, **said})


STILL = [scrape(generation_tokens=7)] * 3


def test_waiting_requests_and_a_constant_counter_are_a_stall() -> None:
    """Health answers 200, six wait, nothing runs, no token is made: for minutes, if nobody looks."""
    assert is_stuck(STILL)
    assert not is_idle(STILL)


@pytest.mark.parametrize(
    "change",
    [{"generation_tokens": 8}, {"prompt_tokens": 9, "generation_tokens": 7}, {"kv_cache_usage": 0.1}],
)
def test_any_figure_that_grows_is_progress(change: dict[str, Any]) -> None:
    """A chunked prefill moves no token counter until its end: its KV blocks show it."""
    before = scrape(prompt_tokens=0, generation_tokens=7)
    after = scrape(**{"prompt_tokens": 0, "generation_tokens": 7, **change})
    assert moved([before, before, after])
    assert not is_stuck([before, before, after])


def test_idle_is_not_a_stall() -> None:
    """An engine without work makes no tokens."""
    idle = [scrape(waiting=0, generation_tokens=7)] * 3
    assert is_idle(idle)
    assert not is_stuck(idle)


@pytest.mark.parametrize("samples", [[], [scrape(generation_tokens=7)], [scrape()] * 3])
def test_what_is_not_said_is_not_held_against_the_engine(samples: list[MetricsSnapshot]) -> None:
    """No scrape, one scrape, or no token counter: nobody can tell, so nobody is blamed."""
    assert moved(samples) is None
    assert not is_stuck(samples)
