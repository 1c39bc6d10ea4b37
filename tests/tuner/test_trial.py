"""A trial on the real engine: launched, measured over HTTP, stopped, whatever happens to it."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest

from tests.fakes import records
from tests.fakes.processes import RETURNS_MEMORY, engine_of, take_little_more_memory
from tests.fakes.records import facts
from tests.fakes.serving import core_children
from tuner import trial as trial_module
from tuner.engine_config import EngineConfig
from tuner.engines.adapter import OurEngine
from tuner.engines.process import free_port, launched, read_url, wait_until_ready
from tuner.job import EngineSpec, load_job
from tuner.ladder import FixedSteps, LadderStep
from tuner.load.connection import Endpoint
from tuner.measure.memory import EngineMemory
from tuner.measure.prometheus import parse_snapshot
from tuner.records import Failed, FailureKind, Measured, StageKind, StageRecord, TrialRecord, TrialRole
from tuner.trial import TrialNote, TrialSpec, run_trial

QUICK = {"min_requests": 20, "min_time": "300ms", "max_time": "20s", "max_warm_up": "20s", "precision": 0.5}


def _spec(directory: Path, plan: FixedSteps, *, over: dict[str, object] | None = None, **config: object) -> TrialSpec:
    job = load_job("embedded", {"measure": QUICK, **(over or {})})
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.6, "max_model_len": 2048}
    return TrialSpec(
        number=3,
        role=TrialRole.STUDY,
        config=EngineConfig.model_validate(values | config),
        origin="sampler",
        job=job,
        plan=plan,
        directory=directory,
    )


def _steps(*loads: int, kind: StageKind = StageKind.LADDER) -> FixedSteps:
    return FixedSteps(steps=tuple(LadderStep(kind=kind, load=load) for load in loads), request_rate_rps=50.0)


def _run(spec: TrialSpec) -> tuple[list[StageRecord], TrialRecord]:
    *stages, trial = list(run_trial(spec))
    assert isinstance(trial, TrialRecord)
    return [stage for stage in stages if isinstance(stage, StageRecord)], trial


def _engine_is_gone(directory: Path) -> bool:
    identity = json.loads((directory / "process.json").read_text())
    try:
        return psutil.Process(identity["pid"]).create_time() != identity["create_time"]
    except psutil.NoSuchProcess:
        return True


def test_a_trial_measures_the_engine_it_launched_and_leaves_nothing_running(tmp_path: Path) -> None:
    """Figures come from a real process over real HTTP, with its memory and its counters, and it is gone afterwards."""
    stages, trial = _run(_spec(tmp_path, _steps(1, 4)))

    assert isinstance(trial.outcome, Measured)
    assert {stage.load for stage in stages} == {1, 4}  # one that was disturbed is there twice
    assert tuple(stages) == trial.outcome.stages
    for stage in stages:
        assert stage.num_completed > 0
        assert stage.num_failed == 0
        assert stage.output_throughput.value > 0
        assert stage.num_preemptions == 0
        assert stage.kv_cache_usage_peak is not None
        assert stage.memory.in_use_peak_bytes is not None
        assert stage.memory.reserved_bytes is not None
        assert stage.memory.in_use_peak_bytes < stage.memory.reserved_bytes
    assert trial.outcome.facts.max_model_len == 2048
    assert trial.start_s > 0
    assert _engine_is_gone(tmp_path)
    assert len((tmp_path / "stages.jsonl").read_text().splitlines()) == len(stages)
    assert len(pd.read_parquet(tmp_path / "requests.parquet")) >= sum(stage.num_completed for stage in stages)
    assert set(pd.read_parquet(tmp_path / "memory.parquet")["stage"]) == {stage.index for stage in stages}


def test_every_parameter_is_set_on_a_real_engine_and_read_back(tmp_path: Path) -> None:
    """What the record says is what ran: the engine is asked for each value, and a mismatch would fail the trial."""
    config = {
        "watermark": 0.0125,
        "long_prefill_token_threshold": 64,
        "max_num_active_seqs": 2,
        "max_num_scheduled_tokens": 200,
        "scheduler_reserve_full_isl": False,
        "enable_prefix_caching": True,
        "kv_cache_dtype": "fp8",
        "dtype": "bfloat16",
    }
    stages, trial = _run(_spec(tmp_path, _steps(4), **config))

    assert isinstance(trial.outcome, Measured)
    assert stages[-1].num_completed > 0
    assert all(stage.fenced for stage in stages)  # 4 users, and 2 requests may run


LAW = """
description: 10 ms a step and 1 ms a request
max_model_len: 2048
dtype: float32
step_time: {combine: sum, base_s: 0.01, decode_token_s: 0.001}
memory: {total_bytes: 1000000000, weights_bytes: 1000, activation_bytes_per_token: 1, kv_bytes_per_token: 1000}
"""


def test_a_simulated_engine_is_measured_and_every_record_says_so(tmp_path: Path) -> None:
    """A tuner can be judged by a server whose throughput is known, and nobody can take that for a measurement."""
    law = tmp_path / "known.yaml"
    law.write_text(LAW, encoding="utf-8")
    spec = _spec(tmp_path, _steps(4), over={"engine": {"law": str(law), "device_memory": None}})

    (*_, stage), trial = _run(spec)  # one that was disturbed is there twice

    assert isinstance(trial.outcome, Measured)
    assert trial.outcome.facts.simulated
    assert trial.outcome.facts.device == "simulated:known"
    assert stage.memory.device_peak_bytes is None
    assert stage.output_throughput.value <= 1.1 * 4 / (0.01 + 4 * 0.001)


SHARING = {
    "input_len": {"kind": "fixed", "tokens": 8},
    "output_len": {"kind": "fixed", "tokens": 8},
    "shared_prefix": {"tokens": 64},
}


@pytest.mark.parametrize(("setting", "told"), [({"enable_prefix_caching": True}, "done"), ({}, None)])
def test_stages_that_share_prefixes_begin_with_an_empty_cache(
    tmp_path: Path, setting: dict[str, object], told: str | None
) -> None:
    """What earlier stages left in the prefix cache is not measured, and each record says whether it was forgotten."""
    law = tmp_path / "known.yaml"
    law.write_text(LAW, encoding="utf-8")
    over = {"engine": {"law": str(law), "device_memory": None}, "workload": SHARING}
    stages, _ = _run(_spec(tmp_path, _steps(2, 4), over=over, **setting))

    assert {stage.load for stage in stages} == {2, 4}
    assert [stage.prefix_cache_reset for stage in stages] == [told] * len(stages)


def test_an_engine_that_forgets_nothing_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without the endpoint is measured all the same, and nobody takes its stages for cold ones."""

    async def not_there(_endpoint: Endpoint, *, patience_s: float) -> str:
        return "HTTP 404"

    monkeypatch.setattr("tuner.climb.reset_prefix_cache", not_there)
    law = tmp_path / "known.yaml"
    law.write_text(LAW, encoding="utf-8")
    over = {"engine": {"law": str(law), "device_memory": None}, "workload": SHARING}
    events = list(run_trial(_spec(tmp_path, _steps(2, 4), over=over, enable_prefix_caching=True)))
    stages = [event for event in events if isinstance(event, StageRecord)]

    assert {stage.prefix_cache_reset for stage in stages} == {"not reset"}
    assert sum(isinstance(event, TrialNote) and "did not reset" in event.text for event in events) == 1


