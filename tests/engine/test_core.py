"""The core's loop and its process, without HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, sleep

import psutil
import pytest

from engine.config import EngineConfig
from engine.core import (
    Abort,
    Core,
    CoreFailed,
    Ready,
    Refused,
    StepReport,
    Submit,
    _is_out_of_memory,
)
from engine.core_process import CoreProcess, silent_end
from engine.request import FinishReason, SamplingParams
from tests.fakes.cores import PATIENCE_S, Talk
from tests.fakes.executor import FakeExecutor
from tests.fakes.serving import wait_until_gone

_FAKE = "tests.fakes.executor:FakeExecutor"


@pytest.fixture
def core() -> Iterator[Talk]:
    """A ready core with a made-up executor."""
    talk = Talk(EngineConfig(model="m"), executor=_FAKE)
    try:
        first = talk.hear()
        assert isinstance(first, Ready)
        assert first.resolved.num_gpu_blocks == 64
        yield talk
    finally:
        talk.core.stop()


def submit(name: str, num_prompt: int, max_tokens: int) -> Submit:
    """A request as the frontend sends it."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Submit(request_id=name, prompt_token_ids=(7,) * num_prompt, sampling=sampling)


def test_one_report_a_step_says_tokens_finishes_and_counts(core: Talk) -> None:
    """The frontend needs nothing else to answer and to count."""
    core.send(submit("a", 20, 3))
    reports = [core.report() for _ in range(3)]
    assert [report.request_ids for report in reports] == [("a",)] * 3
    assert [report.finished for report in reports] == [{}, {}, {"a": FinishReason.LENGTH}]
    assert [report.num_step_tokens for report in reports] == [20, 1, 1]
    assert [report.num_running for report in reports] == [1, 1, 0]
    assert reports[0].admitted == ("a",)
    assert reports[0].kv_cache_usage == pytest.approx(2 / 64)
    assert reports[-1].kv_cache_usage == 0


def test_an_abort_while_idle_reports_that_nothing_is_held(core: Talk) -> None:
    """Gauges must not keep the value of a request that is gone."""
    core.send(submit("a", 20, 200))
    core.send(Abort("a"))
    last = core.report()
    while last.num_running:
        last = core.report()
    assert (last.kv_cache_usage, last.num_waiting) == (0, 0)


def test_an_idle_core_waits_and_says_nothing(core: Talk) -> None:
    """It sleeps on its socket; a core that polls would disturb every measurement beside it."""
    core.send(submit("a", 4, 1))
    core.report()
    process = core.process
    switches = process.num_ctx_switches().voluntary
    assert not core.core.wait(0.2)
    assert process.num_ctx_switches().voluntary - switches < 5


def test_a_parent_that_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    """HTTP, text and metrics may be slow for a while: the steps go on, and every report arrives later, in order.

    The core leaves a mark when it has drawn the last token, and until then nothing is read: far more than a socket
    holds.
    """
    mark = tmp_path / "done"
    config = EngineConfig(model=str(mark), max_num_seqs=64, num_gpu_blocks_override=3000, max_model_len=1000)
    talk = Talk(config, executor="tests.fakes.executor:MarkingExecutor")
    try:
        assert isinstance(talk.hear(), Ready)
        for index in range(64):
            talk.send(submit(str(index), 4, 900))
        until(mark.exists)
        reports = [talk.report()]
        while reports[-1].num_running or reports[-1].num_waiting:
            reports.append(talk.report())
    finally:
        talk.core.stop()
    assert sum(len(report.token_ids) for report in reports) == 64 * 900
    assert sum(len(report.finished) for report in reports) == 64
    times = [report.scheduled_at_s for report in reports]
    assert times == sorted(times)


