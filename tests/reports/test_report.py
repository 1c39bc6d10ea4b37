"""The report as a reader's browser gets it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import plotly.offline
import pytest

from reports.figures.ladders import ladders_info
from reports.report import render, write_report
from reports.view import page
from tests.fakes.records import (
    FakeRun,
    baseline,
    knee_finding,
    protective_profile,
    provenance,
    resolved_run,
    unresolved_run,
)
from tuner.answer import Diagnosis, RunVerdict, Symptom
from tuner.records import Estimate, Failed

UNRESOLVED = [verdict for verdict in RunVerdict if verdict is not RunVerdict.RESOLVED]
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)></style></title>"


class Seen(HTMLParser):
    """The tags, attributes and visible words of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.sections: list[str] = []
        self.heads: list[str] = []
        self.words = ""
        self.styles = ""
        self._within: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag and what it points at."""
        self.tags.append(tag)
        if tag not in ("meta", "link"):
            self._within.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data", "poster") or name.startswith("on"):
                self.links.append(value or "")
            if tag == "section" and name == "id":
                self.sections.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        """Leave a tag."""
        assert self._within.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep what is shown apart from scripts and styles."""
        inside = self._within[-1] if self._within else ""
        if inside == "style":
            self.styles += data
        elif inside != "script":
            self.words += data
            if inside == "th":
                self.heads.append(data)


def shown(run: FakeRun, *, title: str = "chat-short") -> Seen:
    """The page of a run, with plotly's own source taken out before it is parsed."""
    return Seen(render(*run, title=title).replace(plotly.offline.get_plotlyjs(), ""))


def changed(run: FakeRun, **update: object) -> FakeRun:
    """The run with another answer."""
    return FakeRun(run.recommendation.model_copy(update=update), run.trials)


def test_the_file_works_offline(tmp_path: Path) -> None:
    """One file, plotly inside once, and nothing that a browser would fetch."""
    path = tmp_path / "report.html"
    write_report(path, *resolved_run(), title="chat-short")
    html = path.read_text(encoding="utf-8")
    source = plotly.offline.get_plotlyjs()
    seen = Seen(html.replace(source, ""))

    assert html.count(source) == 1
    assert seen.links == ["data:,"]
    assert not re.search(r"url\(|@import", seen.styles)
    assert html.count('class="plotly-graph-div"') == 5


def test_the_answer_is_the_first_section() -> None:
    """Who reads one screen has the verdict, both configs beside the defaults, and the gain."""
    seen = shown(resolved_run())
    first = seen.words[: seen.words.index("Why this knee")]

    assert seen.sections[0] == "answer"
    for part in ("resolved", "Production", "Protective", "Defaults", "max_num_seqs", "340 tok/s", "330 to 351"):
        assert part in first
    for part in ("144 ms", "54 ms", "Preemptions", "368 MiB", "1.4 GiB", "+2.1 % output throughput over the defaults"):
        assert part in first


def test_every_section_of_a_resolved_run_is_there() -> None:
    """Nothing a reader needs to believe or to operate the answer is missing."""
    expected = ["answer", "knee", "diagnosis", "compare", "overload", "burst", "sure", "night"]
    seen = shown(resolved_run())

    assert seen.sections == [*expected, "trials", "time", "provenance"]


def test_what_still_helps_and_what_a_replica_holds_is_said_with_its_figures() -> None:
    """A reader learns which parameter to leave alone, how many replicas to order, and what a token costs."""
    words = shown(resolved_run()).words

    for part in (
        "By the prefill speed at load 1 computing takes 61% to 74% of it.",
        "kv_cache_dtype fp8",
        "cannot help",
        "90 % of requests inside the SLO up to 20 concurrent requests",
        "(95 %, between 90 % and 98 % there)",
        "3 replicas: 45 users at 20 running requests each",
        "2.5 a million output tokens",
        "memory free, latency up: p95 TTFT over 900 ms",
    ):
        assert part in words


@pytest.mark.parametrize("verdict", UNRESOLVED)
def test_a_run_without_an_answer_still_reports(verdict: RunVerdict) -> None:
    """The reason stands on top, with what to do next, and there is no production config."""
    run = unresolved_run(verdict)
    seen = shown(run)

    assert seen.words.index(run.recommendation.reason) < seen.words.index("How sure")
    assert "No production config" in seen.words
    assert "Next:" in seen.words
    assert "Production" not in seen.heads
    assert not {"compare", "night"} & set(seen.sections)


