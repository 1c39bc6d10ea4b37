"""Figures in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.records import CHOSEN, stage
from tuner import wording
from tuner.records import Estimate


@given(st.floats(min_value=0.001, max_value=1e9))
def test_number_keeps_the_value_and_has_no_exponent(value: float) -> None:
    """A reader can rely on a printed figure to within its last digit, and never meets `1e+06`."""
    text = wording.number(value)

    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.01, abs=0.0005)


def test_unknown_is_not_zero() -> None:
    """A missing counter or memory figure must not read as a good one."""
    assert wording.count(None) == wording.memory(None) == wording.share(None) == "unknown"
    assert wording.count(0) == "0"


def test_too_few_samples_are_said() -> None:
    """A p95 without an interval must not look as sure as one with."""
    assert wording.estimated(Estimate(value=84, num_samples=32), wording.latency) == "84 ms (too few samples: 32)"
    estimate = Estimate(value=1240, low=990, high=1400, num_samples=80)
    assert wording.estimated(estimate, wording.latency) == "1.24 s (990 ms to 1.4 s)"


@pytest.mark.parametrize(
    ("ratio", "start"),
    [
        (Estimate(value=1.06, low=1.02, high=1.1, num_samples=2), "+6.0 % output throughput over"),
        (Estimate(value=1.01, low=0.97, high=1.05, num_samples=2), "No difference"),
        (Estimate(value=0.95, low=0.92, high=0.98, num_samples=2), "Slower than the defaults: -5.0 %"),
        (Estimate(value=1.3, num_samples=1), "+30.0 % output throughput beside the defaults, but too few"),
    ],
)
def test_a_gain_is_no_larger_than_its_interval_allows(ratio: Estimate, start: str) -> None:
    """Nobody is told of a speed-up that noise explains, nor spared a loss."""
    assert wording.gain(ratio).startswith(start)


def test_duration_has_no_sixty_seconds() -> None:
    """59.9 s past a minute is the next minute."""
    assert [wording.duration(s) for s in (5.0, 179.9, 812.0)] == ["5 s", "3 min 00 s", "13 min 32 s"]


def test_what_an_engine_does_not_have_is_said_so() -> None:
    """`unknown` sends somebody looking for a counter, `0` promises one: an engine without it says neither."""
    silent = stage(CHOSEN, 4).model_copy(update={"num_preemptions": None, "kv_cache_usage_peak": None})
    assert (wording.preemptions(silent), wording.kv_use(silent)) == ("unknown", "unknown")
    told = silent.model_copy(update={"not_applicable": ("num_preemptions", "kv_cache_usage_peak")})
    assert (wording.preemptions(told), wording.kv_use(told)) == ("not applicable", "not applicable")
    without = CHOSEN.model_copy(update={"gpu_memory_utilization": None})
    assert wording.memory_share(without) == "not applicable"
    assert wording.config_text(without) == "max_num_seqs=64 max_num_batched_tokens=1024"