def until(happened: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    deadline_s = perf_counter() + PATIENCE_S
    while not happened():
        assert perf_counter() < deadline_s, "it did not happen"
        sleep(0.005)


def test_what_the_core_cannot_do_harms_nobody(core: Talk) -> None:
    """A message from a newer or broken parent costs its sender an answer, and the engine none of its requests."""
    core.send(submit("good", 4, 3))
    assert core.report().request_ids == ("good",)
    bad = [
        submit("empty", 0, 3),
        submit("too long", 256, 3),
        Submit(request_id="no such token", prompt_token_ids=(1, 259), sampling=SamplingParams(max_tokens=1)),
        Abort("nobody"),
        "no message at all",
    ]
    for message in bad:
        core.core.send(message)  # type: ignore[arg-type] - that is the point
    core.send(submit("next", 4, 1))
    refused: list[str | None] = []
    going = {"good", "next"}
    while going:
        match core.hear():
            case Refused(request_id):
                refused.append(request_id)
            case StepReport() as report:
                going -= report.finished.keys()
    assert refused == ["empty", "too long", "no such token", None]


def test_a_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    """Two requests under one name would mix their tokens."""
    core = Core(FakeExecutor(EngineConfig(model="m")))
    assert core.take(submit("a", 4, 2)) is None
    answer = core.take(submit("a", 4, 2))
    assert isinstance(answer, Refused)
    assert "in use" in answer.reason
    assert core.step().request_ids == ("a",)


def test_an_abort_frees_its_blocks_before_the_next_step() -> None:
    """A client that left must not cost the next one its place, not even for a step."""
    core = Core(FakeExecutor(EngineConfig(model="m", max_num_seqs=2, enable_prefix_caching=False)))
    for name in ("a", "b", "waits"):
        core.take(submit(name, 32, 100))
    before = core.step()
    assert (before.admitted, before.num_waiting, before.kv_cache_usage) == (("a", "b"), 1, 4 / 64)
    core.take(Abort("a"))
    after = core.step()
    assert after.admitted == ("waits",)
    assert (after.num_running, after.num_waiting) == (2, 0)
    assert after.kv_cache_usage == 5 / 64  # b has 33 tokens by now
    core.take(Abort("b"))
    core.take(Abort("waits"))
    assert not core.has_work
    assert core.step().kv_cache_usage == 0


def test_a_report_says_what_the_step_computed() -> None:
    """A model of the engine's speed is fitted to these figures."""
    core = Core(FakeExecutor(EngineConfig(model="m", max_num_seqs=4, max_num_batched_tokens=32)))
    core.take(submit("a", 4, 9))
    first = core.step()
    core.take(submit("b", 100, 9))
    second = core.step()
    figures = [(step.num_prefill_tokens, step.num_decodes, step.num_context_tokens) for step in (first, second)]
    assert figures == [(4, 0, 4), (31, 1, 5 + 31)]
    assert all(step.execute_s > 0 for step in (first, second))
    core.take(Abort("a"))
    core.take(Abort("b"))
    assert core.step().execute_s == 0


def test_a_killed_core_reads_as_a_value(core: Talk) -> None:
    """The parent learns of it from the socket, with the signal and the likely reason."""
    core.process.kill()
    failure = core.hear()
    assert isinstance(failure, CoreFailed)
    assert failure.kind == "crashed"
    assert "killed by signal 9, probably for memory" in failure.message
    wait_until_gone([core.process])


def test_a_kill_that_the_kernel_counted_is_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is taken before the start and after the end, and a core that was ready ran out while serving."""
    monkeypatch.setattr("engine.core_process.oom_kills", iter((4, 5)).__next__)
    talk = Talk(EngineConfig(model="m"), executor=_FAKE)
    try:
        assert isinstance(talk.hear(), Ready)
        talk.process.kill()
        failure = talk.hear()
    finally:
        talk.core.stop()
    assert isinstance(failure, CoreFailed)
    assert failure.kind == "oom_runtime"


@pytest.mark.parametrize(
    ("exit_code", "kills", "is_ready", "kind", "words"),
    [
        (-9, (0, 1), True, "oom_runtime", "killed by signal 9 for lack of memory"),
        (-9, (0, 1), False, "oom_startup", "killed by signal 9 for lack of memory"),
        (-9, (1, 1), True, "crashed", "killed by signal 9, probably for memory"),
        (-9, (None, None), False, "crashed", "killed by signal 9, probably for memory"),
        (-11, (0, 1), True, "crashed", "killed by signal 11"),
        (3, (0, 0), True, "crashed", "exit code 3"),
    ],
)
def test_a_silent_end_is_explained(
    exit_code: int,
    kills: tuple[int | None, int | None],
    is_ready: bool,  # noqa: FBT001 - a case
    kind: str,
    words: str,
) -> None:
    """A study must know that a config ran out of memory, and not guess it where nothing proves it."""
    failure = silent_end(exit_code, oom_kills_before=kills[0], oom_kills_after=kills[1], is_ready=is_ready)
    assert failure.kind == kind
    assert words in failure.message
    assert ("memory" in failure.message) == (exit_code == -9)


def test_a_tensor_too_large_for_the_ram_is_lack_of_memory() -> None:
    """On a CPU torch says so with a plain RuntimeError; a study must not take it for a crash."""
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60, dtype=torch.uint8)
    assert _is_out_of_memory(failed.value)
    assert not _is_out_of_memory(RuntimeError("shape mismatch"))


def test_the_core_computes_where_it_was_bound() -> None:
    """The load generator beside it keeps its own CPU."""
    allowed = sorted(psutil.Process().cpu_affinity())
    config = EngineConfig(model="m")
    core = CoreProcess(config, executor="tests.fakes.executor:FakeExecutor", cpus=(allowed[0],))
    try:
        assert core.wait(PATIENCE_S)
        assert psutil.Process(core.pid).cpu_affinity() == [allowed[0]]
    finally:
        core.stop()
