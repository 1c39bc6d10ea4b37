"""The detector on ladders it was not shaped on: its answers are good, its verdicts right, whatever it is handed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.tuner.analysis.curves import DOUBLING, CurveOf, batch_server, noisy, points
from tests.tuner.analysis.harder import draw_harder
from tests.tuner.analysis.held_out import FAMILIES, SHARE_OF_LADDERS, draw, many_servers, share_good
from tuner.analysis.knee import LadderPoint, find_knee
from tuner.analysis.slo import highest_inside
from tuner.answer import LadderVerdict

UNEVEN = (3, 4, 7, 9, 16, 21, 40, 64, 70, 128)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_keep_the_power(family: str) -> None:
    """Whoever measures an unknown engine gets 90 % of the best power on their ladder, in 95 of 100 ladders."""
    assert share_good(lambda seed: draw(family, seed)) >= SHARE_OF_LADDERS


def test_a_cliff_that_is_climbed_again_is_seen() -> None:
    """An engine whose throughput breaks off and then rises on is not taken for a noisy one, in 93 of 100 ladders."""
    assert share_good(lambda seed: draw_harder("cliff climbed again", seed)) >= 0.93


def test_the_answer_does_not_depend_on_the_order() -> None:
    """Results that come as files in any order give one answer."""
    for seed in range(20):
        ladder = draw("KV cliff", seed).points()
        assert find_knee(ladder, num_bootstrap=20) == find_knee(ladder[::-1], num_bootstrap=20)


def test_mean_value_analysis_is_exact() -> None:
    """The curves are what theory says: Buzen's convolution, another exact method, gives the same throughput."""
    rng = np.random.default_rng(3)
    loads = np.arange(1.0, 9.0)
    rates, _ = many_servers(loads, rng)
    again = np.random.default_rng(3)
    servers = max(1, round(float(np.exp(again.uniform(np.log(loads[1]), np.log(loads[-2]))))))
    think = again.uniform(0.05, 2)

    def normaliser(customers: int) -> float:
        served = np.cumprod([1.0, *(1 / min(k, servers) for k in range(1, customers + 1))])
        thinking = np.cumprod([1.0, *(think / k for k in range(1, customers + 1))])
        return float(served @ thinking[::-1])

    assert rates == pytest.approx([normaliser(int(n) - 1) / normaliser(int(n)) for n in loads])


NO_KNEE: dict[str, tuple[CurveOf, LadderVerdict]] = {
    "flat": (lambda loads: np.full(loads.size, 500.0), LadderVerdict.ALREADY_SATURATED),
    "straight": (lambda loads: 100 * loads, LadderVerdict.NOT_REACHED),
    "fenced": (lambda loads: 100 * np.minimum(loads, 64), LadderVerdict.FENCED),
}


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("loads", [DOUBLING, UNEVEN], ids=["doubling", "uneven"])
@pytest.mark.parametrize("shape", NO_KNEE)
def test_what_has_no_knee_gets_none(shape: str, loads: tuple[int, ...], noise: float) -> None:
    """A constant is saturated, a line goes on, a limit of one's own is a fence: in 95 of 100 runs."""
    curve, expected = NO_KNEE[shape]
    truth = curve(np.array(loads, dtype=float))
    fence = 64 if expected is LadderVerdict.FENCED else math.inf
    ladders = [points(loads, noisy(truth, noise, seed), fence=fence) for seed in range(100)]
    verdicts = [find_knee(ladder, num_bootstrap=1).verdict for ladder in ladders]

    assert verdicts.count(expected) >= 95


def test_short_and_empty_ladders_say_so() -> None:
    """Four stages or none are too few, however plain the bend looks."""
    rates = batch_server(8)(np.array(DOUBLING, dtype=float))

    for num_stages in range(5):
        finding = find_knee(points(DOUBLING[:num_stages], rates[:num_stages]))
        assert finding.verdict is LadderVerdict.TOO_FEW_STAGES
    assert find_knee(points(DOUBLING[:5], rates[:5])).verdict is not LadderVerdict.TOO_FEW_STAGES


def test_a_cliff_does_not_pass_for_a_saturated_engine() -> None:
    """Where most stages lie past a collapse, the few before it still hold the answer."""
    loads = (3, 4, 6, 9, 16, 19, 33, 54, 80, 130, 150, 245)
    rates = (210, 267, 346, 210, 191, 185, 164, 146, 136, 122, 122, 109)
    finding = find_knee(points(loads, rates, noise=0.01))

    assert finding.load == 6
    assert any("collapses at load 9" in signal for signal in finding.signals)


def test_one_odd_stage_is_named_and_not_followed() -> None:
    """A point with throughput from nowhere neither becomes the knee nor hides it."""
    loads = np.array(DOUBLING, dtype=float)
    ladder = points(DOUBLING, batch_server(32)(loads), noise=0.02)
    ladder[2] = LadderPoint(load=4, throughput=ladder[2].throughput / 3, throughput_half_width=1.0)

    assert find_knee(ladder).load == 32
    assert find_knee(ladder).dips == (4,)


@pytest.mark.parametrize("itl_limit_ms", [30.0, 60.0, 1000.0])
def test_the_recommended_load_is_measured_inside_and_left_of_the_knee(itl_limit_ms: float) -> None:
    """A plain bend at 32 recommends less than 32, a load that was tried, with its tail inside the limit."""
    rates = (100, 198, 390, 760, 1440, 2500, 2600, 2620)
    tails = (10.0, 10.1, 10.3, 10.5, 11.1, 12.8, 24.6, 48.9)
    ladder = [
        LadderPoint(load=float(load), throughput=float(rate), itl_p95_ms=tail)
        for load, rate, tail in zip(DOUBLING, rates, tails, strict=True)
    ]
    point = highest_inside(ladder, find_knee(ladder), itl_p95_ms=itl_limit_ms)

    assert point in ladder
    assert point is not None
    assert point.load == 16


def test_preempting_stages_are_not_recommended() -> None:
    """With 40 and 480 preemptions at the fourth and fifth stage, the third or an earlier one is recommended."""
    counts, rates = (0, 0, 0, 40, 480), (600, 1100, 1500, 1520, 1100)
    ladder = [
        LadderPoint(load=float(load), throughput=float(rate), num_preemptions=count)
        for load, rate, count in zip((16, 32, 64, 128, 256), rates, counts, strict=True)
    ]
    finding = find_knee(ladder)
    point = highest_inside(ladder, finding)

    assert finding.load is not None
    assert finding.load <= 64
    assert point is not None
    assert point.load <= 64


def test_the_unit_of_the_load_axis_does_not_move_the_knee() -> None:
    """Loads counted in hundreds of users give the same stage: what is judged is ratios, as on a log axis."""
    rates = (100, 198, 390, 760, 1440, 2500, 2600, 2620)

    assert find_knee(points([100 * load for load in DOUBLING], rates)).load == 3200
