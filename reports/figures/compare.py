"""Production beside the defaults, both re-measured in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from reports.figures.style import (
    BLUE,
    GREY,
    error_bars,
    marker,
    styled,
)
from tuner.answer import Recommendation
from tuner.records import Estimate, Measured, StageKind, TrialRecord, TrialRole


class ComparePoint(NamedTuple):
    """One re-measured stage of production or of the defaults."""

    who: str
    trial: int
    load: int
    output_throughput: Estimate
    ttft_p95_ms: Estimate
    itl_p95_ms: Estimate


class CompareInfo(NamedTuple):
    """Production beside the defaults, launch by launch, at the operating point and at twice it."""

    title: str
    loads: tuple[int, ...]
    points: tuple[ComparePoint, ...]


_COMPARED = {TrialRole.CONFIRM_PRODUCTION: "Production", TrialRole.CONFIRM_BASELINE: "Defaults"}


def compare_info(recommendation: Recommendation, trials: Sequence[TrialRecord]) -> CompareInfo | None:
    """Every confirmation stage of both; None where production was not re-measured."""
    points = tuple(
        ComparePoint(
            who=_COMPARED[trial.role],
            trial=trial.number,
            load=stage.users,
            output_throughput=stage.output_throughput,
            ttft_p95_ms=stage.ttft_p95_ms,
            itl_p95_ms=stage.itl_p95_ms,
        )
        for trial in trials
        if trial.role in _COMPARED and isinstance(trial.outcome, Measured)
        for stage in trial.outcome.stages
        if stage.valid and stage.kind in (StageKind.OPERATING, StageKind.DOUBLE)
    )
    if not any(point.who == "Production" for point in points):
        return None
    ratio = recommendation.baseline.throughput_gain if recommendation.baseline else None
    title = "Production and the defaults, re-measured"
    if ratio is not None and ratio.low is not None and ratio.high is not None:
        within = f"{100 * (ratio.low - 1):+.1f} % to {100 * (ratio.high - 1):+.1f} %"
        title = f"Production's throughput beside the defaults: {100 * (ratio.value - 1):+.1f} % ({within})"
    return CompareInfo(title=title, loads=tuple(sorted({point.load for point in points})), points=points)


def compare_figure(info: CompareInfo) -> go.Figure:
    """Three panels; within each, a group a load and a mark a launch."""
    figure = make_subplots(
        rows=1,
        cols=3,
        subplot_titles=["Output tokens/s", "p95 TTFT, ms", "p95 ITL, ms"],
        horizontal_spacing=0.08,
    )
    panels: list[Callable[[ComparePoint], Estimate]] = [
        lambda point: point.output_throughput,
        lambda point: point.ttft_p95_ms,
        lambda point: point.itl_p95_ms,
    ]
    for who, side, color, symbol in (("Defaults", -1, GREY, "square"), ("Production", 1, BLUE, "circle")):
        points = [point for point in info.points if point.who == who]
        places = [info.loads.index(point.load) + side * _offset(points, point) for point in points]
        for col, figure_of in enumerate(panels, start=1):
            estimates = [figure_of(point) for point in points]
            figure.add_trace(
                go.Scatter(
                    x=places,
                    y=[estimate.value for estimate in estimates],
                    error_y=error_bars(estimates),
                    mode="markers",
                    marker=marker(symbol, color),
                    name=f"{who}, one mark a launch",
                    showlegend=col == 1,
                    customdata=[[point.trial, point.load] for point in points],
                    hovertemplate="trial %{customdata[0]}, load %{customdata[1]}: %{y:.4g}<extra></extra>",
                ),
                row=1,
                col=col,
            )
    figure.update_xaxes(
        tickvals=list(range(len(info.loads))),
        ticktext=[str(load) for load in info.loads],
        range=[-0.5, len(info.loads) - 0.5],
        title_text="Concurrent requests",
    )
    figure.update_yaxes(rangemode="tozero")
    return styled(figure, info.title, height=400)


def _offset(points: Sequence[ComparePoint], point: ComparePoint) -> float:
    """Where a launch stands beside its group's middle, so that launches do not hide each other."""
    launches = sorted({other.trial for other in points})
    return 0.08 + 0.3 * launches.index(point.trial) / max(len(launches), 1)
