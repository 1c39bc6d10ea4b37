"""`kneetune bench` as it is typed: what is refused, what is written where, and with which exit code."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from tests.fakes.server import Behaviour, StubEngine, running_stub
from tuner import __main__ as cli
from tuner.bench_answer import BenchAnswer
from tuner.elsewhere.stage import Axis
from tuner.ladder_answer import AnswerVerdict
from tuner.records import StageKind

KEY = "sk-very-secret"


@contextmanager
def _stub() -> Iterator[StubEngine]:
    """A stub in a thread of its own, so that the command may run its own loop."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), list[StubEngine]()
    over = asyncio.Event()

    async def serve() -> None:
        async with running_stub(Behaviour(ttft_s=0.01, itl_s=0.001)) as stub:
            stub.pages = {"/v1/models": (200, json.dumps({"data": [{"id": "m", "max_model_len": 512}]}))}
            found.append(stub)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kneetune", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


def test_two_runs_send_no_prompt_twice_and_keep_the_key_to_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A live server's prefix cache must not serve the second run, and a key must not end up in a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BENCH_KEY", KEY)
    quick = ("--workload", "chat-short", "--loads", "1,2", "--time", "1s", "--api-key-env", "BENCH_KEY", "--json")
    seeds = []
    with _stub() as stub:
        for _ in range(2):
            assert _run(monkeypatch, stub.endpoint.url, *quick) == 1  # two stages are too few for a knee
            printed = capsys.readouterr()
            answer = BenchAnswer.model_validate_json(printed.out)
            assert KEY not in printed.out + printed.err
            assert answer.prefix_cache == "not reset: HTTP 404"
            assert {stage.load for stage in answer.stages} == {1, 2}
            seeds.append(answer.seed)
    assert len(set(seeds)) == 2
    first_blocks = [tuple(body["prompt"][:16]) for body in stub.bodies]
    assert len(set(first_blocks)) == len(first_blocks)
    assert stub.authorizations == {f"Bearer {KEY}"}
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == [f"bench-127.0.0.1-{stub.endpoint.port}{end}" for end in ("", "-2")]
    for file in (tmp_path / "runs").rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes()


def test_a_rate_that_was_asked_for_is_measured_and_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests come by the clock, not by users who wait; a measured rate is an answer, shown to be safe or not."""
    monkeypatch.chdir(tmp_path)
    limits = ("--slo-ttft-p95", "10s", "--slo-itl-p95", "5s")
    with _stub() as stub:
        code = _run(monkeypatch, stub.endpoint.url, "--workload", "chat-short", "--rates", "30", *limits, "--json")
    answer = BenchAnswer.model_validate_json(capsys.readouterr().out)
    assert answer.axis is Axis.REQUEST_RATE
    assert {(stage.kind, stage.load, stage.loop) for stage in answer.stages} == {(StageKind.RATE, 30.0, "open")}
    assert answer.knee is None
    assert answer.operating_point is None
    is_measured = any(stage.valid for stage in answer.stages)
    assert is_measured or answer.safe_rate_rps is None
    for stage in answer.stages:
        assert stage.sent_rps is not None
        assert stage.shown_rps is not None
        assert 0 < stage.shown_rps <= min(30.0, stage.sent_rps)
        # With limits so far off, what was sent counts whole; with near ones what its draws are sure to speak for.
        shown = {stage.shown_rps, min(30.0, stage.sent_rps)}
        assert answer.safe_rate_rps is None or answer.safe_rate_rps.value in shown
    assert (answer.verdict, code) == ((AnswerVerdict.MEASURED, 0) if is_measured else (AnswerVerdict.NOT_MEASURED, 1))
    assert answer.command.endswith("--slo-itl-p95 5s --json")


def test_a_rate_says_before_it_begins_how_long_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits three minutes for what looked like four seconds, nor without a sign of life."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.commands.bench_progress.LINE_S", 0.1)
    with _stub() as stub:
        _run(monkeypatch, stub.endpoint.url, "--workload", "chat-short", "--rates", "60", "--time", "1s")
    told = capsys.readouterr().err
    assert "1 stage, at most " in told
    assert "not before 120 requests" in told
    assert " of at most 0:" in told
    assert told.index("not before 120 requests") < told.index(" of at most 0:") < told.index("tok/s")


def test_a_trace_lies_beside_the_workload_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A workload's file means the same from whichever folder it is used."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "t.jsonl").write_text('{"input_tokens": 9, "output_tokens": 2}\n')
    (tmp_path / "mine" / "w.yaml").write_text("trace: {format: jsonl, path: t.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    assert _run(monkeypatch, "http://127.0.0.1:1", "--workload", "mine/w.yaml") == 2
    assert "no answer" in capsys.readouterr().err  # of the server: the trace was found
    assert not list((tmp_path / "runs").iterdir())


def _replay(folder: Path, rows: list[dict[str, float]]) -> str:
    folder.joinpath("t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trace = "trace: {format: jsonl, path: t.jsonl, time_scale: 0.5}"
    folder.joinpath("w.yaml").write_text(f"{trace}\narrivals: {{kind: trace}}\n")
    return str(folder / "w.yaml")


def test_a_replay_keeps_the_times_of_its_trace_though_some_of_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who replays ten minutes with one request in two too long must not have the others sent twice as fast."""
    monkeypatch.chdir(tmp_path)
    rows = [{"at_s": 0.1 * n, "input_tokens": 9 if n % 2 else 600, "output_tokens": 2} for n in range(21)]
    with _stub() as stub:
        _run(monkeypatch, stub.endpoint.url, "--workload", _replay(tmp_path, rows), "--json")
    stage, *_ = BenchAnswer.model_validate_json(capsys.readouterr().out).stages
    assert (stage.num_completed, stage.num_left_out) == (10, 11)
    sent = pd.read_parquet(next(tmp_path.glob("runs/*/requests.parquet")))
    sent = sent[sent["stage"] == stage.index].sort_values("index")
    assert sent["intended_s"].tolist() == pytest.approx([0.1 * n for n in range(10)], abs=1e-6)
    assert stage.load == pytest.approx(10.0)