def test_a_small_share_under_overload_preempts_and_the_record_says_so(tmp_path: Path) -> None:
    """Preemptions are the engine's own counter over the measured window, not a guess."""
    long_outputs = {"input_len": {"kind": "fixed", "tokens": 32}, "output_len": {"kind": "fixed", "tokens": 96}}
    spec = _spec(
        tmp_path,
        _steps(64, kind=StageKind.OVERLOAD),
        over={"workload": long_outputs, "burst": long_outputs, "engine": {"device_memory": "64M", "fixed": {}}},
        max_num_seqs=32,
        max_num_batched_tokens=64,
        gpu_memory_utilization=0.46,
        max_model_len=192,
    )
    stages, _ = _run(spec)

    assert stages[0].num_preemptions is not None
    assert stages[0].num_preemptions > 0


@pytest.mark.parametrize(
    ("config", "kind", "told"),
    [
        ({"gpu_memory_utilization": 0.2}, FailureKind.NO_KV_MEMORY, "0.2"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, FailureKind.INVALID_CONFIG, "32"),
        ({"max_model_len": 4096}, FailureKind.INVALID_CONFIG, "4096"),
        ({"dtype": "int4"}, FailureKind.INVALID_CONFIG, "int4"),
    ],
)
def test_an_engine_that_refuses_to_start_is_a_failed_trial_with_its_reason(
    tmp_path: Path, config: dict[str, object], kind: FailureKind, told: str
) -> None:
    """No request is sent, the kind and the decisive line are on record, and the study can go on."""
    stages, trial = _run(_spec(tmp_path, _steps(1), **config))

    assert stages == []
    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.kind is kind
    assert told in trial.outcome.detail
    assert _engine_is_gone(tmp_path)


