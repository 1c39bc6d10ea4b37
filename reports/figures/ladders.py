"""Every ladder of the study, the chosen one bold."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import plotly.graph_objects as go

from reports.figures.study import config_text, study_stages
from reports.figures.style import (
    BLUE,
    GREY,
    log_range,
    powers_of_two,
    styled,
)
from tuner.answer import Recommendation
from tuner.records import CLIMB_KINDS, TrialRecord


class LadderLine(NamedTuple):
    """One trial's climb: load against output tokens/s."""

    trial: int
    label: str
    loads: tuple[int, ...]
    output_throughputs: tuple[float, ...]
    chosen: bool


class LaddersInfo(NamedTuple):
    """Every ladder of the study."""

    title: str
    lines: tuple[LadderLine, ...]


def ladders_info(recommendation: Recommendation, trials: Sequence[TrialRecord]) -> LaddersInfo | None:
    """The valid stages of each study trial's climb, the chosen trial marked; None where nothing was measured."""
    chosen = recommendation.production.trial if recommendation.production else None
    lines = []
    for trial in trials:
        climbed = sorted(
            (stage for owner, stage in study_stages([trial]) if stage.valid and stage.kind in CLIMB_KINDS),
            key=lambda stage: stage.load,
        )
        if climbed:
            lines.append(
                LadderLine(
                    trial=trial.number,
                    label=f"trial {trial.number}: {config_text(trial.config)}",
                    loads=tuple(stage.users for stage in climbed),
                    output_throughputs=tuple(stage.output_throughput.value for stage in climbed),
                    chosen=trial.number == chosen,
                )
            )
    if not lines:
        return None
    ladders = "1 ladder was climbed" if len(lines) == 1 else f"{len(lines)} ladders were climbed"
    named = "none was chosen" if chosen is None else f"production comes from trial {chosen}"
    return LaddersInfo(title=f"{ladders}; {named}", lines=tuple(lines))


def ladders_figure(info: LaddersInfo) -> go.Figure:
    """All ladders thin, the chosen one bold and drawn last."""
    figure = go.Figure()
    named_others = False
    for line in sorted(info.lines, key=lambda line: line.chosen):
        figure.add_trace(
            go.Scatter(
                x=line.loads,
                y=line.output_throughputs,
                mode="lines+markers",
                line={"color": BLUE if line.chosen else GREY, "width": 3 if line.chosen else 1},
                marker={"size": 7 if line.chosen else 4},
                name=f"Chosen: {escape(line.label)}" if line.chosen else "Other trials",
                showlegend=line.chosen or not named_others,
                hovertemplate=f"{escape(line.label)}<br>load %{{x}}: %{{y:.4g}} tokens/s<extra></extra>",
            )
        )
        named_others = named_others or not line.chosen
    loads = [load for line in info.lines for load in line.loads]
    figure.update_xaxes(
        type="log",
        tickvals=powers_of_two(loads),
        range=log_range(loads),
        title_text="Load: concurrent requests (log scale)",
    )
    figure.update_yaxes(title_text="Output tokens/s", rangemode="tozero")
    return styled(figure, info.title, height=420)
