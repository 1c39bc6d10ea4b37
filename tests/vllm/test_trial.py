"""A trial on a real vLLM: measured, read back, ended; and every way it fails that a CPU can bring about."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import psutil
import pytest

from tests.vllm.conftest import MakeSpec
from tuner.engine_config import EngineConfig
from tuner.engines.family import living, read_launch
from tuner.engines.process import read_url
from tuner.engines.vllm import VllmEngine
from tuner.job import EngineSpec
from tuner.load.workload import Workload
from tuner.measure.prometheus import parse_snapshot
from tuner.records import Failed, FailureKind, Measured, StageRecord, TrialRecord
from tuner.trial import TrialNote, TrialSpec, run_trial

pytestmark = pytest.mark.vllm

SHARING = {
    "input_len": {"kind": "fixed", "tokens": 32},
    "output_len": {"kind": "fixed", "tokens": 16},
    "shared_prefix": {"tokens": 128},
}
LONG = {"input_len": {"kind": "fixed", "tokens": 200}, "output_len": {"kind": "fixed", "tokens": 200}}


def _on(spec: TrialSpec, workload: dict[str, object]) -> TrialSpec:
    sent = Workload.model_validate(workload)
    return spec.model_copy(update={"job": spec.job.model_copy(update={"workload": sent, "burst": sent})})


def _record(events: list[object]) -> TrialRecord:
    trial = events[-1]
    assert isinstance(trial, TrialRecord)
    return trial


TOLD_WITHIN_S = 5.0
"""Of the engine's death its kind of failure is known."""


class _DeathWatch(threading.Thread):
    """Notes when the engine of a trial's directory has died."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self._directory = directory
        self._over = threading.Event()
        self.died_s: float | None = None

    def run(self) -> None:
        """Look a hundred times a second."""
        server: psutil.Process | None = None
        while not self._over.wait(0.01):
            if server is None:
                server = _server(self._directory)
            elif not server.is_running() or server.status() == psutil.STATUS_ZOMBIE:
                self.died_s = time.perf_counter()
                return

    def seconds_since(self) -> float:
        """Since its death; it must have died."""
        told_s = time.perf_counter()
        self.join(1.0)
        self._over.set()
        assert self.died_s is not None
        return told_s - self.died_s


def _server(directory: Path) -> psutil.Process | None:
    """The process that speaks HTTP; None while there is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launch = read_launch(directory)
        return None if launch is None else next(iter(psutil.Process(launch.pid).children()), None)
    return None


def _failure(spec: TrialSpec) -> Failed:
    """What comes of a trial that measures nothing, soon after the engine has died; nothing of it is left."""
    watch = _DeathWatch(spec.directory)
    watch.start()
    events: list[object] = list(run_trial(spec))
    assert watch.seconds_since() < TOLD_WITHIN_S
    assert not any(isinstance(event, StageRecord) for event in events)
    failed = _record(events).outcome
    assert isinstance(failed, Failed)
    assert _nothing_is_left(spec.directory)
    return failed


def _nothing_is_left(directory: Path) -> bool:
    launch = read_launch(directory)
    return launch is not None and not living(launch)


def test_a_trial_measures_what_it_asked_for(make_spec: MakeSpec) -> None:
    """Counts, lengths and settings are the server's own, and its prefix cache is empty before each stage."""
    spec = _on(make_spec(1, 4, enable_prefix_caching=True, max_num_active_seqs=2, watermark=0.01), SHARING)
    events: list[object] = list(run_trial(spec))
    stages = [event for event in events if isinstance(event, StageRecord)]
    notes = [event.text for event in events if isinstance(event, TrialNote)]
    assert {stage.load for stage in stages} == {1, 4}
    for stage in stages:
        assert stage.num_completed > 0
        assert (stage.num_failed, stage.num_preemptions, stage.first_error) == (0, 0, None)
        assert (stage.mean_prompt_tokens, stage.mean_output_tokens) == (160, 16)
        assert stage.prefix_cache_reset == "done"
        assert stage.kv_cache_usage_peak is not None
        assert stage.peak_running is not None
        assert stage.peak_running <= 2
        assert stage.steps is not None
        assert stage.memory.reserved_bytes is not None
        assert stage.memory.in_use_peak_bytes is None  # vLLM does not tell the activations
        assert not any("estimated" in reason for reason in stage.invalid_reasons)
    # One short request at a time may be over whenever a scrape comes.
    assert max(stage.kv_cache_usage_peak or 0.0 for stage in stages if stage.load == 4) > 0
    record = _record(events)
    if isinstance(record.outcome, Measured):  # a busy machine's stages may be invalid, and then it has no facts
        assert record.outcome.facts.kv_block_bytes == 2 * 4 * 4 * 32 * 4 * 128
    assert any("vllm loads the model" in note for note in notes)
    assert record.start_s > 0
    command = json.loads((spec.directory / "command.json").read_text())
    assert "--no-enable-chunked-prefill" not in command
    assert "--enable-prefix-caching" in command
    assert _nothing_is_left(spec.directory)


def test_preemptions_in_the_record_are_the_counters_difference(make_spec: MakeSpec) -> None:
    """A cache of ten blocks cannot hold six requests of 400 tokens: what that costs is counted, not guessed."""
    spec = _on(make_spec(6, max_num_seqs=6, num_gpu_blocks_override=10), LONG)
    events: list[object] = list(run_trial(spec))
    stage = next(event for event in events if isinstance(event, StageRecord))
    assert stage.num_preemptions is not None
    assert stage.num_preemptions > 0
    assert stage.num_preemptions in _counted(spec.directory, stage)