def test_a_trace_of_which_one_request_fits_has_no_rate_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single request has no rate; the user learns how many fit, and what to do, in place of a traceback."""
    monkeypatch.chdir(tmp_path)
    rows = [{"at_s": n, "input_tokens": 600 if n else 9, "output_tokens": 2} for n in range(3)]
    with _stub() as stub:
        assert _run(monkeypatch, stub.endpoint.url, "--workload", _replay(tmp_path, rows)) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("1 request", "max_model_len=512", "--rates"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("http://127.0.0.1:1", "--rates", "0"), "--rates: 0 is no rate"),
        (("http://127.0.0.1:1", "--rates", "1,nan"), "--rates: 'nan' is not a finite number"),
        (("http://127.0.0.1:1", "--rates", ","), "--rates: ',' holds no number"),
        (("http://127.0.0.1:1", "--time", "-3s"), "--time: '-3s' is below zero"),
        (("http://127.0.0.1:1", "--time", "0s"), "--time: '0s' must be above 0"),
        (("http://127.0.0.1:1", "--time", "inf"), "--time: 'inf' is not a finite time"),
        (("http://127.0.0.1:1", "--rates", "1", "--loads", "2"), "leave --loads out"),
        (("http://127.0.0.1:1", "--arrivals", "sometimes"), "poisson"),
        (("https://127.0.0.1:1",), "https is not spoken"),
        (("http://user:secret@127.0.0.1:1",), "--api-key-env"),
        (("http://127.0.0.1:1", "--api-key-env", "NOT_SET"), "NOT_SET"),
        (("http://127.0.0.1:1", "--time", "5"), "--time: '5' is without a unit"),
        (("http://127.0.0.1:1", "--loads", "1,x"), "--loads: 'x' is not a number"),
        (("http://127.0.0.1:1", "--loads", "1.5"), "--loads: 1.5 is no number of users"),
        (("http://127.0.0.1:1", "--workload", "chatt"), "did you mean 'chat'"),
        (("http://127.0.0.1:1", "--workload", "no.yaml"), "no.yaml"),
        (("http://127.0.0.1:1", "--slo-itl-p95", "0ms"), "--slo-itl-p95: '0ms' must be above 0"),
        (("http://127.0.0.1:1",), "no answer"),
    ],
)
def test_bad_input_is_exit_2_with_the_way_out(
    arguments: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A typing error costs a second, not a ladder, and never shows a password."""
    monkeypatch.chdir(tmp_path)
    assert _run(monkeypatch, *arguments) == 2
    printed = capsys.readouterr().err
    assert told in printed
    assert "secret" not in printed


def test_a_directory_in_use_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two benches never mix their stages in one folder."""
    (tmp_path / "stages.jsonl").write_text("{}\n")
    assert _run(monkeypatch, "http://127.0.0.1:1", "--out", str(tmp_path)) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_workload_longer_than_the_context_is_refused_with_both_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is sent that the server could only refuse."""
    monkeypatch.chdir(tmp_path)
    with _stub() as stub:
        assert _run(monkeypatch, stub.endpoint.url, "--workload", "chat") == 2
    printed = capsys.readouterr().err
    assert "1280" in printed
    assert "512" in printed
    assert not stub.bodies
