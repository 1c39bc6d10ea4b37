"""The charts' numbers; drawing is only asked not to fail and to keep its units."""

from __future__ import annotations

import pytest

from reports.figures.burst import burst_figure, burst_info
from reports.figures.compare import compare_figure, compare_info
from reports.figures.knee import knee_figure, knee_info
from reports.figures.ladders import ladders_figure, ladders_info
from reports.figures.pareto import pareto_figure, pareto_info
from tests.fakes.records import (
    CHOSEN,
    FakeRun,
    baseline,
    protective_profile,
    resolved_run,
    stage,
    study_trials,
    trial,
    unresolved_run,
)
from tuner.answer import RunVerdict
from tuner.records import Measured, StageKind, TrialRole


@pytest.fixture(scope="module")
def run() -> FakeRun:
    """The usual run."""
    return resolved_run()


def test_knee_chart_shows_the_ladder_in_order_with_its_marks(run: FakeRun) -> None:
    """The knee, its band, the operating point and both fences stand where the records say."""
    info = knee_info(*run)

    assert info is not None
    assert [point.load for point in info.points] == [1, 2, 4, 8, 16, 20, 22, 32, 64, 128]
    assert [point.load for point in info.points if point.overload] == [128]
    assert (info.trial, info.knee, info.knee_interval) == (5, 22.0, (20.0, 25.0))
    assert (info.operating_load, info.production_fence, info.trial_fence) == (16, 20, 64)
    assert (info.slo_ttft_p95_ms, info.slo_itl_p95_ms) == (900.0, 75.0)
    assert info.title == "Throughput bends at 22 concurrent requests (20 to 25)"


@pytest.mark.parametrize(
    ("verdict", "title"),
    [
        (RunVerdict.NOT_REACHED, "No bend up to 64 concurrent requests"),
        (RunVerdict.ALREADY_SATURATED, "Throughput is flat from 1 concurrent requests on"),
        (RunVerdict.TOO_FEW_STAGES, "Too few valid stages to look for a bend: 10"),
        (RunVerdict.SLO_INFEASIBLE, "The ladder of trial 6, which came closest"),
    ],
)
def test_knee_chart_claims_no_knee_without_one(verdict: RunVerdict, title: str) -> None:
    """A run without an answer shows its curve, not a knee."""
    info = knee_info(*unresolved_run(verdict))

    assert info is not None
    assert info.title == title
    assert (info.knee, info.operating_load, info.production_fence) == (None, None, None)


def test_a_knee_is_not_drawn_on_another_trials_ladder(run: FakeRun) -> None:
    """Where the knee's own trial is missing, another ladder must not carry its mark."""
    recommendation = run.recommendation.model_copy(update={"knee_trial": 99})

    info = knee_info(recommendation, run.trials)

    assert info is not None
    assert (info.trial, info.knee) == (5, None)


def test_an_invalid_stage_is_no_part_of_the_curve(run: FakeRun) -> None:
    """What was left out of the analysis is left out of the line."""
    bad = stage(CHOSEN, 4, invalid_reasons=("warm cache",))
    good = stage(CHOSEN, 2, index=1)
    outcome = Measured(facts=measured(run, 5).facts, stages=(bad, good))
    trials = (trial(5, CHOSEN, outcome=outcome),)

    info = knee_info(run.recommendation, trials)
    ladders = ladders_info(run.recommendation, trials)

    assert info is not None
    assert ladders is not None
    assert {trace.name: trace.x for trace in knee_figure(info).data if trace.x}["Invalid stage, not used"] == (4,)
    assert ladders.lines[0].loads == (2,)


def measured(run: FakeRun, number: int) -> Measured:
    """The outcome of a trial that has one."""
    outcome = next(trial.outcome for trial in run.trials if trial.number == number)
    assert isinstance(outcome, Measured)
    return outcome


def test_pareto_chart_ranks_no_overload_no_confirmation_and_no_thin_stage(run: FakeRun) -> None:
    """Only stages that could be chosen stand beside the front; a p95 of 24 samples is not ranked."""
    info = pareto_info(*run)

    assert info is not None
    front = [mark for mark in info.marks if mark.on_front]
    assert len(front) == len(run.recommendation.pareto)
    expected = [
        stage
        for trial in run.trials
        if trial.role is TrialRole.STUDY and isinstance(trial.outcome, Measured)
        for stage in trial.outcome.stages
        if stage.kind is not StageKind.OVERLOAD and stage.load > 1
    ]
    assert len(info.marks) == len(expected)
    assert info.title == f"{len(front)} of {len(expected)} measured points are beaten by no other beyond noise"


