"""The report of a bench: one file, whatever the verdict, with what is unknown called unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.bench import bench_info, render_bench, write_bench_report
from tests.fakes.bench import bench_answer
from tests.fakes.records import CHOSEN, ladder
from tuner.bench_answer import headline, next_move
from tuner.ladder_answer import AnswerVerdict


def test_the_answer_and_what_it_rests_on_are_in_one_file(tmp_path: Path) -> None:
    """It opens without a network, and says where to stand, why, and how the cache was left."""
    answer = bench_answer(ladder(CHOSEN))
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
    info = bench_info(bench_answer(ladder(CHOSEN)))
    assert info is not None
    assert [point.load for point in info.points if point.overload] == [128]
    assert info.trial_fence == 64


@pytest.mark.parametrize("num_stages", [0, 1, 4])
def test_an_interrupted_bench_has_a_report_too(num_stages: int) -> None:
    """Who stopped early still sees what there was."""
    answer = bench_answer(ladder(CHOSEN)[:num_stages], simulated=True, version="0.33.0")
    html = render_bench(answer)
    assert "too few" in html
    assert "Simulated" in html
    assert ("No stage is an operating point" in html) == (answer.operating_point is None)


@pytest.mark.parametrize("verdict", list(AnswerVerdict))
def test_every_verdict_says_what_to_do(verdict: AnswerVerdict) -> None:
    """No answer ends without a next step."""
    answer = bench_answer(ladder(CHOSEN)).model_copy(update={"verdict": verdict})
    assert headline(answer)
    assert next_move(answer)
