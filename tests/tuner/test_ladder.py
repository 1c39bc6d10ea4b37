"""The ladder climbs until the knee is behind it, and not further."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.records import estimate, stage
from tuner.analysis.benched import Asked, conclude
from tuner.analysis.fence import fenced_beyond, ladder_knee
from tuner.analysis.graph_grid import grid_floor, is_on_grid
from tuner.analysis.knee import find_knee, points_of
from tuner.answer import LadderVerdict, Slo
from tuner.engine_config import EngineConfig
from tuner.ladder import FixedSteps, Ladder, LadderStep, most_stages, next_step, rungs
from tuner.measure.past_fence import is_past_fence
from tuner.records import StageKind, StageRecord


def _config(seqs: int) -> EngineConfig:
    return EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=2048, gpu_memory_utilization=0.9)


def _climb(plan: Ladder, throughput: Callable[[int], float]) -> list[StageRecord]:
    """All stages of a ladder on an engine with that curve; past the fence the curve stands still."""
    stages: list[StageRecord] = []
    while (step := next_step(plan, stages)) is not None:
        running = min(step.load, plan.max_num_seqs)
        made = stage(_config(plan.max_num_seqs), step.load, index=len(stages), kind=step.kind)
        update = {"output_throughput": estimate(throughput(running), spread=0.02), "num_preemptions": 0}
        stages.append(made.model_copy(update=update))
        assert len(stages) < 40
    return stages


def _loads(stages: list[StageRecord], kind: StageKind) -> list[int]:
    return [each.load for each in stages if each.kind is kind]


def test_a_saturating_engine_is_left_once_the_knee_is_behind() -> None:
    """No time is spent far past the knee: with the knee near 9, load 256 is never tried."""
    stages = _climb(Ladder(max_num_seqs=256, max_load=512), lambda n: 1000 * n / (2 + n))
    climbed = _loads(stages, StageKind.LADDER)
    assert climbed[:5] == [1, 2, 4, 8, 16]
    assert climbed[-1] < 256
    assert 1 <= len(_loads(stages, StageKind.BISECT)) <= 2
    assert _loads(stages, StageKind.OVERLOAD) == [512]
    assert stages[-1].kind is StageKind.OVERLOAD


def test_there_is_a_stage_where_an_operating_point_should_stand() -> None:
    """A knee with nothing measured just left of it would leave half of its throughput unused."""
    for bend in (1.5, 2.0, 3.0, 4.0, 5.0, 7.0):
        stages = _climb(Ladder(max_num_seqs=256, max_load=512), lambda n, bend=bend: 1000 * n / (bend + n))  # type: ignore[misc]
        knee = find_knee(points_of(stages)).load
        assert knee is not None
        assert any(0.7 * knee <= load < knee for load in (each.load for each in stages))


def test_limits_that_are_left_before_the_knee_get_the_stage() -> None:
    """Where p95 ITL and not the knee bounds the operating point, a stage lies just inside the limit, not half of it."""
    free = _climb(Ladder(max_num_seqs=256, max_load=512), lambda n: 1000 * n / (8 + n))
    knee = find_knee(points_of(free)).load
    # The fake's p95 ITL is 1.15 x (12 + 2.25 n) ms, so 11.8 requests are at the limit.
    slo = Slo(ttft_p95_ms=1e6, itl_p95_ms=1.15 * (12 + 2.25 * 11.8))
    bound = _climb(Ladder(max_num_seqs=256, max_load=512, slo=slo), lambda n: 1000 * n / (8 + n))
    inside = max(each.load for each in bound if each.itl_p95_ms.value <= slo.itl_p95_ms)

    assert knee is not None
    assert knee > 20
    assert len(bound) <= len(free)
    assert inside == 11


@given(bend=st.floats(1.0, 40.0), seqs=st.sampled_from([97, 100, 256]))
def test_a_fence_with_a_graph_just_left_of_the_knee_is_measured(bend: float, seqs: int) -> None:
    """On an engine with captured graphs the fence that is recommended has one, and is no guess."""
    plan = Ladder(max_num_seqs=seqs, max_load=512, slo=Slo(ttft_p95_ms=1e6, itl_p95_ms=1e6), on_graph_grid=True)
    stages = _climb(plan, lambda n: 1000 * n / (bend + n))
    knee = find_knee(points_of(stages), fence=seqs, num_bootstrap=0).load
    edge = seqs + 1 if knee is None else knee
    fences = [each.load for each in stages if is_on_grid(each.load) and each.load < max(2, edge)]

    # 0.75 and not 0.95: the stage that stands left of the knee may itself turn out to be the knee.
    assert max(fences) >= grid_floor(max(1, 0.75 * edge))
    assert len(stages) <= most_stages(plan)


def test_limits_are_left_at_a_fence_with_a_graph() -> None:
    """Inside the limits, too, the stage that is measured between rungs is one that may be recommended."""
    slo = Slo(ttft_p95_ms=1e6, itl_p95_ms=1.15 * (12 + 2.25 * 30.0))
    plan = Ladder(max_num_seqs=256, max_load=512, slo=slo, on_graph_grid=True)
    stages = _climb(plan, lambda n: 1000 * n / (8 + n))

    assert max(each.load for each in stages if each.itl_p95_ms.value <= slo.itl_p95_ms) == 24


def _thinking(plan: Ladder, *, fence: int, service_s: float, think_s: float) -> list[StageRecord]:
    """All stages of users who think, on an engine that serves `fence` at once and slows down with none of them.

    A fluid model: as many are in flight as a cycle's share in service says, and beyond the fence the rest waits.
    """
    stages: list[StageRecord] = []
    while (step := next_step(plan, stages)) is not None:
        users = int(step.load)
        rate_rps = min(users / (service_s + think_s), fence / service_s)
        in_flight = users - rate_rps * think_s
        running = min(in_flight, fence)
        seen = {
            "thinks": True,
            "mean_in_flight": in_flight,
            "mean_running": running,
            "mean_waiting": in_flight - running,
            "request_throughput_rps": rate_rps,
            "output_throughput": estimate(100 * rate_rps, spread=0.02),
            "num_preemptions": 0,
        }
        made = stage(_config(fence), users, index=len(stages), kind=step.kind).model_copy(update=seen)
        stages.append(made.model_copy(update={"fenced": is_past_fence(made, fence)}))
        assert len(stages) < 40
    return stages


def test_users_who_think_are_climbed_past_the_fence() -> None:
    """Eight seats hold 88 users who think ten times as long as they are served: the fence is met there, not at 8."""
    plan = Ladder(max_num_seqs=8, max_load=1024, thinks=True)
    stages = _thinking(plan, fence=8, service_s=1.0, think_s=10.0)
    climbed = [each for each in stages if each.kind is StageKind.LADDER]
    assert [each.load for each in climbed] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert [each.load for each in climbed if each.fenced] == [128]
    assert ladder_knee(stages, fence=8).verdict is LadderVerdict.FENCED
    assert climbed[-1].mean_in_flight >= 2 * 8
    assert len(stages) <= most_stages(plan)


def test_a_ladder_of_thinking_users_below_the_fence_is_not_fenced() -> None:
    """Where nothing waits at the largest load allowed, nobody is sent to raise max_num_seqs."""
    stages = _thinking(Ladder(max_num_seqs=8, max_load=64, thinks=True), fence=8, service_s=1.0, think_s=10.0)
    assert not any(each.fenced for each in stages)
    assert ladder_knee(stages, fence=8).verdict is LadderVerdict.NOT_REACHED
    assert conclude(stages, Asked(fence=8, fence_source="told")).finding.verdict is LadderVerdict.NOT_REACHED


def test_an_engine_that_scales_for_ever_ends_at_the_fence() -> None:
    """A ladder ends in bounded time whatever the curve."""
    stages = _climb(Ladder(max_num_seqs=48, max_load=512), lambda n: 100.0 * n)
    assert _loads(stages, StageKind.LADDER) == [1, 2, 4, 8, 16, 32, 48]
    assert _loads(stages, StageKind.OVERLOAD) == [96]


@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.floats(0.01, 1000, allow_nan=False),
    st.floats(0.001, 100, allow_nan=False),
)
def test_a_ladder_always_ends_with_one_overload_and_repeats_no_load(
    seqs: int, max_load: int, base: float, slope: float
) -> None:
    """Every ladder is bounded, closes past the fence where it may go there, and measures nothing twice."""
    plan = Ladder(max_num_seqs=seqs, max_load=max_load)
    stages = _climb(plan, lambda n: n / (base + slope * n))
    climbed = _loads(stages, StageKind.LADDER) + _loads(stages, StageKind.BISECT)
    assert len(climbed) == len(set(climbed))
    assert all(load <= min(seqs, max_load) for load in climbed)
    top = min(2 * seqs, max_load)
    assert _loads(stages, StageKind.OVERLOAD) == ([top] if top > seqs else [])
    assert len(stages) <= most_stages(plan)


def test_an_invalid_stage_is_repeated_once_then_left_out() -> None:
    """A disturbed measurement gets one more chance, and never holds up the ladder."""
    plan = Ladder(max_num_seqs=64, max_load=64)
    bad = stage(_config(64), 1).model_copy(update={"valid": False, "invalid_reasons": ("not steady",)})
    assert next_step(plan, [bad]) == LadderStep(kind=StageKind.LADDER, load=1)
    assert next_step(plan, [bad, bad]) == LadderStep(kind=StageKind.LADDER, load=2)


def test_an_overload_is_not_repeated() -> None:
    """What overload does is shown as it is: an engine that cannot settle past its fence is the finding."""
    plan = Ladder(max_num_seqs=8, max_load=64)
    done = [stage(_config(8), load, index=index) for index, load in enumerate([1, 2, 4, 8])]
    over = stage(_config(8), 16, index=4, kind=StageKind.OVERLOAD).model_copy(update={"valid": False})
    assert next_step(plan, [*done, over]) is None


def test_fixed_steps_are_measured_in_order() -> None:
    """A confirmation measures what it was asked to, once."""
    steps = (LadderStep(kind=StageKind.OPERATING, load=16), LadderStep(kind=StageKind.DOUBLE, load=32))
    plan = FixedSteps(steps=steps, request_rate_rps=1.0)
    first = stage(_config(16), 16, kind=StageKind.OPERATING)
    second = stage(_config(16), 32, kind=StageKind.DOUBLE)
    assert next_step(plan, []) == steps[0]
    assert next_step(plan, [first]) == steps[1]
    assert next_step(plan, [first, second]) is None


def test_rungs_double_and_end_at_the_fence() -> None:
    """The fence itself is always tried: whether it or the engine is the limit shows there."""
    assert rungs(24, 512) == [1, 2, 4, 8, 16, 24]
    assert rungs(128, 40) == [1, 2, 4, 8, 16, 32, 40]
    assert rungs(1, 2) == [1]


@given(bend=st.floats(0.5, 30.0), start=st.sampled_from([2, 4, 8, 16, 32, 64]), seqs=st.sampled_from([6, 256]))
def test_a_ladder_that_starts_high_finds_the_knee_wherever_it_is(bend: float, start: int, seqs: int) -> None:
    """What an earlier ladder taught saves stages, and never an answer."""
    full = _climb(Ladder(max_num_seqs=seqs, max_load=512), lambda n: 1000 * n / (bend + n))
    short = _climb(Ladder(max_num_seqs=seqs, max_load=512, start=start), lambda n: 1000 * n / (bend + n))
    knees = [find_knee(points_of(stages), fence=seqs, num_bootstrap=0) for stages in (full, short)]
    assert knees[0].verdict is knees[1].verdict
    if knees[0].load is not None and knees[1].load is not None:
        assert 0.6 <= knees[1].load / knees[0].load <= 1.7
    # A start that was too high costs no more than the rungs above the knee that it made; one that was right saves some.
    assert len(short) <= len(full) + math.log2(start)


def _climb_unknown(fence: int, throughput: Callable[[int], float], *, max_load: int = 512) -> list[StageRecord]:
    """All stages of a ladder on an engine that does not tell its fence."""
    plan, stages = Ladder(max_num_seqs=None, max_load=max_load), list[StageRecord]()
    while (step := next_step(plan, stages)) is not None:
        made = stage(_config(fence), step.load, index=len(stages), kind=step.kind)
        figures = {"output_throughput": estimate(throughput(min(step.load, fence)), spread=0.02), "num_preemptions": 0}
        stages.append(made.model_copy(update={**figures, "fenced": False, "kv_cache_usage_peak": 0.4}))
        assert len(stages) < 40
    return stages


def test_an_untold_fence_is_climbed_past_once_and_then_tried_itself() -> None:
    """The bend at a hidden limit is not taken for the knee, and no time is spent far beyond it."""
    stages = _climb_unknown(48, lambda n: 100.0 * n)
    assert _loads(stages, StageKind.LADDER) == [1, 2, 4, 8, 16, 32, 64, 128, 48]
    assert not _loads(stages, StageKind.OVERLOAD)  # load 128 was one
    assert Ladder(max_num_seqs=None, max_load=512).fence(stages) == 48
    assert find_knee(points_of(fenced_beyond(stages, 48)), fence=48).verdict is LadderVerdict.FENCED


def test_a_knee_below_an_untold_fence_is_found_as_if_it_were_told() -> None:
    """A server that keeps its limits to itself is measured no worse."""
    told = _climb(Ladder(max_num_seqs=512, max_load=512), lambda n: 1000 * n / (4 + n))
    untold = _climb_unknown(512, lambda n: 1000 * n / (4 + n))
    assert [each.load for each in untold] == [each.load for each in told]
