"""The report: one HTML file that says the answer, shows why, and opens without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go
import plotly.offline
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from reports.figures.burst import burst_figure, burst_info
from reports.figures.compare import compare_figure, compare_info
from reports.figures.knee import knee_figure, knee_info
from reports.figures.ladders import ladders_figure, ladders_info
from reports.figures.pareto import pareto_figure, pareto_info
from reports.view import page
from tuner.answer import Recommendation
from tuner.records import TrialRecord


def write_report(
    path: Path,
    recommendation: Recommendation,
    trials: Sequence[TrialRecord],
    *,
    title: str,
) -> None:
    """Write the report of a run, whatever its verdict, to `path`.

    Args:
        trials: the study's and the confirmations'.
        title: the job's name.
    """
    path.write_text(render(recommendation, trials, title=title), encoding="utf-8")


def render(
    recommendation: Recommendation,
    trials: Sequence[TrialRecord],
    *,
    title: str,
) -> str:
    """The report's HTML; see `write_report`."""
    said = page(recommendation, trials)
    charts = {name: embedded(chart, name) for name, chart in charts_of(recommendation, trials).items()}
    return rendered("report.html.j2", title=title, headline=said.headline, page=said, charts=charts)


def rendered(template: str, *, charts: Mapping[str, EmbeddedChart], **said: object) -> str:
    """A page by one of the templates beside this file, with everything it needs inside: plotly where it has charts."""
    environment = Environment(
        loader=PackageLoader("reports", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Plotly's own source: a closing script tag in it would already break every page that inlines it.
    plotly_js = Markup(plotly.offline.get_plotlyjs()) if charts else ""  # noqa: S704
    return environment.get_template(template).render(plotly_js=plotly_js, charts=charts, **said)


class Chart(NamedTuple):
    """A figure and the finding it shows, which stands above it as text and so wraps on a phone."""

    title: str
    figure: go.Figure


class EmbeddedChart(NamedTuple):
    """A chart as it goes into the page."""

    title: str
    html: Markup


def charts_of(recommendation: Recommendation, trials: Sequence[TrialRecord]) -> dict[str, Chart]:
    """Every chart this run has the figures for: some of `knee`, `compare`, `pareto`, `burst`, `ladders`."""
    found: dict[str, Chart] = {}
    if (knee := knee_info(recommendation, trials)) is not None:
        found["knee"] = Chart(knee.title, knee_figure(knee))
    if (compare := compare_info(recommendation, trials)) is not None:
        found["compare"] = Chart(compare.title, compare_figure(compare))
    if (pareto := pareto_info(recommendation, trials)) is not None:
        found["pareto"] = Chart(pareto.title, pareto_figure(pareto))
    if (burst := burst_info(recommendation)) is not None:
        found["burst"] = Chart(burst.title, burst_figure(burst))
    if (ladders := ladders_info(recommendation, trials)) is not None:
        found["ladders"] = Chart(ladders.title, ladders_figure(ladders))
    return found


def embedded(chart: Chart, name: str) -> EmbeddedChart:
    """The chart as a part of a page that brings plotly itself."""
    untitled = chart.figure.update_layout(title=None, margin_t=30)
    html = untitled.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=f"chart-{name}",
        config={"displaylogo": False, "responsive": True, "displayModeBar": False},
    )
    return EmbeddedChart(chart.title, Markup(html))  # noqa: S704 - plotly escapes <, > and / in its JSON
