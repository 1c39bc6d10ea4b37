"""The knee: throughput and the p95s over load, with what was found on the ladder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from reports.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    VERMILLION,
    error_bars,
    legend_line,
    log_range,
    marker,
    powers_of_two,
    styled,
)
from tuner import wording
from tuner.answer import LadderVerdict, Recommendation
from tuner.export.context import knee as knee_words
from tuner.records import CLIMB_KINDS, Estimate, Measured, StageKind, StageRecord, TrialRecord


class CurvePoint(NamedTuple):
    """One stage as a point of a ladder's curves."""

    load: int
    output_throughput: Estimate
    ttft_p95_ms: Estimate
    itl_p95_ms: Estimate
    overload: bool
    valid: bool


class KneeInfo(NamedTuple):
    """One ladder with what was found on it. Loads in concurrent requests."""

    title: str
    trial: int | None
    """None where the ladder is no trial's."""

    points: tuple[CurvePoint, ...]
    """By rising load."""

    knee: float | None
    knee_interval: tuple[float, float] | None
    operating_load: int | None
    production_fence: int | None
    trial_fence: int | None
    slo_ttft_p95_ms: float | None
    slo_itl_p95_ms: float | None


def knee_info(recommendation: Recommendation, trials: Sequence[TrialRecord]) -> KneeInfo | None:
    """The ladder that shows the knee, or that came closest to an answer; None where nothing was measured."""
    shown = _shown_trial(recommendation, trials)
    if shown is None:
        return None
    trial, stages = shown
    finding, production, slo = recommendation.knee, recommendation.production, recommendation.slo
    if trial.number != recommendation.knee_trial:
        finding = None
    return KneeInfo(
        title=_knee_title(recommendation, trial, stages),
        trial=trial.number,
        points=tuple(curve_point(stage) for stage in sorted(stages, key=lambda stage: stage.load)),
        knee=finding.load if finding else None,
        knee_interval=finding.interval if finding else None,
        operating_load=production.operating_point.load if production else None,
        production_fence=production.config.max_num_seqs if production else None,
        trial_fence=trial.config.fence,
        slo_ttft_p95_ms=slo.ttft_p95_ms if slo else None,
        slo_itl_p95_ms=slo.itl_p95_ms if slo else None,
    )


def _shown_trial(
    recommendation: Recommendation, trials: Sequence[TrialRecord]
) -> tuple[TrialRecord, tuple[StageRecord, ...]] | None:
    by_number = {trial.number: trial for trial in trials}
    wanted = [recommendation.knee_trial, recommendation.least_violating_trial]
    if recommendation.production:
        wanted.insert(1, recommendation.production.trial)
    for number in wanted:
        trial = by_number.get(number) if number is not None else None
        if trial is not None and isinstance(trial.outcome, Measured):
            return trial, trial.outcome.stages
    return None


def curve_point(stage: StageRecord) -> CurvePoint:
    """A stage as a point."""
    return CurvePoint(
        load=stage.users,
        output_throughput=stage.output_throughput,
        ttft_p95_ms=stage.ttft_p95_ms,
        itl_p95_ms=stage.itl_p95_ms,
        overload=stage.kind is StageKind.OVERLOAD or (stage.fenced and stage.kind in CLIMB_KINDS),
        valid=stage.valid,
    )


def _knee_title(recommendation: Recommendation, trial: TrialRecord, stages: Sequence[StageRecord]) -> str:
    finding = recommendation.knee
    if finding is None or trial.number != recommendation.knee_trial:
        return f"The ladder of trial {trial.number}, which came closest"
    climbed = [stage.load for stage in stages if stage.kind in CLIMB_KINDS]
    match finding.verdict:
        case LadderVerdict.KNEE:
            return f"Throughput bends at {knee_words(recommendation)}"
        case LadderVerdict.FENCED:
            return f"Throughput stops at the fence of {trial.config.fence}: our limit, not the engine's"
        case LadderVerdict.NOT_REACHED:
            return f"No bend up to {max(climbed, default=0)} concurrent requests"
        case LadderVerdict.ALREADY_SATURATED:
            return f"Throughput is flat from {min(climbed, default=0)} concurrent requests on"
        case LadderVerdict.TOO_FEW_STAGES:
            num_valid = sum(stage.valid for stage in stages)
            return f"Too few valid stages to look for a bend: {num_valid}"


