"""The rules shown beside the knee answer what their own theory says."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tuner.analysis.curves import DOUBLING, batch_server, noisy, universal_scalability
from tuner.analysis.cross_checks import (
    asymptote_crossing,
    cross_check,
    kneedle,
    ten_percent_per_doubling,
    usl_peak,
)

PLAIN_BEND = np.array([100.0, 198, 390, 760, 1440, 2500, 2600, 2620])
LOADS = np.array(DOUBLING, dtype=float)


def test_asymptotes_cross_where_littles_law_says() -> None:
    """The crossing of a hard cap is the cap."""
    assert asymptote_crossing(LOADS, 10 * np.minimum(LOADS, 32)) == pytest.approx(32)


def test_usl_peak_is_recovered_and_not_made_up() -> None:
    """An exact law gives its own peak; curves without a peak in sight, or of another shape, give none."""
    assert usl_peak(LOADS, universal_scalability(0.02, 0.0012)(LOADS)) == pytest.approx(np.sqrt(0.98 / 0.0012))
    assert usl_peak(LOADS, 100 * LOADS) is None
    assert usl_peak(LOADS, batch_server(32)(LOADS)) is None
    assert usl_peak(LOADS, np.array([100.0, 900, 50, 800, 40, 700, 30, 600])) is None


def test_ten_percent_per_doubling() -> None:
    """The first stage from which one more doubling buys less than 10 %, whatever the step really was."""
    assert ten_percent_per_doubling(LOADS, PLAIN_BEND) == 32
    assert ten_percent_per_doubling(np.array([16.0, 24, 32]), np.array([100.0, 106, 120])) is None
    assert ten_percent_per_doubling(np.array([16.0, 24, 32]), np.array([100.0, 105, 120])) == 16


def test_kneedle_finds_the_plain_bend_on_the_linear_axis() -> None:
    """Where the bend is plain, the first or the last stage is no answer; noise of 2 % does not change it."""
    assert kneedle(LOADS, PLAIN_BEND) == 32
    assert cross_check(LOADS, PLAIN_BEND).kneedle == 32
    assert {kneedle(LOADS, noisy(PLAIN_BEND, 0.02, seed)) for seed in range(50)} == {32}


def test_kneedle_makes_up_no_knee() -> None:
    """A straight line, a constant and a curve that only bends upwards have none."""
    assert kneedle(LOADS, 100 * LOADS) is None
    assert kneedle(LOADS, np.full(8, 500.0)) is None
    assert kneedle(LOADS, LOADS**2) is None


def test_too_few_stages_give_no_cross_check() -> None:
    """Two stages have no shape, and nothing is claimed of them."""
    assert set(cross_check(LOADS[:2], LOADS[:2]).model_dump().values()) == {None}