def test_text_from_outside_stays_text() -> None:
    """An engine's message or a workload's name cannot run a script in the reader's browser."""
    run = resolved_run()
    safe = shown(run)
    origin = provenance().model_copy(update={"engine": HOSTILE, "model": HOSTILE, "packages": {HOSTILE: HOSTILE}})
    trials = tuple(
        trial.model_copy(
            update={
                "origin": HOSTILE,
                "outcome": trial.outcome.model_copy(update={"detail": HOSTILE})
                if isinstance(trial.outcome, Failed)
                else trial.outcome,
            }
        )
        for trial in run.trials
    )
    protective = protective_profile(passed=False)
    assert protective.burst is not None
    burst = protective.burst.model_copy(update={"reasons": (HOSTILE,)})
    symptom = Symptom(symptom="fails_at_start", seen=HOSTILE, means=HOSTILE, first=HOSTILE)
    hostile = FakeRun(
        run.recommendation.model_copy(
            update={
                "reason": HOSTILE,
                "warnings": (HOSTILE,),
                "knee": knee_finding().model_copy(update={"signals": (HOSTILE,), "binding": HOSTILE}),
                "diagnosis": Diagnosis(binding=None, evidence=(HOSTILE,), symptoms=(symptom,)),
                "protective": protective.model_copy(update={"burst": burst, "cuts": (HOSTILE,)}),
                "provenance": origin,
            }
        ),
        trials,
    )

    seen = shown(hostile, title=HOSTILE)

    assert seen.tags.count("script") == safe.tags.count("script")
    assert "img" not in seen.tags
    assert seen.links == ["data:,"]
    assert seen.words.count(HOSTILE) > 10


def test_a_failed_trial_shows_its_kind_and_its_words() -> None:
    """Why a setting failed is in the trial table, and it has no figures."""
    words = shown(resolved_run()).words

    assert "failed: no_kv_memory" in words
    assert "leaves 0 KV blocks" in words


@pytest.mark.parametrize(
    ("ratio", "sentence"),
    [
        (Estimate(value=1.0, low=0.97, high=1.03, num_samples=2), "No difference from the defaults beyond noise"),
        (Estimate(value=0.9, low=0.88, high=0.93, num_samples=2), "Slower than the defaults: -10.0 %"),
    ],
)
def test_no_gain_or_a_loss_is_said(ratio: Estimate, sentence: str) -> None:
    """The report does not sell what the interval does not hold."""
    assert sentence in shown(changed(resolved_run(), baseline=baseline(gain=ratio))).words


def test_an_unmeasured_baseline_is_said() -> None:
    """Without a comparison the gain is unknown, and the page still stands."""
    words = shown(changed(resolved_run(), baseline=None)).words
    pointless = baseline().model_copy(update={"operating_point": None, "throughput_gain": None})

    assert "its gain is unknown" in words
    assert "not measured" in shown(changed(resolved_run(), baseline=pointless)).words


def test_unknown_is_shown_as_unknown() -> None:
    """A counter the engine did not give must not read as no preemptions."""
    run = resolved_run()
    production = run.recommendation.production
    assert production is not None
    point = production.operating_point.model_copy(
        update={"num_preemptions": None, "peak_memory_bytes": None, "kv_cache_usage_peak": None}
    )
    blind = changed(run, production=production.model_copy(update={"operating_point": point}))

    first = shown(blind).words.split("Why this knee")[0]

    assert first.count("unknown") == 3


def test_a_simulated_run_has_a_banner() -> None:
    """Nobody mistakes modelled step times for measured ones."""
    banner = "Nothing here was measured on hardware"

    assert banner in shown(changed(resolved_run(), provenance=provenance(simulated=True))).words
    assert banner not in shown(resolved_run()).words


def test_every_ladder_has_its_own_verdict() -> None:
    """The trial table says what each ladder found, and the chosen one's knee is the answer's."""
    rows = {row[0].text: row for row in page(*resolved_run()).trials.rows}

    assert (rows["5"][2].text, rows["5"][3].text, rows["5"][3].note) == ("knee", "22", "20 to 25")
    assert (rows["1"][2].text, rows["1"][3].text) == ("fenced", "–")
    assert rows["3"][2].text == "failed: no_kv_memory"
    assert (rows["9"][2].text, rows["9"][3].text) == ("measured", "–")


def test_a_trials_operating_point_is_left_of_its_knee_and_inside_the_slo() -> None:
    """A trial is not credited with throughput at a load nobody would run it at; a confirmation has no ladder."""
    best = {row[0].text: row[4].text for row in page(*resolved_run()).trials.rows}
    none_meets = page(*unresolved_run(RunVerdict.SLO_INFEASIBLE)).trials.rows

    assert best["5"].startswith("20: ")
    assert best["1"].startswith("16: ")
    assert best["9"] == "–"
    assert {row[4].text for row in none_meets} == {"none", "–"}


def test_what_else_was_tuned_is_shown_beside_the_three() -> None:
    """A reader of the report can set every value that made the difference."""
    run = resolved_run()
    production = run.recommendation.production
    assert production is not None
    config = production.config.model_copy(update={"watermark": 0.02, "enable_prefix_caching": True, "dtype": "float16"})
    trials = tuple(trial.model_copy(update={"config": config}) if trial.number == 5 else trial for trial in run.trials)
    tuned = FakeRun(changed(run, production=production.model_copy(update={"config": config})).recommendation, trials)

    settings = page(*tuned).settings
    assert settings is not None
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in settings.rows}
    assert rows["watermark"] == ["0.02", "the default", "the default"]
    assert rows["dtype"] == ["float16", "the default", "the default"]
    (row,) = [row for row in page(*tuned).trials.rows if row[0].text == "5"]
    assert row[1].note == "enable_prefix_caching true, dtype float16, watermark 0.02"
    ladders = ladders_info(*tuned)
    assert ladders is not None
    assert any("watermark 0.02" in line.label for line in ladders.lines)
