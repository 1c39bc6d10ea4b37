"""What a burst of long prompts did to protective, each figure beside its limit."""

from __future__ import annotations

from typing import NamedTuple

import plotly.graph_objects as go

from reports.figures.style import (
    GREEN,
    INK,
    VERMILLION,
    styled,
)
from tuner import wording
from tuner.answer import Recommendation


class BurstBar(NamedTuple):
    """One figure under the burst as a share of its limit: 1.0 stands at it."""

    label: str
    share: float
    inside: bool


class BurstInfo(NamedTuple):
    """What the burst did to protective."""

    title: str
    bars: tuple[BurstBar, ...]


def burst_info(recommendation: Recommendation) -> BurstInfo | None:
    """The burst's figures beside their limits; None without a burst, or without any limit to compare with."""
    protective, slo = recommendation.protective, recommendation.slo
    burst = protective.burst if protective else None
    if burst is None:
        return None
    bars = []
    if slo is not None:
        for name, measured, limit in (
            ("p95 TTFT", burst.ttft_p95_ms.value, slo.ttft_p95_ms),
            ("p95 ITL", burst.itl_p95_ms.value, slo.itl_p95_ms),
        ):
            label = f"{name}: {wording.latency(measured)} of {wording.latency(limit)}"
            bars.append(BurstBar(label, measured / limit, measured <= limit))
    usage = burst.kv_cache_usage_peak
    if usage is not None:
        bars.append(BurstBar(f"KV cache: {wording.share(usage)} in use at the peak", usage, usage < 1))
    if not bars:
        return None
    outcome = "protective held" if burst.passed else "protective did not pass"
    return BurstInfo(title=f"Long prompts at {burst.load} concurrent requests: {outcome}", bars=tuple(bars))


def burst_figure(info: BurstInfo) -> go.Figure:
    """A bar a figure, with the limit at 100 %."""
    bars = list(reversed(info.bars))
    figure = go.Figure(
        go.Bar(
            x=[100 * bar.share for bar in bars],
            y=[bar.label for bar in bars],
            orientation="h",
            width=0.5,
            marker={
                "color": [GREEN if bar.inside else VERMILLION for bar in bars],
                "pattern": {"shape": ["" if bar.inside else "/" for bar in bars]},
            },
            hovertemplate="%{y}<extra></extra>",
        )
    )
    figure.add_vline(x=100, line={"color": INK, "width": 1.5, "dash": "dot"})
    figure.update_xaxes(title_text="% of the limit", range=[0, 108 * max(1.0, *(bar.share for bar in bars))])
    figure.update_yaxes(automargin=True)
    return styled(figure, info.title, height=250)
