"""What all charts share: colours, axes, error bars, the look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from tuner.records import Estimate

# Okabe and Ito's palette: told apart by colour-blind readers; marker shapes and dashes carry the same in grey print.
BLUE, VERMILLION, GREEN, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#9AA3AD", "#1F2933"
_GRID = "#E4E7EB"


def error_bars(estimates: Sequence[Estimate]) -> dict[str, Any]:
    """Plotly's error bars; a figure without an interval gets none."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [0.0 if e.high is None else e.high - e.value for e in estimates],
        "arrayminus": [0.0 if e.low is None else e.value - e.low for e in estimates],
        "thickness": 1.2,
        "width": 3,
    }


def marker(symbol: str, color: str) -> dict[str, Any]:
    """One mark, its open form as bold as the filled one."""
    return {"size": 10, "symbol": symbol, "color": color, "line": {"color": color, "width": 2}}


def legend_line(figure: go.Figure, name: str, color: str, dash: str) -> None:
    """Name a vertical or horizontal line in the legend, which knows traces only."""
    figure.add_trace(
        go.Scatter(x=[None], y=[None], mode="lines", name=name, line={"color": color, "width": 2, "dash": dash})
    )


def powers_of_two(loads: Sequence[int]) -> list[int]:
    """Ticks from 1 to the first power of two that holds every load."""
    return [2**k for k in range(math.ceil(math.log2(max(loads))) + 1)]


def log_range(loads: Sequence[int]) -> list[float]:
    """A logarithmic axis with some room on both sides of the loads."""
    return [math.log10(min(loads) * 0.85), math.log10(max(loads) * 1.18)]


def styled(figure: go.Figure, title: str, *, height: int) -> go.Figure:
    """The figure in the house look: title on the left, legend below, thin grid. Height in pixels."""
    figure.update_layout(
        template="none",
        title={"text": escape(title), "x": 0, "xanchor": "left", "font": {"size": 17, "color": INK, "weight": 600}},
        font={"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13, "color": INK},
        height=height,
        margin={"l": 70, "r": 20, "t": 76, "b": 60},
        legend={"orientation": "h", "yanchor": "top", "y": -0.12 if height > 600 else -0.24, "x": 0},
        hoverlabel={"bgcolor": "white"},
    )
    figure.update_xaxes(gridcolor=_GRID, linecolor=GREY, ticks="outside", zeroline=False)
    figure.update_yaxes(gridcolor=_GRID, linecolor=GREY, zeroline=False)
    return figure
