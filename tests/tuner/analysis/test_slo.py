"""The SLO is derived from the unloaded engine, and nobody passes it by luck or by silence."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tuner.analysis.curves import climbed
from tuner.analysis.knee import LadderPoint
from tuner.analysis.slo import (
    SloBoundary,
    complies,
    derive_slo,
    highest_inside,
    keeps_headroom,
    least_violating_stage,
    load_left_of,
    operating_point,
    slo_boundary,
    violations,
)
from tuner.answer import KneeFinding, LadderVerdict, Slo
from tuner.records import Estimate, StageKind

LADDER = climbed()
KNEE_AT_24 = KneeFinding(verdict=LadderVerdict.KNEE, load=24.0)
WIDE = Slo(ttft_p95_ms=1e6, itl_p95_ms=1e6)


def test_derived_limits_are_multiples_of_the_unloaded_medians() -> None:
    """Without limits of their own, users get 10 x TTFT and 5 x ITL of load 1, and are told so."""
    alone = LADDER[0]
    slo = derive_slo(LADDER)

    assert slo is not None
    assert slo.derived
    assert slo.ttft_p95_ms == pytest.approx(10 * alone.ttft_p50_ms.value)
    assert slo.itl_p95_ms == pytest.approx(5 * alone.itl_p50_ms.value)


def test_no_unloaded_stage_no_limits() -> None:
    """Limits are not made up from a loaded engine, an invalid stage or another kind of stage."""
    invalid = LADDER[0].model_copy(update={"valid": False})
    confirmed = LADDER[0].model_copy(update={"kind": StageKind.OPERATING})

    assert derive_slo([invalid, confirmed, *LADDER[1:]]) is None


def test_violations_are_signed_log_ratios() -> None:
    """A sampler learns how far off a stage is, and 0 or less is inside."""
    stage = LADDER[3]
    at_limit = Slo(ttft_p95_ms=stage.ttft_p95_ms.value, itl_p95_ms=stage.itl_p95_ms.value / 2)

    assert violations(stage, at_limit) == pytest.approx({"ttft_p95": 0.0, "itl_p95": math.log(2)})
    assert not complies(stage, at_limit)
    assert complies(stage, WIDE)


@pytest.mark.parametrize(
    "p95",
    [Estimate(value=1.0, num_samples=40), Estimate(value=math.nan, num_samples=0), Estimate(value=0.0, num_samples=99)],
)
def test_unproven_p95_never_complies(p95: Estimate) -> None:
    """A p95 from 40 samples, or none at all, is not compliant however good it looks."""
    stage = LADDER[3].model_copy(update={"ttft_p95_ms": p95})

    assert not complies(stage, WIDE)
    assert violations(stage, WIDE)["ttft_p95"] > 0


def test_operating_point_is_strictly_left_of_the_knee() -> None:
    """The point with the most throughput left of the knee, one step and not two."""
    point = operating_point(LADDER, KNEE_AT_24, WIDE)

    assert point is not None
    assert point.load == 20


def test_slo_and_headroom_bound_the_operating_point() -> None:
    """A stage over a limit, with a preemption, without KV headroom, invalid, or with unknown figures is passed over."""
    slo = Slo(ttft_p95_ms=1e6, itl_p95_ms=LADDER[4].itl_p95_ms.value)
    assert operating_point(LADDER, KNEE_AT_24, slo) == LADDER[4]

    for spoilt in (
        {"num_preemptions": 1},
        {"num_preemptions": None},
        {"kv_cache_usage_peak": 0.97},
        {"kv_cache_usage_peak": None},
        {"valid": False},
        {"fenced": True},
    ):
        ladder = [s.model_copy(update=spoilt) if s.load in {16, 20} else s for s in LADDER]
        point = operating_point(ladder, KNEE_AT_24, WIDE)
        assert point is not None
        assert point.load == 8
    assert operating_point(LADDER, KNEE_AT_24, Slo(ttft_p95_ms=0.1, itl_p95_ms=0.1)) is None
    assert keeps_headroom(LADDER[4].model_copy(update={"kv_cache_usage_peak": 0.95}))
    assert not keeps_headroom(LADDER[4].model_copy(update={"kv_cache_usage_peak": 0.96}))


def test_without_a_knee_the_fence_is_safe_to_stand_at() -> None:
    """A fenced ladder's top is allowed; a saturated one's is its lowest load, whatever the later stages say."""
    fenced = KneeFinding(verdict=LadderVerdict.FENCED)
    saturated = KneeFinding(verdict=LadderVerdict.ALREADY_SATURATED)
    ladder = [s for s in LADDER if s.load > 2]
    top, bottom = operating_point(ladder, fenced, WIDE), operating_point(ladder, saturated, WIDE)

    assert top is not None
    assert bottom is not None
    assert (top.load, bottom.load) == (64, 4)
    assert operating_point([], fenced, WIDE) is None


def test_least_violating_stage_is_the_closest() -> None:
    """Where nothing meets the limits, the stage that misses them by least is named."""
    tight = Slo(ttft_p95_ms=1.0, itl_p95_ms=1.0)
    nearest = least_violating_stage(LADDER, tight)

    assert nearest is not None
    assert nearest.load == 1
    assert least_violating_stage([], tight) is None


def _tails(*ttft: float | None, itl: float = 5.0) -> list[LadderPoint]:
    return [
        LadderPoint(load=2.0**k, throughput=100.0 * (k + 1), ttft_p95_ms=value, itl_p95_ms=itl)
        for k, value in enumerate(ttft)
    ]


def test_the_boundary_is_where_a_tail_meets_its_limit() -> None:
    """Between two stages a p95 is a power of the load; the limit that is met first is the boundary."""
    points = _tails(10, 20, 40, 160, 640)

    assert slo_boundary(points, ttft_p95_ms=80) == SloBoundary(
        limit="ttft_p95", inside=4, outside=8, load=pytest.approx(4 * math.sqrt(2))
    )
    assert slo_boundary(points[::-1], ttft_p95_ms=80, itl_p95_ms=4) == SloBoundary(
        limit="itl_p95", inside=None, outside=1, load=None
    )
    assert slo_boundary(points, ttft_p95_ms=1000, itl_p95_ms=50) is None
    assert slo_boundary(points) is None


def test_a_later_dip_and_unknown_tails_do_not_move_the_boundary() -> None:
    """The first crossing counts; stages that are unknown, invalid or fenced say nothing."""
    dipping = _tails(10, 100, 50, None, 400)
    spoilt = [dataclasses.replace(point, valid=point.load != 2) for point in dipping]

    assert slo_boundary(dipping, ttft_p95_ms=60) == SloBoundary(
        limit="ttft_p95", inside=1, outside=2, load=pytest.approx(2 ** (math.log(6) / math.log(10)))
    )
    boundary = slo_boundary(spoilt, ttft_p95_ms=60)
    assert boundary is not None
    assert (boundary.inside, boundary.outside) == (4, 16)


def test_the_stage_asked_for_is_left_of_the_boundary() -> None:
    """It is a whole load between the two stages, nearer than the one inside; where there is none, none is asked for."""
    wide = slo_boundary(_tails(10, 20, 40, 160, 640, 2560), ttft_p95_ms=320)
    narrow = slo_boundary(_tails(10, 20, 40), ttft_p95_ms=11)
    nothing_inside = slo_boundary(_tails(10, 20, 40), ttft_p95_ms=1)

    assert wide is not None
    assert narrow is not None
    assert nothing_inside is not None
    assert load_left_of(wide) == 10
    assert load_left_of(narrow) is None
    assert load_left_of(nothing_inside) is None


@given(st.lists(st.none() | st.floats(), max_size=8), st.floats(1e-3, 1e6))
@example(values=[2.2e-308, 5.0], limit=4.0)
@example(values=[5e-324, 1.7e308], limit=1e-3)
@example(values=[1e6, math.nextafter(1e6, math.inf)], limit=1e6)
def test_any_tails_have_a_boundary_or_none(values: list[float | None], limit: float) -> None:
    """Odd figures from elsewhere end in no exception, and what is interpolated lies between its stages."""
    boundary = slo_boundary(_tails(*values), ttft_p95_ms=limit)

    if boundary is not None and boundary.load is not None:
        assert boundary.inside is not None
        assert boundary.inside <= boundary.load <= boundary.outside


def test_results_from_elsewhere_have_an_operating_point() -> None:
    """Strictly left of the knee, inside the limits that were given; preemptions that are known are held against it."""
    points = _tails(10, 20, 40, 80, 160)
    preempting = [dataclasses.replace(point, num_preemptions=3 if point.load == 4 else None) for point in points]
    knee = KneeFinding(verdict=LadderVerdict.KNEE, load=8.0)

    assert highest_inside(points, knee) == points[2]
    assert highest_inside(preempting, knee) == preempting[1]
    assert highest_inside(points, knee, ttft_p95_ms=25) == points[1]
    assert highest_inside(points, knee, itl_p95_ms=4) is None
    assert highest_inside(points, KneeFinding(verdict=LadderVerdict.ALREADY_SATURATED)) == points[0]