_SAMPLER_OOM = """
import sys
sys.stderr.write(
    "(EngineCore_DP0 pid=9) ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB.\\n"
    "(EngineCore_DP0 pid=9) ERROR RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy "
    "requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.\\n"
)
sys.exit(1)
"""
_RUNTIME_OOM = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/metrics":
            sys.stderr.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\\n")
            sys.stderr.flush()
            os._exit(1)
        body = json.dumps({"data": [{"id": sys.argv[2]}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("script", "kind", "told"),
    [
        (_SAMPLER_OOM, FailureKind.OOM_SAMPLER_WARMUP, "warming up sampler with 1024 dummy requests"),
        (_RUNTIME_OOM, FailureKind.OOM_RUNTIME, "2.00 GiB"),
    ],
)
def test_an_engine_that_runs_out_of_memory_is_told_by_its_own_line_and_the_setting_it_was_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, kind: FailureKind, told: str
) -> None:
    """Whatever the engine, the study learns what was too much: the kind, the line, the sequences and the share."""

    def command(*_: object, port: int, served_model_name: str) -> list[str]:
        return [sys.executable, "-c", script, str(port), served_model_name]

    monkeypatch.setattr("tuner.engines.builtin.BuiltinEngine.command", command)
    asked = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.95}
    stages, trial = _run(_spec(tmp_path, _steps(1), **asked))

    assert stages == []
    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.kind is kind
    for figure in (told, "max_num_seqs=1024", "gpu_memory_utilization=0.95"):
        assert figure in trial.outcome.detail
    assert (trial.config.max_num_seqs, trial.config.gpu_memory_utilization) == (1024, 0.95)


def test_a_start_that_hangs_is_told_by_its_limit_and_how_to_raise_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a big model's first start nobody knows how long it takes: who set the limit too low reads which one it was."""

    def command(*_: object, port: int, served_model_name: str) -> list[str]:
        return [sys.executable, "-c", "import time; print('loads', flush=True); time.sleep(600)"]

    monkeypatch.setattr("tuner.engines.builtin.BuiltinEngine.command", command)
    monkeypatch.setattr("tuner.engines.builtin.BuiltinEngine.progress", lambda *_: "loads the model")
    _, trial = _run(_spec(tmp_path, _steps(1), over={"engine": {"start_timeout": "1s"}}))

    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.kind is FailureKind.START_TIMEOUT
    for told in (
        "engine.start_timeout=1s",
        "it loads the model",
        "set a longer engine.start_timeout",
        str(tmp_path / "engine.log"),
    ):
        assert told in trial.outcome.detail
    assert _engine_is_gone(tmp_path)


def test_a_start_that_hangs_ends_with_the_jobs_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half hour that a start may take on a GPU would be the whole budget of a job of half an hour, and more."""

    def command(*_: object, port: int, served_model_name: str) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(600)"]

    monkeypatch.setattr("tuner.engines.builtin.BuiltinEngine.command", command)
    _, trial = _run(_spec(tmp_path, _steps(1)).model_copy(update={"most_start_s": 1.0}))

    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.kind is FailureKind.START_TIMEOUT
    for told in ("in 1 s, as long as the job's budget allows", "set a longer engine.start_timeout"):
        assert told in trial.outcome.detail


def test_a_model_that_cannot_be_had_is_a_failed_trial(tmp_path: Path) -> None:
    """A wrong name costs a second a trial and is named."""
    _, trial = _run(_spec(tmp_path, _steps(1), over={"model": "nobody/nothing-of-that-name"}))

    assert isinstance(trial.outcome, Failed)
    assert "nobody/nothing-of-that-name" in trial.outcome.detail


class _Stranger(http.server.BaseHTTPRequestHandler):
    """A server that is healthy and knows no model."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
        """Nothing."""


def test_a_strangers_server_on_the_port_gets_no_request_and_breaks_no_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A healthy answer is no proof that it is our engine; the trial fails for reasons outside the config."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        monkeypatch.setattr("tuner.engines.starting.free_port", lambda: stranger.server_port)
        stages, trial = _run(_spec(tmp_path, _steps(1)))
        stranger.shutdown()

    assert stages == []
    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.kind is FailureKind.INFRASTRUCTURE
    assert _engine_is_gone(tmp_path)


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a corporate host engines start as quickly as elsewhere."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    _, trial = _run(_spec(tmp_path, _steps(1)))

    assert isinstance(trial.outcome, Measured)


