"""The knee is found where it is known to be, and nothing is called a knee that is none."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import records
from tests.tuner.analysis.curves import (
    DOUBLING,
    CurveOf,
    FloatArray,
    batch_server,
    capped_batch_server,
    climbed,
    many_servers,
    noisy,
    points,
    power,
    universal_scalability,
)
from tuner.analysis.knee import LadderPoint, find_knee, past_the_knee, points_of, suggest_bisection
from tuner.answer import LadderVerdict
from tuner.records import StageKind

PLAIN_BEND = (100, 198, 390, 760, 1440, 2500, 2600, 2620)
SEEDS = 300
NUM_RUNS = 200
REFINED = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256)
DENSE = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 256)
SHORT = (4, 8, 16, 32, 64, 128)


def test_plain_bend_is_found_in_any_order() -> None:
    """A user who exports stages in another order gets the same answer: 32, inside its interval."""
    ladder = points(DOUBLING, PLAIN_BEND)
    finding = find_knee(ladder)
    shuffled = [ladder[i] for i in np.random.default_rng(1).permutation(len(ladder))]

    assert finding.verdict is LadderVerdict.KNEE
    assert finding.load == 32
    assert finding.interval is not None
    assert finding.interval[0] <= 32 <= finding.interval[1]
    assert find_knee(shuffled) == finding


def test_plain_bend_survives_five_percent() -> None:
    """Stages that are up to 5 % off still give 32, in at least 95 of 100 runs."""
    found = 0
    for seed in range(SEEDS):
        factors = np.random.default_rng(seed).uniform(0.95, 1.05, len(DOUBLING))
        found += find_knee(points(DOUBLING, np.array(PLAIN_BEND) * factors), num_bootstrap=1).load == 32

    assert found >= 0.95 * SEEDS


def test_straight_line_has_no_knee_yet() -> None:
    """An engine that still scales is told to be loaded more, not given a knee."""
    finding = find_knee(points(DOUBLING, [100 * load for load in DOUBLING]))

    assert finding.verdict is LadderVerdict.NOT_REACHED
    assert finding.load is None
    assert "128" in finding.warnings[0]
    assert "extend the range" in finding.warnings[0]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05, 0.08])
@pytest.mark.parametrize("loads", [DOUBLING, (4, 6, 8, 12, 16, 24, 32, 48)], ids=["wide", "narrow"])
def test_noise_around_a_constant_is_no_knee(loads: tuple[int, ...], noise: float) -> None:
    """Pure noise does not pass for a bend, which other detectors are confident of."""
    verdicts = [
        find_knee(points(loads, noisy(np.full(8, 500.0), noise, seed)), num_bootstrap=1).verdict for seed in range(100)
    ]

    assert verdicts.count(LadderVerdict.ALREADY_SATURATED) >= 95
    assert find_knee(points(DOUBLING, [500, 505, 498, 503, 499, 502, 501, 500])).load is None


@pytest.mark.parametrize("num_stages", range(5))
def test_too_few_stages_is_an_answer(num_stages: int) -> None:
    """Fewer than five valid stages say so; invalid ones do not count."""
    ladder = points(DOUBLING[:num_stages], PLAIN_BEND[:num_stages])
    ladder += [dataclasses.replace(point, valid=False) for point in points(DOUBLING, PLAIN_BEND)]

    finding = find_knee(ladder)

    assert finding.verdict is LadderVerdict.TOO_FEW_STAGES
    assert str(num_stages) in finding.warnings[0]


def test_graph_grid_dips_are_dips() -> None:
    """Batch sizes without a captured graph fall off a cliff and recover: not saturation, the knee is past them."""
    loads = (80, 88, 96, 97, 100, 104, 112, 128)
    finding = find_knee(points(loads, (4000, 4350, 4700, 3100, 3050, 4950, 5000, 5020)))

    assert finding.load == 104
    assert finding.dips == (97, 100)
    assert any("dip at load 97" in signal for signal in finding.signals)


def test_a_dip_is_never_the_knee() -> None:
    """Where the best load itself has fallen off, what was measured there counts and not what should have been."""
    finding = find_knee(points(DOUBLING, (100, 198, 390, 760, 1440, 1250, 2600, 2620)))

    assert finding.dips == (32,)
    assert finding.load in {16, 64}


def test_collapse_is_said() -> None:
    """A curve that falls past its peak is told from one that dips."""
    finding = find_knee(points(DOUBLING, (100, 195, 380, 700, 1100, 1150, 700, 300)))

    assert finding.load == 16
    assert finding.dips == ()
    assert any("collapses at load 64" in signal for signal in finding.signals)


def test_a_cliff_that_is_climbed_again_does_not_hide_what_stood_before_it() -> None:
    """An engine that loses a third of its throughput past 4 and regains it at four times the load is best at 4."""
    ladder = points((1, 2, 4, 8, 16, 32, 64, 128, 256), (83, 146, 257, 192, 268, 334, 380, 425, 431))

    assert find_knee(ladder).load == 4


def _with_preemptions(throughput: tuple[int, ...], counts: tuple[int, ...]) -> list[LadderPoint]:
    ladder = points((16, 32, 64, 128, 256), throughput)
    return [dataclasses.replace(point, num_preemptions=count) for point, count in zip(ladder, counts, strict=True)]


def test_preemptions_move_the_knee_left() -> None:
    """Throughput bought with preemptions is not recommended: the last stage without them is the knee."""
    cliff = find_knee(_with_preemptions((600, 1100, 1500, 1520, 1100), (0, 0, 0, 40, 480)))
    still_rising = find_knee(_with_preemptions((600, 1150, 2200, 4100, 7800), (0, 0, 0, 40, 480)))

    assert cliff.load is not None
    assert cliff.load <= 64
    assert still_rising.load == 64
    assert any("40 preemptions at load 128" in signal for signal in still_rising.signals)


def test_a_stray_preemption_moves_nothing() -> None:
    """One preemption's rate has an interval that reaches zero; preempting at the lowest load leaves no knee."""
    rising = (600, 1150, 2200, 4100, 7800)

    assert find_knee(_with_preemptions(rising, (0, 0, 0, 1, 0))).verdict is LadderVerdict.NOT_REACHED
    assert find_knee(_with_preemptions(rising, (9, 9, 9, 9, 9))).verdict is LadderVerdict.ALREADY_SATURATED


