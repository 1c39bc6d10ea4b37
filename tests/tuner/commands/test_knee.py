"""`kneetune knee`: what a person and a script read, and the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.records import CHOSEN, estimate, rate_stage
from tests.tuner.elsewhere import samples
from tuner import __main__ as cli
from tuner.analysis.open_loop import find_open_loop_knee, open_loop_point
from tuner.answer import LadderVerdict
from tuner.elsewhere.csv_table import COLUMNS

ROW_53 = "concurrency,output_throughput\n" + "\n".join(
    f"{load},{rate}"
    for load, rate in zip((1, 2, 4, 8, 16, 32, 64, 128), (100, 198, 390, 760, 1440, 2500, 2600, 2620), strict=True)
)


class _Kneetune:
    """The command in this process; returns exit code and what it wrote."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._monkeypatch, self._capsys, self.folder = monkeypatch, capsys, folder

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["kneetune", "knee", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        written = self._capsys.readouterr()
        return int(ended.value.code or 0), written.out, written.err

    def json(self, *arguments: object) -> tuple[int, dict[str, Any]]:
        code, out, _ = self(*arguments, "--json")
        return code, json.loads(out)

    def csv(self, text: str) -> Path:
        path = self.folder / "results.csv"
        path.write_text(text)
        return path

    def vllm(self) -> list[Path]:
        paths = []
        for n in samples.CONCURRENCIES:
            paths.append(self.folder / f"c{n}.json")
            paths[-1].write_text(json.dumps(samples.vllm(n)))
        return paths


@pytest.fixture
def kneetune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> _Kneetune:
    """The command, and a folder for its files."""
    return _Kneetune(monkeypatch, capsys, tmp_path)


def test_json_is_the_published_shape(kneetune: _Kneetune) -> None:
    """A script finds verdict, knee and warnings under the names it was promised, and no others."""
    code, answer = kneetune.json(kneetune.csv(ROW_53))

    assert code == 0
    assert answer.keys() == {"verdict", "knee", "warnings"}
    assert answer["knee"].keys() == {"load", "interval", "signals", "cross_checks"}
    assert (answer["verdict"], answer["knee"]["load"]) == ("resolved", 32)
    assert answer["knee"]["interval"][0] <= 32 <= answer["knee"]["interval"][1]
    assert answer["knee"]["cross_checks"]["kneedle"] == 32


@pytest.mark.parametrize(
    ("rates", "options", "verdict", "said"),
    [
        ([100 * 2**k for k in range(8)], (), "not_reached", "no knee up to load 128: extend the range"),
        ([500, 505, 498, 503, 499, 502, 501, 500], (), "already_saturated", "saturated at the lowest load"),
        ([100, 195, 380], (), "too_few_stages", "3 valid"),
        ([], (), "too_few_stages", "0 valid"),
        ([100, 200, 400, 800, 1600, 3200, 3200, 3200], ("--fence", "32"), "fenced", "raise max_num_seqs"),
    ],
)
def test_without_a_knee_the_verdict_says_why(
    kneetune: _Kneetune, rates: list[int], options: tuple[str, ...], verdict: str, said: str
) -> None:
    """Exit code 1, no knee, and the reason: never a guess, never a traceback."""
    rows = "".join(f"{2**k},{rate}\n" for k, rate in enumerate(rates))
    code, answer = kneetune.json(kneetune.csv("concurrency,output_throughput\n" + rows), *options)

    assert (code, answer["verdict"], answer["knee"]) == (1, verdict, None)
    assert any(said in warning for warning in answer["warnings"])


def test_lines_say_what_why_how_sure_and_what_to_do(kneetune: _Kneetune) -> None:
    """A person reads the knee, its interval, other rules and the next step without a manual."""
    code, out, _ = kneetune(*kneetune.vllm())

    assert code == 0
    heads = [line.split("  ")[0] for line in out.splitlines()]
    assert heads[0].startswith("resolved: 9 of 9 stages valid")
    assert {"knee", "interval", "cautious", "others say", "warning", "next"} <= set(heads)
    assert "knee        20 concurrent requests" in out
    assert "preemptions are not known" in out


def test_limits_add_the_point_and_where_they_are_left(kneetune: _Kneetune) -> None:
    """With an SLO the answer is a measured stage inside it, and the crossing is said to be no measurement."""
    code, answer = kneetune.json(*kneetune.vllm(), "--slo-ttft-p95", "250ms", "--slo-itl-p95", "1s")
    _, out, _ = kneetune(*kneetune.vllm(), "--slo-ttft-p95", "250ms")

    assert code == 0
    assert (answer["operating_point"]["load"], answer["operating_point"]["ttft_p95_ms"]) == (8, 160)
    assert answer["slo_boundary"]["load"] == pytest.approx(12.5)
    assert answer["slo_boundary"]["between"] == [8, 16]
    assert answer["slo_boundary"]["how"] == "interpolated, not measured"
    assert "crosses its limit near 12.5, between 8 and 16 (interpolated, not measured)" in out


def test_limits_that_nothing_meets_are_the_verdict(kneetune: _Kneetune) -> None:
    """A knee that breaks the SLO is not sold as an answer, nor is one whose tails nobody knows."""
    code, answer = kneetune.json(*kneetune.vllm(), "--slo-ttft-p95", "5ms")
    unknown = kneetune.json(kneetune.csv(ROW_53), "--slo-itl-p95", "50ms")

    assert (code, answer["verdict"], answer["knee"]) == (1, "slo_infeasible", None)
    assert "the knee is at 20" in answer["warnings"][0]
    assert answer["slo_boundary"] == {
        "load": None,
        "between": [None, 1],
        "limit": "ttft_p95",
        "how": "interpolated, not measured",
    }
    assert (unknown[0], unknown[1]["verdict"]) == (1, "slo_infeasible")


def test_too_few_requests_prove_no_p95(kneetune: _Kneetune) -> None:
    """A p95 of 40 requests is the slowest one's: no operating point stands on it, and it is said."""
    paths = kneetune.vllm()
    for n in (8, 16):
        (kneetune.folder / f"c{n}.json").write_text(json.dumps(samples.vllm(n, completed=40)))
    _, answer = kneetune.json(*paths, "--slo-ttft-p95", "10s")

    assert answer["operating_point"]["load"] == 4
    assert any("too few requests for a p95, fewer than 59, at load 8 (40), 16 (40)" in w for w in answer["warnings"])


def test_rates_say_which_rule_was_used(kneetune: _Kneetune) -> None:
    """An open loop with latencies is judged by power, without them only by capacity, and the answer tells which."""
    rows = [(rate, 64 * min(rate, 5), 200 / max(0.05, 1 - rate / 5)) for rate in (0.5, 1, 2, 3, 4, 5, 8)]
    bare = "request_rate,output_throughput\n" + "".join(f"{a},{b}\n" for a, b, _ in rows)
    full = "request_rate,output_throughput,request_throughput,mean_e2e_ms\n" + "".join(
        f"{a},{b},{min(a, 5)},{c}\n" for a, b, c in rows
    )
    _, saturation = kneetune.json(kneetune.csv(bare))
    _, power = kneetune.json(kneetune.csv(full))

    assert saturation["knee"]["load"] == 5
    assert "kept up with" in saturation["knee"]["signals"][0]
    assert power["knee"]["load"] == 4
    assert "power over the mean number in flight" in power["knee"]["signals"][0]


def test_our_own_rates_count_as_they_were_sent(kneetune: _Kneetune) -> None:
    """Random arrivals scatter by a tenth around the rate: of a server that keeps up with all, that is no knee."""
    stages = []
    for number, (rate, share) in enumerate([(1, 1.0), (2, 1.03), (3, 0.97), (4, 1.02), (5, 0.9), (6, 0.88)]):
        seen = {"sent_rps": share * rate, "request_throughput_rps": share * rate, "measured_s": 60.0}
        made = rate_stage(CHOSEN, float(rate), index=number)
        seen |= {"mean_in_flight": 0.5 * rate, "output_throughput": estimate(64 * share * rate), "ended_by": "precise"}
        stages.append(made.model_copy(update=seen))
    path = kneetune.folder / "stages.jsonl"
    path.write_text("\n".join(each.model_dump_json() for each in stages))
    _, answer = kneetune.json(path)
    benched, _ = find_open_loop_knee([open_loop_point(each) for each in stages])
    assert benched.verdict is LadderVerdict.NOT_REACHED
    assert answer["verdict"] == "not_reached"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--slo-ttft-p95", "500"), "500ms, 30s"),
        (("--slo-itl-p95", "0ms"), "must be above 0"),
        (("--r", "0"), "--r is 0"),
        (("--fence", "0"), "--fence is 0"),
    ],
)
def test_bad_options_are_bad_input(kneetune: _Kneetune, options: tuple[str, ...], said: str) -> None:
    """A limit without a unit, or out of all range, ends with exit code 2 and the way out."""
    code, out, err = kneetune(kneetune.csv(ROW_53), *options)

    assert (code, out) == (2, "")
    assert said in err