def test_an_engine_killed_while_measured_condemns_nothing_and_the_stages_before_it_are_kept(tmp_path: Path) -> None:
    """A dead server is noticed at once; what it answered before is on disk, and is no result."""
    events = run_trial(_spec(tmp_path, _steps(1, 2, 4)))
    next(event for event in events if isinstance(event, StageRecord))
    engine_of(tmp_path).kill()
    *_, last = list(events)

    assert isinstance(last, TrialRecord)
    assert isinstance(last.outcome, Failed)
    assert last.outcome.kind is FailureKind.INFRASTRUCTURE
    assert "killed by signal 9" in last.outcome.detail
    assert len((tmp_path / "stages.jsonl").read_text().splitlines()) >= 1
    assert _engine_is_gone(tmp_path)


def _kill_under_load(
    directory: Path, victim: Callable[[psutil.Process], psutil.Process], over: threading.Event
) -> None:
    """Kill a process of a trial's engine as soon as a request runs there; until `over`."""
    while not over.wait(0.01):
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            command = json.loads((directory / "command.json").read_text())
            page = read_url(f"http://127.0.0.1:{command[command.index('--port') + 1]}/metrics", timeout_s=1.0)
            if (parse_snapshot(page.decode(), at_s=0.0).running or 0) > 0:
                victim(engine_of(directory)).kill()
                return


@pytest.mark.parametrize(
    ("victim", "kind", "told"),
    [
        (lambda engine: engine, FailureKind.INFRASTRUCTURE, "the engine was killed by signal 9"),
        (lambda engine: core_children(engine.pid)[0], FailureKind.CRASHED, "the core process was killed by signal 9"),
    ],
    ids=["server", "core"],
)
def test_an_engine_that_dies_under_load_ends_its_trial_and_not_the_stages_time_does(
    tmp_path: Path, victim: Callable[[psutil.Process], psutil.Process], kind: FailureKind, told: str
) -> None:
    """A death in the first second of a stage of an hour would else cost the hour, and every trial behind it."""
    endless = QUICK | {"min_time": "1h", "max_time": "1h", "max_warm_up": "1h", "min_requests": 100_000}
    spec, over = _spec(tmp_path, _steps(2, 4), over={"measure": endless}), threading.Event()
    killer = threading.Thread(target=_kill_under_load, args=(tmp_path, victim, over))
    killer.start()
    try:
        stages, trial = _run(spec)
    finally:
        over.set()
        killer.join()

    assert [stage.ended_by for stage in stages] == ["failures"]
    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.kind is kind
    assert told in trial.outcome.detail
    assert _engine_is_gone(tmp_path)


_OUTLIVES_ITS_CORE = """
import http.server, os, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_GET(self):
        self.answer(200)
    def do_POST(self):
        if not timer.is_alive():
            timer.start()
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(500)
    def log_message(self, *arguments):
        pass
timer = threading.Timer(2.0, os._exit, [3])
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_that_outlives_what_computes_for_a_moment_is_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last answers are errors: a trial that believed them would call a crash a bad measurement, and repeat it."""

    def command(*_: object, port: int, served_model_name: str) -> list[str]:
        return [sys.executable, "-c", _OUTLIVES_ITS_CORE, str(port), served_model_name]

    monkeypatch.setattr("tuner.engines.builtin.BuiltinEngine.command", command)
    spec = _spec(tmp_path, _steps(4, 8))
    ours = OurEngine(facts=facts(spec.config), memory=EngineMemory())
    monkeypatch.setattr("tuner.trial._recognised", lambda *_: ours)
    stages, trial = _run(spec)

    assert [stage.ended_by for stage in stages] == ["failures"]
    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.kind is FailureKind.CRASHED
    assert "exit code 3" in trial.outcome.detail