def test_a_fence_is_not_a_knee() -> None:
    """Throughput that is flat because our own limit is reached does not pass for saturation."""
    loads = np.array(DOUBLING, dtype=float)
    limited = batch_server(500)(np.minimum(loads, 32))
    finding = find_knee(points(DOUBLING, limited, fence=32))

    assert finding.verdict is LadderVerdict.FENCED
    assert "raise max_num_seqs" in finding.warnings[0]
    assert find_knee(points(DOUBLING, batch_server(8)(np.minimum(loads, 32)), fence=32)).load == 8


def test_the_fence_is_known_without_a_stage_past_it() -> None:
    """An overload stage that is invalid or missing does not turn "raise max_num_seqs" into "extend the range"."""
    ladder = points(DOUBLING, [100 * load for load in DOUBLING])
    overload = LadderPoint(load=256, throughput=12_800.0, fenced=True)

    for rest in ([], [dataclasses.replace(overload, valid=False)], [overload]):
        finding = find_knee([*ladder, *rest], fence=128)
        assert finding.verdict is LadderVerdict.FENCED
        assert "raise max_num_seqs" in finding.warnings[0]


def test_a_ladder_that_ended_below_the_fence_is_not_fenced() -> None:
    """A range that stops at 128 of 512 is to be extended: the fence was never met, whatever overload did past it."""
    ladder = points(DOUBLING, [100 * load for load in DOUBLING])
    overload = LadderPoint(load=1024, throughput=51_200.0, fenced=True)

    assert find_knee([*ladder, overload], fence=512).verdict is LadderVerdict.NOT_REACHED


def test_a_fenced_stage_does_not_make_up_the_number() -> None:
    """Power is compared over unfenced stages: four of them and an overload are four."""
    ladder = points(DOUBLING[:4], PLAIN_BEND[:4])
    finding = find_knee([*ladder, LadderPoint(load=16, throughput=760.0, fenced=True)], fence=8)

    assert finding.verdict is LadderVerdict.TOO_FEW_STAGES
    assert "4 valid and unfenced" in finding.warnings[0]


def test_tail_onset_is_reported_with_its_figures() -> None:
    """A p95 that outruns the load is named where it begins, and does not move the knee."""
    ladder = points(DOUBLING, PLAIN_BEND)
    tails = (10, 11, 12, 40, 60, 70, 80, 90)
    tailed = [dataclasses.replace(point, itl_p95_ms=tail) for point, tail in zip(ladder, tails, strict=True)]
    finding = find_knee(tailed)

    assert finding.load == 32
    assert "p95 ITL rises faster than load from 4 to 8: 12 to 40 ms" in finding.signals


