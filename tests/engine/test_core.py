"""The core's loop and its process, without HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from engine.config import ConfigError, EngineConfig
from engine.core import (
    Abort,
    CoreFailed,
    CoreProcess,
    Ready,
    StepReport,
    Submit,
    _is_out_of_memory,
    cpus_to_use,
    silent_end,
)
from engine.request import FinishReason, SamplingParams
from tests.fakes.serving import wait_until_gone


@pytest.fixture
def core() -> Iterator[CoreProcess]:
    """A ready core with a made-up executor."""
    process = CoreProcess(EngineConfig(model="m"), executor="tests.fakes.executor:FakeExecutor", cpus=None)
    try:
        first = process.receive()
        assert isinstance(first, Ready)
        assert first.resolved.num_gpu_blocks == 64
        yield process
    finally:
        process.stop()


def submit(name: str, num_prompt: int, max_tokens: int) -> Submit:
    """A request as the frontend sends it."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Submit(request_id=name, prompt_token_ids=(7,) * num_prompt, sampling=sampling)


def next_report(core: CoreProcess) -> StepReport:
    """The next report; anything else is a failure."""
    report = core.receive()
    assert isinstance(report, StepReport), report
    return report


def test_one_report_a_step_says_tokens_finishes_and_counts(core: CoreProcess) -> None:
    """The frontend needs nothing else to answer and to count."""
    core.send(submit("a", 20, 3))
    reports = [next_report(core) for _ in range(3)]
    assert [report.request_ids for report in reports] == [("a",)] * 3
    assert [report.finished for report in reports] == [{}, {}, {"a": FinishReason.LENGTH}]
    assert [report.num_step_tokens for report in reports] == [20, 1, 1]
    assert [report.num_running for report in reports] == [1, 1, 0]
    assert reports[0].admitted == ("a",)
    assert reports[0].kv_cache_usage == pytest.approx(2 / 64)
    assert reports[-1].kv_cache_usage == 0


def test_an_abort_while_idle_reports_that_nothing_is_held(core: CoreProcess) -> None:
    """Gauges must not keep the value of a request that is gone."""
    core.send(submit("a", 20, 200))
    core.send(Abort("a"))
    last = next_report(core)
    while last.num_running:
        last = next_report(core)
    assert (last.kv_cache_usage, last.num_waiting) == (0, 0)


def test_an_idle_core_waits_and_says_nothing(core: CoreProcess) -> None:
    """It sleeps on its pipe; a core that polls would disturb every measurement beside it."""
    core.send(submit("a", 4, 1))
    next_report(core)
    process = psutil.Process(core.pid)
    switches = process.num_ctx_switches().voluntary
    assert not core._connection.poll(0.2)
    assert process.num_ctx_switches().voluntary - switches < 5


def test_a_killed_core_reads_as_a_value(core: CoreProcess) -> None:
    """The parent learns of it from the pipe, with the signal and the likely reason."""
    process = psutil.Process(core.pid)
    process.kill()
    failure = core.receive()
    assert isinstance(failure, CoreFailed)
    assert failure.kind == "crashed"
    assert "killed by signal 9, probably for memory" in failure.message
    wait_until_gone([process])


def test_a_kill_that_the_kernel_counted_is_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is taken before the start and after the end, and a core that was ready ran out while serving."""
    monkeypatch.setattr("engine.core.oom_kills", iter((4, 5)).__next__)
    core = CoreProcess(EngineConfig(model="m"), executor="tests.fakes.executor:FakeExecutor", cpus=None)
    try:
        assert isinstance(core.receive(), Ready)
        psutil.Process(core.pid).kill()
        failure = core.receive()
    finally:
        core.stop()
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
        assert isinstance(core.receive(), Ready)
        assert psutil.Process(core.pid).cpu_affinity() == [allowed[0]]
    finally:
        core.stop()


@pytest.mark.parametrize(
    ("bind", "allowed", "cpus"),
    [
        ("auto", {0, 1, 2, 5}, (0, 1, 2)),
        ("auto", {3}, (3,)),
        ("nobind", {0, 1}, None),
        ("0-2,5", {0, 1, 2, 3, 5}, (0, 1, 2, 5)),
        ("1", {0, 1}, (1,)),
    ],
)
def test_cpu_binding(bind: str, allowed: set[int], cpus: tuple[int, ...] | None) -> None:
    """`auto` leaves the last CPU to the frontend and the client, where there is more than one."""
    assert cpus_to_use(bind, allowed, quota=None) == cpus


@pytest.mark.parametrize(
    ("quota", "cpus"), [(0.5, (2,)), (1.0, (2,)), (1.5, (2,)), (2.0, (2,)), (2.5, (2, 3)), (64.0, (2, 3, 5))]
)
def test_auto_keeps_within_the_quota(quota: float, cpus: tuple[int, ...]) -> None:
    """In a container of 2 CPUs on a host of 64, more threads would only wait for each other's time."""
    assert cpus_to_use("auto", {2, 3, 5, 8}, quota=quota) == cpus


def test_a_count_takes_the_first_cpus_there_are() -> None:
    """An exported file does not name CPUs of the machine it was measured on."""
    assert cpus_to_use("count:2", {4, 5, 9}, quota=None) == (4, 5)
    assert cpus_to_use("count:3", {4, 5, 9}, quota=None) == (4, 5, 9)
    with pytest.raises(ConfigError, match=r"asks for 4 CPUs.* may use 3"):
        cpus_to_use("count:4", {4, 5, 9}, quota=None)


@pytest.mark.parametrize(
    "bind", ["", "a", "0-", "3-1", "0,3-1", "0,9", "0;1", "-1", "count:", "count:0", "count:-1", "count:a"]
)
def test_a_binding_that_cannot_be_is_refused(bind: str) -> None:
    """It never falls back to some other CPUs in silence."""
    with pytest.raises(ConfigError, match="cpu_omp_threads_bind"):
        cpus_to_use(bind, {0, 1, 2, 3}, quota=None)
