"""The Pareto front: throughput against p95 TTFT, coloured by p95 ITL."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import plotly.graph_objects as go

from reports.figures.study import config_text, study_stages
from reports.figures.style import (
    INK,
    styled,
)
from tuner.answer import Recommendation
from tuner.records import CLIMB_KINDS, StageRecord, TrialRecord
from tuner.wording import memory


class ParetoMark(NamedTuple):
    """One (config, stage) point. Throughput in output tokens/s, latencies in ms."""

    output_throughput: float
    ttft_p95_ms: float
    itl_p95_ms: float
    on_front: bool
    label: str


class ParetoInfo(NamedTuple):
    """The measured points and which of them nothing beats beyond noise."""

    title: str
    marks: tuple[ParetoMark, ...]


def pareto_info(recommendation: Recommendation, trials: Sequence[TrialRecord]) -> ParetoInfo | None:
    """All ranked stages of the study, front members told apart; None where there are none.

    A stage is ranked when it is valid, no overload, and has samples enough for intervals of its p95s.
    """
    front = {(point.trial, point.stage) for point in recommendation.pareto}
    marks = [
        ParetoMark(
            output_throughput=stage.output_throughput.value,
            ttft_p95_ms=stage.ttft_p95_ms.value,
            itl_p95_ms=stage.itl_p95_ms.value,
            on_front=(trial.number, stage.index) in front,
            label=f"trial {trial.number}, load {stage.load}: {config_text(trial.config)}; memory in use at the peak "
            f"{memory(stage.memory.in_use_peak_bytes)} of {memory(stage.memory.reserved_bytes)} reserved",
        )
        for trial, stage in study_stages(trials)
        if (trial.number, stage.index) in front or _ranked(stage)
    ]
    if not marks:
        return None
    num_front = sum(mark.on_front for mark in marks)
    return ParetoInfo(
        title=f"{num_front} of {len(marks)} measured points are beaten by no other beyond noise", marks=tuple(marks)
    )


def _ranked(stage: StageRecord) -> bool:
    return (
        stage.valid and stage.kind in CLIMB_KINDS and stage.ttft_p95_ms.has_interval and stage.itl_p95_ms.has_interval
    )


def pareto_figure(info: ParetoInfo) -> go.Figure:
    """Throughput over p95 TTFT; colour is p95 ITL."""
    figure = go.Figure()
    for on_front in (False, True):
        marks = [mark for mark in info.marks if mark.on_front is on_front]
        outline = {"color": INK, "width": 2} if on_front else {"color": "white", "width": 0.5}
        figure.add_trace(
            go.Scatter(
                x=[mark.ttft_p95_ms for mark in marks],
                y=[mark.output_throughput for mark in marks],
                mode="markers",
                name="On the front" if on_front else "Others",
                marker={
                    "color": [mark.itl_p95_ms for mark in marks],
                    "coloraxis": "coloraxis",
                    "symbol": "diamond" if on_front else "circle",
                    "size": 14 if on_front else 8,
                    "opacity": 1.0 if on_front else 0.75,
                    "line": outline,
                },
                customdata=[[escape(mark.label), mark.itl_p95_ms] for mark in marks],
                hovertemplate="%{customdata[0]}<br>%{y:.4g} tokens/s, p95 TTFT %{x:.4g} ms, "
                "p95 ITL %{customdata[1]:.4g} ms<extra></extra>",
            )
        )
    figure.update_layout(
        coloraxis={"colorscale": "Cividis_r", "colorbar": {"title": {"text": "p95 ITL, ms"}, "thickness": 14}}
    )
    figure.update_xaxes(title_text="p95 TTFT, ms (log scale)", type="log", dtick="D2")
    figure.update_yaxes(title_text="Output tokens/s", rangemode="tozero")
    return styled(figure, info.title, height=460)