def test_cautious_load_is_kleinrocks() -> None:
    """With r = 1 it stands at a / b of a batch server, where r = 4.5 stands at 4.5 times that."""
    loads = np.array((1, 2, 4, 8, 16, 36, 72, 144, 288), dtype=float)
    finding = find_knee(points(loads.tolist(), batch_server(36)(loads), noise=0.01))

    assert finding.load == 36
    assert finding.cautious_load == 8


FAMILIES: dict[str, CurveOf] = {
    "batch": batch_server(23),
    "batch off the ladder": batch_server(45),
    "batch with a cap": capped_batch_server(100, 30),
    "scalability law": universal_scalability(0.02, 0.0012),
    "many servers": many_servers(20, think=0.5),
}
LADDERS = {"short": SHORT, "doubling": DOUBLING, "refined": REFINED, "dense": DENSE}


def _shares_kept(loads: tuple[int, ...], family: str, noise: float) -> FloatArray:
    where = np.array(loads, dtype=float)
    truth = FAMILIES[family](where)
    best = dict(zip(where, power(where, truth), strict=True))
    kept = []
    for seed in range(NUM_RUNS if noise else 1):
        finding = find_knee(points(loads, noisy(truth, noise, seed), noise=noise), num_bootstrap=1)
        kept.append(0.0 if finding.load is None else best[finding.load])
    return np.array(kept)


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_stages_give_the_best_stage(family: str, ladder: str) -> None:
    """Without noise the answer keeps 90 % of the best power on the ladder."""
    assert _shares_kept(LADDERS[ladder], family, 0.0)[0] >= 0.9


@pytest.mark.parametrize("noise", [0.02, 0.05])
@pytest.mark.parametrize("ladder", LADDERS)
def test_batch_server_under_noise(ladder: str, noise: float) -> None:
    """On an engine's own curve the answer keeps 90 % of the best power in 95 of 100 runs, however the ladder is cut."""
    assert np.mean(_shares_kept(LADDERS[ladder], "batch", noise) >= 0.9) >= 0.95


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "batch"])
def test_other_curves_under_noise(family: str) -> None:
    """On a doubling ladder other shapes too keep 90 % of the best power in 95 of 100 runs at 2 % noise."""
    assert np.mean(_shares_kept(DOUBLING, family, 0.02) >= 0.9) >= 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_beats_reading_off_noisy_stages(family: str) -> None:
    """At 8 % noise the answer keeps no less power on average than the stage whose own figure looks best."""
    where = np.array(REFINED, dtype=float)
    truth = FAMILIES[family](where)
    shares = power(where, truth)
    naive = [shares[power(where, noisy(truth, 0.08, seed)).argmax()] for seed in range(NUM_RUNS)]

    assert np.mean(_shares_kept(REFINED, family, 0.08)) >= np.mean(naive)


def test_near_ties_do_not_drift_left() -> None:
    """Where stages around the peak are nearly equal the best one is named: the operating point goes left only once."""
    loads = (1, 2, 4, 8, 16, 19, 23, 27, 32, 64, 128)

    assert find_knee(points(loads, batch_server(23)(np.array(loads, dtype=float)), noise=0.02)).load == 23


def test_one_seed_one_answer_and_more_noise_a_wider_interval() -> None:
    """The interval can be reproduced, holds the knee, and says when the stages are too noisy to tell."""
    where = np.array(DENSE, dtype=float)
    sure = find_knee(points(DENSE, batch_server(23)(where), noise=0.02))
    unsure = find_knee(points(DENSE, batch_server(23)(where), noise=0.15))

    assert sure == find_knee(points(DENSE, batch_server(23)(where), noise=0.02))
    assert sure.interval is not None
    assert unsure.interval is not None
    assert sure.load is not None
    assert sure.interval[0] <= sure.load <= sure.interval[1]
    assert unsure.interval[1] / unsure.interval[0] > sure.interval[1] / sure.interval[0]


numbers = st.one_of(st.floats(), st.sampled_from([0.0, 1.0, 2.0, 4.0, 8.0, 1e308, 5e-324]))
any_point = st.builds(
    LadderPoint,
    load=numbers,
    throughput=numbers,
    throughput_half_width=st.none() | numbers,
    ttft_p95_ms=st.none() | numbers,
    itl_p95_ms=st.none() | numbers,
    num_preemptions=st.none() | st.integers(0, 10**6),
    fenced=st.booleans(),
    valid=st.booleans(),
)


