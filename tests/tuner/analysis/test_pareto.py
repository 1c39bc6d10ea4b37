"""The front keeps what nothing beats, and noise beats nothing."""

from __future__ import annotations

import math
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import records
from tuner.analysis.combine import combined
from tuner.analysis.pareto import dominates, overlap, pareto_front, per_device, smaller_first
from tuner.engine_config import EngineConfig
from tuner.records import EngineFacts, Estimate, Measured, StageRecord, TrialRecord, TrialRole

CONFIG = records.CHOSEN
FACTS: EngineFacts = records.facts(CONFIG)


def _stage(throughput: float, ttft_ms: float, itl_ms: float, *, spread: float = 0.001, index: int = 0) -> StageRecord:
    figures = {
        "output_throughput": records.estimate(throughput, spread=spread),
        "ttft_p95_ms": records.estimate(ttft_ms, spread=spread),
        "itl_p95_ms": records.estimate(itl_ms, spread=spread),
        "index": index,
    }
    return records.stage(CONFIG, 8).model_copy(update=figures)


def _trial(*stages: StageRecord, number: int = 0, config: EngineConfig = CONFIG) -> TrialRecord:
    return records.trial(number, config, outcome=Measured(facts=FACTS, stages=stages))


def test_a_tie_on_one_axis_is_still_beaten_on_another() -> None:
    """(10, 100) beats (5, 100): the front is only the first."""
    front = pareto_front([_trial(_stage(10, 50, 100, index=0), _stage(5, 50, 100, index=1))])

    assert [point.stage for point in front] == [0]


def test_identical_points_are_both_kept_smaller_setting_first() -> None:
    """Nothing is lost in a tie, and the smaller setting leads."""
    smaller = CONFIG.model_copy(update={"max_num_seqs": 8})
    front = pareto_front([_trial(_stage(10, 50, 5)), _trial(_stage(10, 50, 5), number=1, config=smaller)])

    assert [point.trial for point in front] == [1, 0]
    assert smaller_first(smaller) < smaller_first(CONFIG)


def test_points_closer_than_their_noise_are_ties() -> None:
    """340 / 197 / 250 against 262 / 263 / 261 is no victory: overlapping intervals dominate nobody."""
    better, worse = _stage(104, 50, 5, spread=0.05), _stage(100, 52, 5.2, spread=0.05)

    assert not dominates(better, worse)
    assert dominates(_stage(104, 50, 5), _stage(100, 52, 5.2))
    assert len(pareto_front([_trial(better, worse)])) == 2


def test_unknown_and_unproven_points_are_never_on_the_front() -> None:
    """A figure that is missing, invalid or from too few samples wins nothing."""
    unknown = _stage(99, 1, 1).model_copy(
        update={"ttft_p95_ms": Estimate(value=math.nan, low=0, high=1, num_samples=9)}
    )
    unproven = _stage(99, 1, 1).model_copy(update={"itl_p95_ms": Estimate(value=1.0, num_samples=40)})
    invalid = _stage(99, 1, 1).model_copy(update={"valid": False})
    good = _stage(10, 50, 5, index=7)
    confirmed = records.trial(
        3, CONFIG, role=TrialRole.CONFIRM_PRODUCTION, outcome=Measured(facts=FACTS, stages=(good,))
    )
    failed = records.trial(4, CONFIG, outcome=records.study_trials()[3].outcome)

    assert [point.stage for point in pareto_front([_trial(unknown, unproven, invalid, good), confirmed, failed])] == [7]


def test_ties_never_close_a_circle() -> None:
    """Overlap is not transitive: three points that each look better than the next do not empty the front."""

    def figure(value: float, low: float, high: float) -> Estimate:
        return Estimate(value=value, low=low, high=high, num_samples=99)

    high, low, wide = figure(10, 9.9, 10.1), figure(9, 8.9, 9.1), figure(9.5, 8.5, 10.5)
    figures = ((high, wide, high), (low, low, wide), (wide, high, low))
    names = ("output_throughput", "ttft_p95_ms", "itl_p95_ms")
    stages = [records.stage(CONFIG, 8).model_copy(update=dict(zip(names, row, strict=True))) for row in figures]

    assert pareto_front([_trial(*stages)])


coordinates = st.sampled_from([1.0, 1.1, 1.3, 2.0, 5.0])


@given(
    st.lists(st.builds(_stage, coordinates, coordinates, coordinates, spread=st.sampled_from([0.01, 0.2])), max_size=8)
)
def test_some_point_is_always_unbeaten(stages: list[StageRecord]) -> None:
    """However the noise overlaps, points do not beat each other in a circle, and what is left out was beaten."""
    stages = [stage.model_copy(update={"index": index}) for index, stage in enumerate(stages)]
    kept = {point.stage for point in pareto_front([_trial(*stages)])}

    assert bool(kept) == bool(stages)
    assert not any(dominates(a, b) for a, b in product(stages, stages) if b.index in kept)
    assert all(any(dominates(a, b) for a in stages) for b in stages if b.index not in kept)


def test_a_point_carries_what_it_needs_beside_what_it_reserves() -> None:
    """Two points of one share reserve the same: the memory to compare them by is what was in use."""
    points = pareto_front([_trial(*records.ladder(CONFIG))])
    assert len(points) > 1
    by_load = sorted(points, key=lambda point: point.load)
    needs = [point.peak_memory_bytes or 0 for point in by_load]
    assert needs == sorted(needs)
    assert needs[0] < needs[-1]
    assert len({point.reserved_memory_bytes for point in points}) == 1


def test_throughput_is_counted_by_the_device() -> None:
    """100 tok/s on 8 devices are 12.5 a device, and do not beat 20 tok/s of one that is as quick to answer."""
    eight = CONFIG.model_copy(update={"tensor_parallel_size": 8})
    front = pareto_front([_trial(_stage(100, 50, 5), config=eight), _trial(_stage(20, 50, 5), number=1)])
    quicker = pareto_front([_trial(_stage(100, 20, 2), config=eight), _trial(_stage(20, 50, 5), number=1)])

    assert per_device(records.estimate(100), eight).value == 12.5
    assert [(point.trial, point.output_throughput_per_device) for point in front] == [(1, 20)]
    assert [(point.trial, point.output_throughput_per_device) for point in quicker] == [(0, 12.5), (1, 20)]


def test_repeats_that_overlap_are_a_tie() -> None:
    """Three runs of 340, 197 and 250 are no better and no worse than three of 262, 263 and 261."""

    def of(*runs: int) -> Estimate:
        return combined([records.estimate(value, spread=0.01) for value in runs])

    assert overlap(of(340, 197, 250), of(262, 263, 261))
    assert not overlap(of(262, 263, 261), of(300, 305, 310))