def test_a_missing_file_is_bad_input(kneetune: _Kneetune) -> None:
    """A wrong path is one line and exit code 2."""
    code, _, err = kneetune(kneetune.folder / "none.csv")

    assert code == 2
    assert "none.csv: no such file" in err


def test_r_moves_the_knee_to_the_cautious_side(kneetune: _Kneetune) -> None:
    """With r = 1 the answer is Kleinrock's."""
    _, answer = kneetune.json(*kneetune.vllm(), "--r", "1")

    assert answer["knee"]["load"] == 4


def test_standing_at_a_fence_is_advised_only_inside_the_limits(kneetune: _Kneetune) -> None:
    """Where the fence's own load breaks the limits, "it is safe there" would put users past them."""
    rows = "\n".join(f"{load},{100 * load},{20 * load}" for load in (1, 2, 3, 4, 6, 8))
    results = kneetune.csv(f"concurrency,output_throughput,p95_ttft_ms\n{rows}")
    _, without, _ = kneetune(results, "--fence", 8)
    assert "safe" not in without
    assert "whether the fence keeps your limits is not known" in without
    _, broken, _ = kneetune(results, "--fence", 8, "--slo-ttft-p95", "70ms")
    assert "next        run at 3 concurrent requests; the limits are left before the fence is met" in broken
    _, kept, _ = kneetune(results, "--fence", 8, "--slo-ttft-p95", "700ms")
    assert "raise max_num_seqs and measure on; until then run at 8 concurrent requests" in kept


def test_the_example_of_the_docs_answers_as_they_say(kneetune: _Kneetune) -> None:
    """Who pastes the example sees what it promises."""
    text = (Path(__file__).parents[3] / "docs" / "knee.md").read_text()
    table = text.split("<<END\n")[1].split("END\n")[0]
    code, answer = kneetune.json(kneetune.csv(table), "--slo-ttft-p95", "500ms", "--slo-itl-p95", "50ms")

    assert (code, answer["verdict"], answer["knee"]["load"]) == (0, "resolved", 32)
    assert all(f"`{column}`" in text for column in COLUMNS)
