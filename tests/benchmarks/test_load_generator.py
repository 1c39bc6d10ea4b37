"""The instrument's own instrument: a server with a known schedule must keep it, and its log must say so."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import uvloop

from tuner.load.client import read_completion, request_bytes
from tuner.load.connection import Exchange, connect
from tuner.load.prompts import Message, PromptRequest
from tuner.load.workload import load_workload
from tuner.measure.stage import StageSpec, Target, measure_stage
from tuner.records import RequestRecord, StageKind

FOLDER = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the stub is compiled")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """`truth` and `load_table`, imported as the script does: from their own folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    import load_table  # type: ignore[import-not-found]
    import truth  # type: ignore[import-not-found]

    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            monkeypatch.delitem(sys.modules, name)
    return truth, load_table


@pytest.fixture
def program(scripts: tuple[ModuleType, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub, compiled."""
    built: Path = scripts[0].build(tmp_path_factory.getbasetemp() / "stub")
    return built


def ask(endpoint: object, *, tokens: int, messages: tuple[Message, ...] = ()) -> tuple[Exchange, RequestRecord]:
    """One request, a chat's where there are messages, and what our client makes of the answer."""
    request = PromptRequest(
        index=0,
        prompt_token_ids=() if messages else (1, 2, 3),
        max_tokens=tokens,
        temperature=0.0,
        ignore_eos=True,
        num_prompt_tokens=3,
        messages=messages,
    )

    async def run() -> Exchange:
        connection = await connect(endpoint)  # type: ignore[arg-type]
        exchange, done = connection.start(
            request_bytes(request, endpoint=endpoint, model="stub"),  # type: ignore[arg-type]
            intended_s=0.0,
        )
        await done
        connection.abort()
        return exchange

    exchange = uvloop.run(run())
    return exchange, read_completion(exchange, request, origin_s=0.0, now_s=0.0)


def test_the_stub_sends_nothing_before_its_time_and_logs_all(
    scripts: tuple[ModuleType, ModuleType], program: Path, tmp_path: Path
) -> None:
    """What every client is measured against: a truth that is early or has holes makes good clients look bad."""
    truth, _ = scripts
    schedule = truth.Schedule(ttft_ms=20.0, itl_ms=5.0, tokens=8)
    with truth.stub(program, schedule, log=tmp_path / "log", cpu=None) as server:
        for _ in range(3):
            _, record = ask(server.endpoint, tokens=8)
            assert record.error is None
            assert record.num_output_tokens == 8
            assert record.num_prompt_tokens == 3
    found = truth.read_truth(tmp_path / "log")
    assert (found.num_ended, found.num_ended_badly, found.num_left) == (3, 0, 0)
    assert len(found.ttft_ms) == 3
    assert len(found.itl_ms) == 3 * 7
    assert found.num_chunks == 3 * 8
    assert min(found.ttft_ms) >= 20.0
    for number in range(3):
        assert found.ttft_ms[number] + sum(found.itl_ms[7 * number : 7 * number + 7]) >= 20.0 + 7 * 5.0


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("error", "error in the stream: engine died"),
        ("cut", "the connection was lost before the response ended"),
        ("empty", "no token: the stream ended without one"),
        ("busy", "HTTP 503: queue full"),
        ("role", None),
        ("packed", None),
    ],
)
def test_odd_streams_are_what_they_are_called(
    scripts: tuple[ModuleType, ModuleType], program: Path, tmp_path: Path, mode: str, error: str | None
) -> None:
    """A peer is only found to take an error for a success where the stub really sent one."""
    truth, _ = scripts
    schedule = truth.Schedule(ttft_ms=20.0, itl_ms=1.0, tokens=8, mode=mode)
    with truth.stub(program, schedule, log=tmp_path / "log", cpu=None) as server:
        exchange, record = ask(server.endpoint, tokens=8)
    found = truth.read_truth(tmp_path / "log")
    assert record.error == error
    assert found.num_ended_badly == (mode in ("error", "cut", "busy"))
    if mode == "busy":
        assert record.rejected
        assert exchange.headers["retry-after"] == "1"
    if error is None:
        assert record.num_output_tokens == 8
        assert len(found.itl_ms) == (4 if mode == "packed" else 7)
        assert record.first_token_s is not None
        assert record.first_token_s - record.sent_s > 0.015


@pytest.mark.parametrize("mode", ["plain", "role"])
def test_a_chat_has_its_role_before_its_first_token(
    scripts: tuple[ModuleType, ModuleType], program: Path, tmp_path: Path, mode: str
) -> None:
    """Clients that only speak chat are held against the same truth; a role alone is no token."""
    truth, _ = scripts
    schedule = truth.Schedule(ttft_ms=20.0, itl_ms=1.0, tokens=8, mode=mode)
    with truth.stub(program, schedule, log=tmp_path / "log", cpu=None) as server:
        exchange, record = ask(server.endpoint, tokens=8, messages=(Message("user", "one two three"),))
    assert (record.error, record.num_output_tokens, record.num_prompt_tokens) == (None, 8, 3)
    assert b'"role":"assistant"' in exchange.body
    assert record.first_token_s is not None
    assert record.first_token_s - record.sent_s > 0.015
    assert truth.read_truth(tmp_path / "log").num_chunks == 8


def test_a_stage_holds_every_stream_it_names(
    scripts: tuple[ModuleType, ModuleType], program: Path, tmp_path: Path
) -> None:
    """A cap on connections in the client reads as an engine that cannot take more."""
    truth, _ = scripts
    schedule = truth.Schedule(ttft_ms=1000.0, tokens=1)
    one_token = {"input_len": {"kind": "fixed", "tokens": 5}, "output_len": {"kind": "fixed", "tokens": 1}}
    with truth.stub(program, schedule, log=tmp_path / "log", cpu=None) as server:
        spec = StageSpec(
            index=0,
            kind=StageKind.LADDER,
            load=256,
            max_num_seqs=256,
            workload=load_workload(one_token),
            entropy=(0, 0, 0, 0),
            max_warm_up_s=1.5,
            max_s=2.0,
        )
        target = Target(endpoint=server.endpoint, model="stub", max_model_len=100)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measured = runner.run(measure_stage(spec, target))
    found = truth.read_truth(tmp_path / "log")
    assert found.peak_in_flight == 256
    # One more for the scrapes.
    assert found.peak_sockets == 257
    assert measured.record.mean_in_flight > 250


def test_what_a_tool_does_not_say_is_not_made_up(scripts: tuple[ModuleType, ModuleType]) -> None:
    """A missing figure shown as no error would flatter who reports least."""
    _, table = scripts
    assert table.relative_error(None, 50.0) is None
    assert table.relative_error(51.0, None) is None
    assert table.relative_error(51.0, 50.0) == pytest.approx(0.02)