def test_a_dead_server_whose_keeper_is_slow_is_one_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine under load its exit code comes late: a bad measurement of it would be measured again."""
    monkeypatch.setattr("tuner.engines.process.EXIT_S", 0.2)
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    failed = records.stage(_spec(tmp_path, _steps(1)).config, 1, index=0).model_copy(update={"ended_by": "failures"})
    with launched(command, port=port, environment=dict(os.environ), directory=tmp_path, exit_grace_s=5.0) as engine:
        list(wait_until_ready(engine, health="/", timeout_s=20.0))
        assert trial_module._runs_on(engine, [failed])
        keeper, first = psutil.Process(engine.launch.pid), psutil.Process(engine.pid)
        keeper.suspend()
        try:
            first.kill()
            while first.status() != psutil.STATUS_ZOMBIE:
                pass
            assert not trial_module._runs_on(engine, [failed])
        finally:
            keeper.resume()


def test_an_engine_that_has_no_memory_for_a_heavier_step_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that passed, and a light load, are no proof of memory under load; the study learns what was too much."""
    monkeypatch.setenv(*next(iter(RETURNS_MEMORY.items())))
    heavy = {"input_len": {"kind": "fixed", "tokens": 1500}, "output_len": {"kind": "fixed", "tokens": 8}}
    plan = FixedSteps(steps=(*_steps(1).steps, *_steps(8, kind=StageKind.BURST).steps), request_rate_rps=50.0)
    events = run_trial(_spec(tmp_path, plan, over={"burst": heavy}, max_num_batched_tokens=2048))
    next(event for event in events if isinstance(event, StageRecord))
    (core,) = core_children(engine_of(tmp_path).pid)
    take_little_more_memory(core)
    *_, last = list(events)

    assert isinstance(last, TrialRecord)
    assert isinstance(last.outcome, Failed)
    assert last.outcome.kind is FailureKind.OOM_RUNTIME
    assert "gpu_memory_utilization=0.6" in last.outcome.detail
    assert _engine_is_gone(tmp_path)


def test_a_worker_that_is_shown_no_gpu_launches_nothing_for_a_job_that_asks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A figure of a CPU is never sold as one of a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    spec = _spec(tmp_path, _steps(1))
    engine = EngineSpec(device="cuda", fixed=spec.job.engine.fixed)
    stages, trial = _run(spec.model_copy(update={"job": spec.job.model_copy(update={"engine": engine})}))
    assert stages == []
    assert isinstance(trial.outcome, Failed)
    assert trial.outcome.kind is FailureKind.INFRASTRUCTURE
    assert "CUDA_VISIBLE_DEVICES" in trial.outcome.detail
    assert "device=cuda" in trial.outcome.detail
    assert "tensor_parallel_size=1" in trial.outcome.detail
    assert not (tmp_path / "command.json").exists()


def test_fewer_gpus_than_tensor_parallelism_takes_are_refused_before_the_launch(tmp_path: Path) -> None:
    """Half of an engine's GPUs is none of the configs that were asked for."""
    spec = _spec(tmp_path, _steps(1), tensor_parallel_size=2)
    engine = EngineSpec(device="cuda", fixed=spec.job.engine.fixed)
    spec = spec.model_copy(update={"job": spec.job.model_copy(update={"engine": engine})})
    *_, trial = run_trial(spec, gpus=("3",))
    assert isinstance(trial, TrialRecord)
    assert isinstance(trial.outcome, Failed)
    assert "CUDA_VISIBLE_DEVICES=3" in trial.outcome.detail
    assert "tensor_parallel_size=2" in trial.outcome.detail
    assert trial.devices == ("3",)
    assert not (tmp_path / "command.json").exists()


def test_on_a_gpu_auto_means_the_gpu(tmp_path: Path) -> None:
    """Where the engine cannot use its card the trial fails: engines side by side on one CPU say nothing."""
    spec = _spec(tmp_path, _steps(1))
    engine = EngineSpec(device="auto", fixed=spec.job.engine.fixed)
    spec = spec.model_copy(update={"job": spec.job.model_copy(update={"engine": engine})})
    *_, trial = run_trial(spec, gpus=("99",), read=lambda: ())
    assert isinstance(trial, TrialRecord)
    assert json.loads((tmp_path / "command.json").read_text())[-2:] == ["--device", "cuda"]
    assert isinstance(trial.outcome, Failed)
    assert "cuda" in trial.outcome.detail


def test_an_engine_is_shown_the_gpus_its_trial_was_given_and_both_records_name_them(tmp_path: Path) -> None:
    """Whoever reads a figure later can say on which card it was measured."""
    *_, trial = run_trial(_spec(tmp_path, _steps(1)), gpus=("2", "5"))
    assert isinstance(trial, TrialRecord)
    assert trial.devices == ("2", "5")
    shown = json.loads((tmp_path / "env.json").read_text())
    # On a machine of several models CUDA by itself counts otherwise than the driver, who is asked for the memory.
    assert (shown["CUDA_VISIBLE_DEVICES"], shown["CUDA_DEVICE_ORDER"]) == ("2,5", "PCI_BUS_ID")