def _counted(directory: Path, stage: StageRecord) -> set[float]:
    """The counter's difference over a stage's window: more than one, where a scrape was under way at its end."""
    scrapes = pd.read_parquet(directory / "memory.parquet")
    scrapes = scrapes[scrapes["stage"] == stage.index].sort_values("at_s")
    before = scrapes[scrapes["at_s"] <= stage.warm_up_s].iloc[-1]
    after = scrapes[scrapes["at_s"] >= stage.warm_up_s + stage.measured_s]
    return {float(preemptions - before["preemptions"]) for preemptions in after["preemptions"]}


def test_preemptions_of_two_cores_are_counted_together(make_spec: MakeSpec) -> None:
    """Each core has its own series: the first alone would say that half of them did not happen."""
    spec = _on(make_spec(12, max_num_seqs=6, num_gpu_blocks_override=10, data_parallel_size=2), LONG)
    with contextlib.closing(run_trial(spec)) as events:
        stage = next(event for event in events if isinstance(event, StageRecord))
        command = json.loads((spec.directory / "command.json").read_text())
        page = read_url(f"http://127.0.0.1:{command[command.index('--port') + 1]}/metrics", timeout_s=5.0).decode()
    of_each = [float(value) for value in re.findall(r"^vllm:num_preemptions_total\{.*\} (\S+)$", page, re.MULTILINE)]

    assert len(of_each) == 2
    assert min(of_each) > 0
    assert parse_snapshot(page, at_s=0.0).preemptions == sum(of_each)
    assert stage.num_preemptions in _counted(spec.directory, stage)
    assert 0 < stage.num_preemptions <= sum(of_each)


@pytest.mark.parametrize(
    ("config", "kind", "told"),
    [
        ({"max_model_len": 4096}, FailureKind.INVALID_CONFIG, "max_model_len (4096) is greater"),
        ({"max_num_seqs": 16, "max_num_batched_tokens": 8}, FailureKind.INVALID_CONFIG, "max_num_seqs (16)"),
        ({"gpu_memory_utilization": 0.999}, FailureKind.OOM_STARTUP, "gpu_memory_utilization=0.999"),
        ({"kv_cache_memory_bytes": 2**20}, FailureKind.NO_KV_MEMORY, "To serve at least one request"),
    ],
)
def test_a_setting_that_cannot_start_is_told_by_the_line_that_says_why(
    make_spec: MakeSpec, config: dict[str, object], kind: FailureKind, told: str
) -> None:
    """The study learns from the kind, and a person from the line; the next launch finds the machine free."""
    failed = _failure(make_spec(1, **config))
    assert failed.kind is kind
    assert told in failed.detail


def test_a_port_that_somebody_took_condemns_no_setting(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the choice of a port and its use another process may be quicker."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("tuner.engines.starting.free_port", lambda: taken.getsockname()[1])
        failed = _failure(make_spec(1))
    assert failed.kind is FailureKind.INFRASTRUCTURE
    assert "Address already in use" in failed.detail


def test_a_start_that_takes_too_long_is_ended(make_spec: MakeSpec) -> None:
    """A start that hangs costs its limit, and leaves no process."""
    failed = _failure(make_spec(1, engine={"start_timeout": "2s"}))
    assert failed.kind is FailureKind.START_TIMEOUT
    assert "engine.start_timeout=2s" in failed.detail


def test_a_value_that_did_not_reach_the_server_ends_the_trial(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of 128 sequences under the name of 8 would be recommended as those of 8."""
    whole = VllmEngine.command

    def forgetful(
        self: VllmEngine, model: str, config: EngineConfig, spec: EngineSpec, *, port: int, served_model_name: str
    ) -> list[str]:
        line = whole(self, model, config, spec, port=port, served_model_name=served_model_name)
        at = line.index("--max-num-seqs")
        return line[:at] + line[at + 2 :]

    monkeypatch.setattr(VllmEngine, "command", forgetful)
    failed = _failure(make_spec(1))
    assert failed.kind is FailureKind.CONFIG_MISMATCH
    assert failed.detail == "max_num_seqs: asked for 8, the engine runs with 128"


def _after_the_first_stage(spec: TrialSpec, number: signal.Signals) -> TrialRecord:
    """The record of a trial whose computing process gets a signal when its first stage has ended."""
    watch = _DeathWatch(spec.directory)
    watch.start()
    events: Iterator[object] = run_trial(spec)
    next(event for event in events if isinstance(event, StageRecord))
    _computes(spec.directory).send_signal(number)
    record = _record(list(events))
    assert watch.seconds_since() < TOLD_WITHIN_S
    return record


def _computes(directory: Path) -> psutil.Process:
    """The process behind the one that speaks HTTP that has used the CPU most."""
    server = _server(directory)
    assert server is not None
    return max(server.children(recursive=True), key=lambda process: process.cpu_times().user)


def test_a_core_that_is_killed_ends_the_trial_as_crashed(make_spec: MakeSpec) -> None:
    """The process that answers HTTP outlives the one that computes for a moment: it is not measured."""
    spec = make_spec(1, 2, 4, 8)
    failed = _after_the_first_stage(spec, signal.SIGKILL).outcome
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.CRASHED
    assert "died unexpectedly" in failed.detail
    assert _nothing_is_left(spec.directory)


def test_a_core_that_hangs_is_stalled_though_the_server_says_it_is_healthy(make_spec: MakeSpec) -> None:
    """A health check answers for the process that speaks HTTP alone."""
    spec = make_spec(1, 4)
    longer = spec.job.measure.model_copy(update={"max_time": 45.0, "max_warm_up": 45.0})
    spec = spec.model_copy(update={"job": spec.job.model_copy(update={"measure": longer})})
    failed = _after_the_first_stage(spec, signal.SIGSTOP).outcome
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.STALLED
    assert _nothing_is_left(spec.directory)
