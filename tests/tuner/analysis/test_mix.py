"""What a changed mix of lengths does to a tuned config."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.measure.helpers import record
from tuner.analysis.mix import Mix, Tuned, first_growth, forecast, mix_of
from tuner.answer import Slo

TUNED = Tuned(
    mix=Mix(mean_prompt=200, p95_prompt=300, mean_output=100, p95_output=150),
    running=16,
    budget=2048,
    kv_tokens=77088,
    step_ms=20.0,
    prefill_tokens_per_ms=8.0,
    ttft_p95_ms=150.0,
    itl_p95_ms=60.0,
    slo=Slo(ttft_p95_ms=500.0, itl_p95_ms=100.0),
)


def test_the_mix_it_was_tuned_for_changes_nothing() -> None:
    """The measured figures come back, and nobody is sent to tune again."""
    seen = forecast(TUNED, TUNED.mix)
    assert (seen.step_ms, seen.ttft_p95_ms, seen.itl_p95_ms) == (20.0, 150.0, 60.0)
    assert seen.requests_that_fit == 256
    assert not seen.retune


def test_each_figure_moves_by_what_it_depends_on() -> None:
    """Prompts four times as long: the mean step holds 128 tokens instead of 32, the longest prefill is 900 longer."""
    seen = forecast(TUNED, TUNED.mix.scaled(prompt=4))
    assert seen.requests_that_fit == 77088 // 900
    assert seen.step_ms == pytest.approx(20 + (128 - 32) / 8)
    assert seen.itl_p95_ms == pytest.approx(60 + (128 - 32) / 8 + (1200 - 300) / 8)
    assert seen.ttft_p95_ms == pytest.approx(600)
    assert len(seen.reasons) == 3


def test_requests_that_no_longer_fit_ask_for_tuning() -> None:
    """A cache of 77088 tokens holds 73 requests of 1050: with 80 running they preempt."""
    long = Mix(mean_prompt=1000, p95_prompt=1000, mean_output=50, p95_output=50)
    seen = forecast(replace(TUNED, running=80, mix=long), long)
    assert seen.requests_that_fit == 73
    assert seen.reasons == ("73 requests fit the KV cache where 80 run: preemptions",)
    assert forecast(replace(TUNED, kv_tokens=None), long).requests_that_fit is None


def test_a_small_shift_does_not_and_a_large_one_does() -> None:
    """Every day's mix differs a little: an answer that asks for tuning at 5 % is not operable."""
    assert not forecast(TUNED, TUNED.mix.scaled(prompt=1.05)).retune
    assert forecast(TUNED, TUNED.mix.scaled(prompt=3)).retune
    growth, seen = first_growth(TUNED, of_prompts=True) or (0.0, None)
    assert seen is not None
    assert 1.05 < growth < 3
    assert first_growth(replace(TUNED, kv_tokens=None), of_prompts=True, most=growth / 1.06) is None


@given(st.floats(1, 10), st.floats(1, 10))
def test_longer_prompts_never_look_better(one: float, other: float) -> None:
    """More prefill never lowers a latency nor lets more requests fit."""
    short, long = (forecast(TUNED, TUNED.mix.scaled(prompt=growth)) for growth in sorted((one, other)))
    assert short.ttft_p95_ms <= long.ttft_p95_ms
    assert short.step_ms <= long.step_ms
    assert short.itl_p95_ms <= long.itl_p95_ms + 1e-9
    assert (short.requests_that_fit or 0) >= (long.requests_that_fit or 0)


def test_the_mix_is_that_of_requests_that_succeeded() -> None:
    """A failed stream is short because it failed."""
    whole = [record(index=i, times_s=tuple(float(t) for t in range(1, 2 + i % 2))) for i in range(20)]
    failed = record(times_s=(1.0,), error="died")
    assert mix_of([*whole, failed]) == Mix(mean_prompt=10, p95_prompt=10, mean_output=1.5, p95_output=2)
    assert mix_of([failed]) is None
