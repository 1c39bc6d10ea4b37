"""The report of a bench: one file, whatever the verdict, with what is unknown called unknown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reports.bench import bench_info, render_bench, write_bench_report
from tests.fakes.bench import bench_answer
from tests.fakes.records import CHOSEN, SLO, estimate, ladder, rate_stage
from tuner.analysis.rates import safe_rate_found
from tuner.bench_answer import headline, next_move
from tuner.elsewhere.stage import Axis
from tuner.ladder_answer import AnswerVerdict

FEW = {"ttft_p95_ms": estimate(90.0, num_samples=10)}


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


def test_the_table_rises_with_the_load_and_says_what_was_measured_when() -> None:
    """A bisecting stage stands between its neighbours, not at the end, where nobody looks for it."""
    answer = bench_answer(ladder(CHOSEN)).model_copy(
        update={"command": "kneetune bench http://10.0.0.1:8000 --loads 1"}
    )
    rows = re.findall(r'<th scope="row">(\d+)</th>.*?no\. (\d+)</td>', render_bench(answer))
    loads = [int(load) for load, _ in rows]
    assert loads == sorted(stage.load for stage in answer.stages)
    assert [int(number) for _, number in rows] != sorted(int(number) for _, number in rows)
    assert "kneetune bench http://10.0.0.1:8000 --loads 1" in render_bench(answer)


def test_plotly_is_inside_once_and_only_where_it_draws() -> None:
    """A report opens without a network, and one without a chart weighs kilobytes and not megabytes."""
    assert render_bench(bench_answer(ladder(CHOSEN))).count("plotly.js v") == 1
    assert len(render_bench(bench_answer([rate_stage(CHOSEN, 0.5)]))) < 100_000


@pytest.mark.parametrize(
    ("verdict", "asked", "told"),
    [
        (AnswerVerdict.NOT_REACHED, (), "raise --max-load"),
        (AnswerVerdict.NOT_REACHED, (1.0, 4.0), "--loads 1,4,8,16"),
        (AnswerVerdict.TOO_FEW_STAGES, (1.0, 2.0), "leave --loads out"),
    ],
)
def test_the_next_move_is_one_that_can_be_made(verdict: AnswerVerdict, asked: tuple[float, ...], told: str) -> None:
    """Who named the loads is not told to raise a limit that does not apply."""
    answer = bench_answer(ladder(CHOSEN)).model_copy(update={"verdict": verdict, "asked": asked})
    assert told in next_move(answer)


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


def test_a_server_that_went_away_is_looked_at_before_anything_else() -> None:
    """To give it more time sends somebody whose server was killed to wait for it."""
    dead = {"num_completed": 0, "num_failed": 20, "ended_by": "failures", "valid": False, "first_error": "refused"}
    stages = ladder(CHOSEN)
    early = next_move(bench_answer((*stages[:2], stages[2].model_copy(update=dead))))
    assert "server's log" in early
    assert f"load {stages[2].load}" in early
    assert "--time" not in early
    late = bench_answer((*stages[:-1], stages[-1].model_copy(update=dead)))
    assert late.verdict is AnswerVerdict.RESOLVED
    assert "server's log" in next_move(late)
    assert "max_num_seqs=" in next_move(late)


def test_a_fence_is_not_to_be_raised_where_the_limits_are_left_below_it() -> None:
    """At load 8 of 8 the limits were broken: a higher max_num_seqs costs a restart and changes nothing."""
    fenced = {"verdict": AnswerVerdict.FENCED, "fence": 64}
    answer = bench_answer(ladder(CHOSEN)).model_copy(update=fenced)
    assert answer.slo is not None
    top = max(stage.load for stage in answer.stages if not stage.fenced)
    move = next_move(answer)
    assert f"at load {top}, within the fence, p95" in move
    assert "does not help" in move
    thinking = tuple(stage.model_copy(update={"thinks": True}) for stage in answer.stages)
    late = {"slo": answer.slo.model_copy(update={"ttft_p95_ms": 1.0, "itl_p95_ms": 1e6}), "stages": thinking}
    # Some of their requests wait at the fence at loads that fit it on average: that a higher one does mend.
    assert "higher max_num_seqs and measure again" in next_move(answer.model_copy(update=late))
    wide = answer.slo.model_copy(update={"ttft_p95_ms": 1e6, "itl_p95_ms": 1e6})
    assert "higher max_num_seqs and measure again" in next_move(answer.model_copy(update={"slo": wide}))


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("others use this server: 4 requests running or waiting", "take the others off the server"),
        ("client bound: requests left 80 ms late", "machine with cores to spare"),
        ("not steady: tokens came clearly faster", "--time"),
    ],
)
def test_what_spoilt_the_stages_is_what_to_change(reason: str, told: str) -> None:
    """More time makes no room on a server that others use, and no core on a machine without one."""
    spoilt = {"valid": False, "invalid_reasons": (reason,)}
    answer = bench_answer(tuple(stage.model_copy(update=spoilt) for stage in ladder(CHOSEN)))
    assert told in next_move(answer)


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ({8.0: {}}, "try rates above 8, the highest that was measured: --rates 16"),
        ({4.0: FEW, 8.0: {}}, "try rates above 8"),
        ({8.0: {}, 9.0: {"valid": False}}, "measure higher rates again, no stage of theirs told enough: --rates 9"),
        (
            {8.0: {}, 9.0: FEW},
            "let no more than 8 requests/s in, at the gateway; whether 9 are safe too is open: --time 60s",
        ),
        ({8.0: {}, 9.0: {"ttft_p95_ms": estimate(1e5)}}, "let no more than 8 requests/s in, at the gateway"),
        ({9.0: FEW}, "measure 9 requests/s for longer, --time 60s or try lower rates: --rates 4.5"),
        ({9.0: {"ttft_p95_ms": estimate(1e5)}}, "try lower rates: --rates 4.5"),
    ],
)
def test_after_rates_it_says_what_is_true_and_which_value_helps(
    rates: dict[float, dict[str, object]], told: str
) -> None:
    """That every rate so far is safe was said while lower ones were open, and advice without a value is no help."""
    held = {"ttft_p95_ms": estimate(90.0), "itl_p95_ms": estimate(20.0), "ended_by": "time", "measured_s": 20.0}
    stages = [rate_stage(CHOSEN, rate).model_copy(update=held | seen) for rate, seen in rates.items()]
    answer = bench_answer(ladder(CHOSEN)).model_copy(
        update={
            "axis": Axis.REQUEST_RATE,
            "verdict": AnswerVerdict.MEASURED,
            "slo": SLO,
            "stages": tuple(stages),
            "safe_rate_rps": safe_rate_found(stages, SLO),
        }
    )
    assert next_move(answer).startswith(told)