@settings(max_examples=150)
@given(st.lists(any_point, max_size=12), st.integers(0, 2**32 - 1))
def test_any_ladder_has_an_answer(ladder: list[LadderPoint], seed: int) -> None:
    """No table of results, however odd, ends in an exception; the order of its rows never matters."""
    finding = find_knee(ladder, num_bootstrap=20)
    shuffled = [ladder[i] for i in np.random.default_rng(seed).permutation(len(ladder))]

    assert find_knee(shuffled, num_bootstrap=20) == finding
    assert (finding.load is not None) == (finding.verdict is LadderVerdict.KNEE)
    assert finding.load is None or finding.load in {point.load for point in ladder if point.valid and not point.fenced}
    assert isinstance(past_the_knee(ladder), bool)
    suggested = suggest_bisection(ladder)
    assert suggested is None or suggested not in {point.load for point in ladder}


def test_repeats_of_a_load_are_one_stage() -> None:
    """A stage measured twice is one point of the curve, and five rows of one load are not a ladder."""
    once = find_knee(points(DOUBLING, PLAIN_BEND, noise=0.02))
    twice = find_knee(points(DOUBLING * 2, PLAIN_BEND * 2, noise=0.02))

    assert twice.load == once.load
    assert find_knee(points((8,) * 5, (100,) * 5)).verdict is LadderVerdict.TOO_FEW_STAGES


def test_stages_without_throughput_are_named() -> None:
    """A measured zero is left out aloud."""
    finding = find_knee(points((*DOUBLING, 256), (*PLAIN_BEND, 0)))

    assert finding.load == 32
    assert "256" in finding.warnings[0]


def test_only_ladder_stages_are_points() -> None:
    """The burst and the re-measured operating point never bend the curve; a closing overload is fenced."""
    stages = climbed()
    others = (
        records.stage(records.CHOSEN, 44, kind=StageKind.BURST),
        records.stage(records.CHOSEN, 16, kind=StageKind.DOUBLE),
    )
    ladder = points_of([*stages, *others])

    assert len(ladder) == len(stages)
    assert [point.load for point in ladder if point.fenced] == [128]
    assert ladder[3].throughput_half_width == pytest.approx(0.03 * ladder[3].throughput)
    assert find_knee(ladder).load in {20, 24}


def test_doubling_stops_when_the_knee_is_behind() -> None:
    """No launch is spent on loads that cannot change the answer, and none is missing for a verdict."""
    rates = batch_server(8)(np.array(DOUBLING, dtype=float))
    stopped = [past_the_knee(points(DOUBLING[:n], rates[:n], noise=0.02)) for n in range(9)]

    assert stopped == [False] * 6 + [True] * 3
    assert not past_the_knee(points(DOUBLING, [100 * load for load in DOUBLING]))
    assert past_the_knee(points(DOUBLING[:5], [500.0] * 5))


def test_a_bisection_of_a_gap_of_any_width_is_cheap() -> None:
    """A ladder in odd units, with loads in the millions, does not eat the machine's memory."""
    loads = [1e12 * 2**k for k in range(10)]
    load = suggest_bisection(points(loads, [load / (5e12 + load) for load in loads]))
    assert load is not None
    assert loads[0] < load < loads[-1]


def test_bisection_goes_where_the_peak_is() -> None:
    """The next stage is asked for on the side of the best rung where the peak is, and not twice."""
    loads = (1, 2, 4, 8, 16, 32, 64, 128)
    rates = batch_server(23)(np.array(loads, dtype=float))
    ladder = points(loads, rates, noise=0.02)

    suggested = suggest_bisection(ladder)

    assert suggested == 23
    tried = [*ladder, LadderPoint(load=23, throughput=math.nan, valid=False)]
    assert suggest_bisection(tried) == 22
    assert suggest_bisection(points((1, 2, 3), rates[:3], noise=0.02)) is None
    assert suggest_bisection(points(loads[:2], rates[:2])) is None


def test_a_bisection_on_the_graph_grid_asks_for_a_size_with_a_graph() -> None:
    """What pins the knee may be stood at, too; only where the gap holds no such size is another asked for."""
    loads = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    asked = {
        knee: suggest_bisection(
            points(loads, batch_server(knee)(np.array(loads, dtype=float)), noise=0.02), on_graph_grid=True
        )
        for knee in (6, 11, 23, 45, 90, 180, 362)
    }

    assert asked == {6: 6, 11: 11, 23: 24, 45: 48, 90: 88, 180: 184, 362: 368}