def knee_figure(info: KneeInfo) -> go.Figure:
    """Throughput over load, with p95 TTFT and p95 ITL on panels below, on one load axis."""
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.05, row_heights=[0.5, 0.25, 0.25])
    panels: list[tuple[Callable[[CurvePoint], Estimate], str, float | None]] = [
        (lambda point: point.output_throughput, "Output tokens/s", None),
        (lambda point: point.ttft_p95_ms, "p95 TTFT, ms", info.slo_ttft_p95_ms),
        (lambda point: point.itl_p95_ms, "p95 ITL, ms", info.slo_itl_p95_ms),
    ]
    for row, (figure_of, label, limit) in enumerate(panels, start=1):
        _draw_ladder(figure, info, figure_of, row=row)
        figure.update_yaxes(title_text=label, rangemode="tozero", row=row, col=1)
        if limit is not None:
            figure.add_hline(y=limit, row=row, col=1, line={"color": VERMILLION, "width": 1.5, "dash": "dot"})
    if info.slo_ttft_p95_ms is not None:
        legend_line(figure, "SLO limit", VERMILLION, "dot")
    figure.update_yaxes(type="log", dtick=1, tickformat=",d", rangemode="normal", row=2, col=1)
    _mark_loads(figure, info)
    loads = [point.load for point in info.points]
    figure.update_xaxes(type="log", tickvals=powers_of_two(loads), range=log_range(loads))
    figure.update_xaxes(title_text="Load: concurrent requests (log scale)", row=3, col=1)
    return styled(figure, info.title, height=720)


def _draw_ladder(figure: go.Figure, info: KneeInfo, figure_of: Callable[[CurvePoint], Estimate], *, row: int) -> None:
    climbed = [point for point in info.points if point.valid and not point.overload]
    overload = [point for point in info.points if point.valid and point.overload]
    invalid = [point for point in info.points if not point.valid]
    line = {"mode": "lines+markers", "line": {"color": BLUE, "width": 2}, "marker": {"size": 7}}
    groups: list[tuple[str, list[CurvePoint], dict[str, Any]]] = [
        (f"Stages{_whose(info)}, 95 % interval", climbed, line),
        ("Overload: past the fence", overload, {"mode": "markers", "marker": marker("triangle-up-open", INK)}),
        ("Invalid stage, not used", invalid, {"mode": "markers", "marker": marker("x", GREY)}),
    ]
    for name, points, style in groups:
        if points:
            estimates = [figure_of(point) for point in points]
            figure.add_trace(
                go.Scatter(
                    x=[point.load for point in points],
                    y=[estimate.value for estimate in estimates],
                    error_y=error_bars(estimates),
                    name=name,
                    showlegend=row == 1,
                    hovertemplate="load %{x}: %{y:.4g}<extra></extra>",
                    **style,
                ),
                row=row,
                col=1,
            )
    chosen = [point for point in climbed if point.load == info.operating_load]
    figure.add_trace(
        go.Scatter(
            x=[point.load for point in chosen],
            y=[figure_of(point).value for point in chosen],
            mode="markers",
            marker={"size": 14, "symbol": "diamond", "color": GREEN, "line": {"color": "white", "width": 1.5}},
            name=f"Operating point: {info.operating_load}",
            showlegend=row == 1 and bool(chosen),
            hovertemplate="operating point, load %{x}: %{y:.4g}<extra></extra>",
        ),
        row=row,
        col=1,
    )


def _whose(info: KneeInfo) -> str:
    return "" if info.trial is None else f" of trial {info.trial}"


def _mark_loads(figure: go.Figure, info: KneeInfo) -> None:
    if info.knee_interval is not None:
        low, high = info.knee_interval
        figure.add_vrect(x0=low, x1=high, row="all", col=1, fillcolor=ORANGE, opacity=0.22, line_width=0, layer="below")
    lines: list[tuple[float | None, str, str, str]] = [
        (info.knee, "Knee, with its interval", ORANGE, "solid"),
        (info.production_fence, "Production's fence", GREEN, "dash"),
        (info.trial_fence, f"Fence{_whose(info)}", INK, "dashdot"),
    ]
    for load, name, color, dash in lines:
        if load is not None:
            figure.add_vline(x=load, row="all", col=1, line={"color": color, "width": 1.8, "dash": dash}, layer="below")
            legend_line(figure, f"{name}: {wording.number(load)}", color, dash)
