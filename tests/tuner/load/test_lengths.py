"""Lengths stay in their range, keep their mean, and go together as far as asked."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scipy.stats import spearmanr

from tuner.inputs import InputError
from tuner.load.lengths import Length, pairs
from tuner.load.workload import load_workload

LENGTH: TypeAdapter[Length] = TypeAdapter(Length)

FIXED = st.integers(1, 5000).map(lambda tokens: {"kind": "fixed", "tokens": tokens})


@st.composite
def distributions(draw: st.DrawFn) -> dict[str, Any]:
    """Any length a user may write down and that holds something."""
    low, span = draw(st.integers(1, 2000)), draw(st.integers(0, 5000))
    kind = draw(st.sampled_from(["uniform", "normal", "lognormal", "empirical"]))
    asked: dict[str, Any] = {"kind": kind, "low": low, "high": low + span}
    if kind in {"normal", "lognormal"}:
        asked |= {"median": draw(st.floats(low, low + span + 1)), "cv": draw(st.floats(0.05, 5))}
    if kind == "empirical":
        inside = st.integers(low, low + span)
        asked["values"] = draw(st.lists(inside, min_size=1, max_size=20)) + draw(st.lists(st.integers(1, 9000)))
    return asked


@given(FIXED | distributions(), st.floats(0, 1), st.floats(0, 1))
def test_any_draw_is_inside_and_rises_with_its_share(asked: dict[str, Any], one: float, other: float) -> None:
    """A length outside its range would fail in the engine, or pass a `max_model_len` it was checked against."""
    length = LENGTH.validate_python(asked)
    short, long = length.quantile(min(one, other)), length.quantile(max(one, other))
    assert asked.get("low", 1) <= short <= long <= length.longest
    assert length.longest <= asked.get("high", length.longest)
    assert isinstance(short, int)


@given(FIXED | distributions())
def test_the_mean_is_that_of_what_is_drawn(asked: dict[str, Any]) -> None:
    """Memory and stage times are reckoned from the mean: a mean from before the cut is another workload's."""
    length = LENGTH.validate_python(asked)
    shares = (np.arange(4000) + 0.5) / 4000
    drawn = np.mean([length.quantile(float(share)) for share in shares])
    assert length.mean == pytest.approx(drawn, rel=0.01, abs=0.5)


def test_a_lognormal_has_the_median_and_the_spread_it_was_given() -> None:
    """What a user reads off a dashboard is what is sent."""
    length = LENGTH.validate_python({"kind": "lognormal", "median": 800, "cv": 1.0, "high": 1_000_000})
    rng = np.random.default_rng(0)
    drawn = np.array([length.quantile(rng.random()) for _ in range(40_000)])
    assert np.median(drawn) == pytest.approx(800, rel=0.03)
    assert drawn.std() / drawn.mean() == pytest.approx(1.0, rel=0.1)


def test_weights_say_how_often_a_value_comes() -> None:
    """A histogram of a log is a workload."""
    length = LENGTH.validate_python({"kind": "empirical", "values": [100, 10, 5000], "weights": [1, 3, 9], "high": 200})
    drawn = [length.quantile((i + 0.5) / 100) for i in range(100)]
    assert (drawn.count(10), drawn.count(100), length.longest, length.mean) == (75, 25, 100, 32.5)


@pytest.mark.parametrize("correlation", [-0.7, 0.0, 0.5, 0.95])
def test_input_and_output_go_together_as_asked(correlation: float) -> None:
    """Long questions get long answers: without that, memory at the peak is another one."""
    one = LENGTH.validate_python({"kind": "lognormal", "median": 500, "cv": 1.2, "high": 8000})
    other = LENGTH.validate_python({"kind": "normal", "median": 300, "cv": 0.3, "high": 2000})
    rng = np.random.default_rng(1)
    drawn = np.array(list(islice(pairs(one, other, correlation=correlation, rng=rng), 20_000)))
    assert spearmanr(drawn[:, 0], drawn[:, 1]).statistic == pytest.approx(correlation, abs=0.02)
    assert drawn[:, 0].mean() == pytest.approx(one.mean, rel=0.05)


@pytest.mark.parametrize(
    ("length", "words"),
    [
        ({"kind": "normal", "median": 10, "cv": 0.1, "low": 100, "high": 200}, r"low=100 to high=200.*median=10"),
        ({"kind": "lognormal", "median": 10, "cv": 1}, r"'input_len.lognormal.high' is missing"),
        ({"kind": "normal", "median": 10, "cv": 0, "high": 20}, "cv"),
        ({"kind": "uniform", "low": 1, "high": 10**9}, "high"),
        ({"kind": "empirical", "values": []}, "values"),
        ({"kind": "empirical", "values": [5], "low": 6}, r"low=6"),
        ({"kind": "empirical", "values": [5, 6], "weights": [1]}, "1 weights for 2 values"),
        ({"kind": "empirical", "values": [5, 6], "weights": [1, -1]}, "weight"),
    ],
)
def test_what_is_no_distribution_is_refused_with_its_values(length: dict[str, Any], words: str) -> None:
    """A slip in a job file is told before an engine is launched for it."""
    with pytest.raises(InputError, match=words):
        load_workload({"input_len": length, "output_len": {"kind": "fixed", "tokens": 5}})