def test_compare_chart_keeps_launches_apart(run: FakeRun) -> None:
    """Each re-measurement is its own mark, so that a reader sees how far launches differ."""
    info = compare_info(*run)

    assert info is not None
    assert info.loads == (16, 32)
    seen = {(point.who, point.trial, point.load) for point in info.points}
    assert seen == {
        (who, n, x) for who, ns in (("Production", (9, 11)), ("Defaults", (10, 12))) for n in ns for x in (16, 32)
    }
    assert info.title.startswith("Production's throughput beside the defaults: +2.1 % (")


def test_compare_chart_is_silent_on_a_gain_nobody_measured(run: FakeRun) -> None:
    """No ratio, no percentage; and no chart without production's launches."""
    unmeasured = run.recommendation.model_copy(
        update={"baseline": baseline().model_copy(update={"throughput_gain": None})}
    )

    info = compare_info(unmeasured, run.trials)

    assert info is not None
    assert "%" not in info.title
    assert compare_info(run.recommendation, study_trials()) is None


def test_burst_chart_shows_each_figure_as_a_share_of_its_limit(run: FakeRun) -> None:
    """A bar past 100 % is a broken limit."""
    held = burst_info(run.recommendation)
    broken = burst_info(run.recommendation.model_copy(update={"protective": protective_profile(passed=False)}))

    assert held is not None
    assert broken is not None
    assert [round(bar.share, 3) for bar in held.bars] == [0.911, 0.64, 0.62]
    assert [bar.inside for bar in broken.bars] == [False, True, False]
    assert held.title.endswith("protective held")
    assert broken.title.endswith("protective did not pass")


def test_ladders_chart_leaves_out_failed_trials_and_marks_one(run: FakeRun) -> None:
    """A trial without figures has no line, and the chosen one is found at once."""
    info = ladders_info(*run)

    assert info is not None
    assert [line.trial for line in info.lines] == [0, 1, 2, 4, 5, 6, 7, 8]
    assert [line.trial for line in info.lines if line.chosen] == [5]
    assert info.title == "8 ladders were climbed; production comes from trial 5"


def test_nothing_measured_is_no_chart() -> None:
    """A run in which every launch failed has no figures to draw."""
    run = unresolved_run(RunVerdict.NO_FEASIBLE_CONFIG)

    assert knee_info(*run) is pareto_info(*run) is compare_info(*run) is ladders_info(*run) is None
    assert burst_info(run.recommendation) is None


def test_every_axis_has_its_unit(run: FakeRun) -> None:
    """A figure without a unit is not a figure."""
    knee, pareto, compare, burst, ladders = (
        knee_info(*run),
        pareto_info(*run),
        compare_info(*run),
        burst_info(run.recommendation),
        ladders_info(*run),
    )
    assert knee is not None
    assert pareto is not None
    assert compare is not None
    assert burst is not None
    assert ladders is not None
    drawn = knee_figure(knee).layout

    assert [axis.title.text for axis in (drawn.yaxis, drawn.yaxis2, drawn.yaxis3, drawn.xaxis3)] == [
        "Output tokens/s",
        "p95 TTFT, ms",
        "p95 ITL, ms",
        "Load: concurrent requests (log scale)",
    ]
    assert pareto_figure(pareto).layout.xaxis.title.text == "p95 TTFT, ms (log scale)"
    assert [note.text for note in compare_figure(compare).layout.annotations] == [
        "Output tokens/s",
        "p95 TTFT, ms",
        "p95 ITL, ms",
    ]
    assert burst_figure(burst).layout.xaxis.title.text == "% of the limit"
    assert ladders_figure(ladders).layout.yaxis.title.text == "Output tokens/s"


def test_an_estimate_without_an_interval_gets_no_error_bar(run: FakeRun) -> None:
    """Load 1 has too few samples: its p95 must not look exact, and must not fail to draw."""
    info = knee_info(*run)
    assert info is not None
    assert not info.points[0].ttft_p95_ms.has_interval

    ttft = next(trace for trace in knee_figure(info).data if trace.yaxis == "y2")

    assert ttft.error_y.array[0] == 0
    assert ttft.error_y.array[1] > 0
