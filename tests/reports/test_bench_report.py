"""The report of a bench: one file, whatever the verdict, with what is unknown called unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.bench import bench_info, render_bench, write_bench_report
from tests.fakes.records import CHOSEN, ladder
from tuner.analysis.benched import Asked, conclude
from tuner.bench_answer import BenchAnswer, ServerFacts, headline, next_move
from tuner.ladder_answer import AnswerVerdict, knee_figures, verdict_of
from tuner.load.workload import load_workload
from tuner.records import StageRecord


def _answer(stages: tuple[StageRecord, ...], **server: object) -> BenchAnswer:
    told = {"url": "http://10.0.0.1:8000", "model": "<b>llama</b>", "engine": "vllm", "has_metrics": True} | server
    found = conclude(stages, Asked(fence=64, fence_source="told"))
    workload = load_workload("chat-short")
    verdict = verdict_of(found.finding, is_feasible=True)
    return BenchAnswer(
        verdict=verdict,
        knee=knee_figures(found.finding, verdict, found.finding.signals),
        finding=found.finding,
        warnings=found.warnings,
        slo=found.slo,
        operating_point=found.operating_point,
        fence=found.fence,
        fence_source=found.fence_source,
        server=ServerFacts.model_validate(told),
        workload=workload,
        workload_hash=workload.hash,
        seed=7,
        prefix_cache="not reset: HTTP 404",
        stages=found.stages,
        wall_s=90.0,
        created="2026-12-01T00:00:00+00:00",
        kneetune_version="0.1.0",
    )


def test_the_answer_and_what_it_rests_on_are_in_one_file(tmp_path: Path) -> None:
    """It opens without a network, and says where to stand, why, and how the cache was left."""
    answer = _answer(ladder(CHOSEN))
    write_bench_report(tmp_path / "report.html", answer)
    html = (tmp_path / "report.html").read_text()
    assert answer.operating_point is not None
    assert f"{answer.operating_point.load} concurrent" in html
    assert "not reset: HTTP 404" in html
    assert "chart-knee" in html
    assert "<b>llama</b>" not in html
    assert "<script src" not in html
    assert headline(answer)[1:] in html


def test_the_chart_marks_what_is_past_the_fence() -> None:
    """Load beyond a limit of the server's is not drawn as its curve."""
    info = bench_info(_answer(ladder(CHOSEN)))
    assert info is not None
    assert [point.load for point in info.points if point.overload] == [128]
    assert info.trial_fence == 64


@pytest.mark.parametrize("num_stages", [0, 1, 4])
def test_an_interrupted_bench_has_a_report_too(num_stages: int) -> None:
    """Who stopped early still sees what there was."""
    answer = _answer(ladder(CHOSEN)[:num_stages], simulated=True, version="0.33.0")
    html = render_bench(answer)
    assert "too few" in html
    assert "Simulated" in html
    assert ("No stage is an operating point" in html) == (answer.operating_point is None)


@pytest.mark.parametrize("verdict", list(AnswerVerdict))
def test_every_verdict_says_what_to_do(verdict: AnswerVerdict) -> None:
    """No answer ends without a next step."""
    answer = _answer(ladder(CHOSEN)).model_copy(update={"verdict": verdict})
    assert headline(answer)
    assert next_move(answer)
