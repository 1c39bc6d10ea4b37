"""What every engine's adapter owes the tuner, tried on the real engine: the built-in one, vLLM, llama.cpp."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.contracts.engines import ENGINES, PARAMS, EngineUnderTest
from tuner.engines.adapter import OWN_KEYS, EngineAdapter, OurEngine, Reading, asked, check_job, mismatch, recognised
from tuner.engines.family import living, read_launch
from tuner.engines.process import RunningEngine, read_url
from tuner.engines.registry import adapter_of
from tuner.engines.running import reset_prefix_cache
from tuner.engines.starting import serving
from tuner.inputs import InputError
from tuner.ladder import FixedSteps, LadderStep
from tuner.load.connection import Endpoint
from tuner.measure.prometheus import parse_snapshot
from tuner.records import Failed, FailureKind, StageKind, StageRecord, TrialRecord, TrialRole
from tuner.trial import TrialSpec, run_trial

SERVED = "a-name-of-our-own"
FIGURES = {
    "running": "mean_running",
    "waiting": "mean_waiting",
    "kv_cache_usage": "kv_cache_usage_peak",
    "preemptions": "num_preemptions",
}


@pytest.fixture(scope="module", params=PARAMS)
def under_test(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineUnderTest:
    """Each engine in turn."""
    return ENGINES[request.param](tmp_path_factory.mktemp("model"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An engine that serves, started as a trial starts it."""

    under_test: EngineUnderTest
    adapter: EngineAdapter
    engine: RunningEngine
    directory: Path

    @property
    def reading(self) -> Reading:
        """What it says of itself now."""
        return self.adapter.read(self.engine.base_url, log=self.engine.log_path)


@contextmanager
def _serving(under_test: EngineUnderTest, directory: Path) -> Iterator[Running]:
    job, adapter = under_test.job, adapter_of(under_test.job.engine)
    with serving(
        adapter, job.model, under_test.config, job.engine, served_model_name=SERVED, directory=directory
    ) as engine:
        yield Running(under_test=under_test, adapter=adapter, engine=engine, directory=directory)


@pytest.fixture(scope="module")
def running(under_test: EngineUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One launch for all that only looks at it."""
    with _serving(under_test, tmp_path_factory.mktemp("launch")) as found:
        yield found


def _processes(running: Running) -> list[psutil.Process]:
    root = psutil.Process(running.engine.pid)
    return [root, *root.children(recursive=True)]


def test_it_listens_on_this_machine_alone(running: Running) -> None:
    """An engine under test that the network can reach is measured with other people's requests in it."""
    listening = [
        connection.laddr.ip
        for process in _processes(running)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1", "::1"}


def test_it_is_told_what_the_config_says(running: Running) -> None:
    """A parameter left to a default is the default of this version, of this device, of this day."""
    command = json.loads((running.directory / "command.json").read_text())
    told = asked(running.adapter, running.under_test.config)
    numbers = {name: value for name, value in told.items() if isinstance(value, int | float) and value not in (0, 1)}
    assert {"max_num_seqs", "max_num_batched_tokens", "max_model_len"} <= numbers.keys()
    for name, value in numbers.items():
        assert str(value) in command, name


def test_it_is_known_by_a_name_of_ours_and_runs_with_what_was_asked(running: Running) -> None:
    """Figures of another server, or of another config than the one on record, are worse than none."""
    found = recognised(
        running.adapter, running.reading, running.under_test.config, served_model_name=SERVED, url="here"
    )
    assert isinstance(found, OurEngine)
    assert found.facts.max_model_len == running.under_test.config.max_model_len
    assert found.facts.version not in ("", "unknown")


def test_a_config_that_is_not_in_force_is_refused(running: Running) -> None:
    """An engine that rounds, caps or ignores a setting must not be measured under its name."""
    other = running.under_test.config.model_copy(update={"max_num_seqs": 4})
    told = mismatch(running.adapter, other, running.reading)
    assert told == "max_num_seqs: asked for 4, the engine runs with 3"
    stranger = recognised(running.adapter, running.reading, other, served_model_name="another", url="here")
    assert isinstance(stranger, Failed)
    assert stranger.kind is FailureKind.INFRASTRUCTURE


def test_every_figure_is_told_or_declared(running: Running) -> None:
    """A figure that is neither is unknown at every stage, and no profile of this engine could ever be proven."""
    page = read_url(f"{running.engine.base_url}/metrics", timeout_s=10.0).decode()
    seen = parse_snapshot(page, running.adapter.metrics, at_s=0.0)
    for metric, figure in FIGURES.items():
        is_told, is_declared = getattr(seen, metric) is not None, figure in running.adapter.not_applicable
        assert is_told != is_declared, f"{metric}: told {is_told}, declared not applicable {is_declared}"


async def test_it_forgets_its_prefixes_or_says_that_it_cannot(running: Running) -> None:
    """Stages that share prefixes by design would each be measured with what the one before left."""
    why_not = await reset_prefix_cache(Endpoint.from_url(running.engine.base_url), patience_s=5.0)
    assert (why_not is None) != ("prefix_cache_reset" in running.adapter.not_applicable), why_not


def test_a_key_that_it_does_not_have_is_refused_before_a_launch(under_test: EngineUnderTest) -> None:
    """A device size, a command or a law that is ignored describes another experiment than the one that ran."""
    adapter, job = adapter_of(under_test.job.engine), under_test.job
    foreign = next(key for key in OWN_KEYS if key not in adapter.own_keys)
    value = {"command": ("/bin/other",), "environment": {"A": "b"}, "device_memory": 2**27, "cpus": 1, "law": "x"}
    told = job.model_copy(update={"engine": job.engine.model_copy(update={foreign: value[foreign]})})
    check_job(adapter, job)
    with pytest.raises(InputError, match=rf"the engine {adapter.name} cannot be told .*engine\.{foreign}"):
        check_job(adapter, told)


def _spec(under_test: EngineUnderTest, directory: Path, **job: object) -> TrialSpec:
    return TrialSpec(
        number=3,
        role=TrialRole.STUDY,
        config=under_test.config,
        origin="sampler",
        job=under_test.job.model_copy(update=job),
        plan=FixedSteps(steps=(LadderStep(kind=StageKind.LADDER, load=2),), request_rate_rps=50.0),
        directory=directory,
    )


def _is_gone(directory: Path) -> bool:
    launch = read_launch(directory)
    return launch is not None and not living(launch)


def test_a_start_that_fails_says_why_and_leaves_nothing(under_test: EngineUnderTest, tmp_path: Path) -> None:
    """The decisive line is rarely the last one: without it a person reads a log of hundreds of lines for each trial."""
    *_, record = run_trial(_spec(under_test, tmp_path, model=under_test.broken_model))
    assert isinstance(record, TrialRecord)
    failed = record.outcome
    assert isinstance(failed, Failed)
    assert failed.kind in (FailureKind.INVALID_CONFIG, FailureKind.CRASHED)
    assert "gave no reason" not in failed.detail
    assert failed.detail.split(" (max_num_seqs")[0] in (tmp_path / "engine.log").read_text(errors="replace")
    assert _is_gone(tmp_path)


def test_a_stage_on_it_counts_what_was_sent_and_asked_for(under_test: EngineUnderTest, tmp_path: Path) -> None:
    """Lengths by the server's own count, no request lost, no cache hit: else its throughput is of something else."""
    *events, record = run_trial(_spec(under_test, tmp_path))
    stages = [event for event in events if isinstance(event, StageRecord)]
    assert isinstance(record, TrialRecord)
    assert stages
    for stage in stages:
        assert stage.num_completed > 0
        assert (stage.num_failed, stage.num_rejected, stage.first_error) == (0, 0, None)
        assert (stage.mean_prompt_tokens, stage.mean_output_tokens) == (32, 16)
        assert stage.output_throughput.value > 0
        assert stage.process_cpu_cores is not None
        assert not any(stage.is_unknown(figure) for figure in FIGURES.values())
        # What a busy machine does to a stage is no fault of the adapter; what it reads wrongly is.
        assert not any(word in reason for reason in stage.invalid_reasons for word in ("estimated", "warm", "prompt"))
    assert _is_gone(tmp_path)


def test_it_ends_when_it_is_told_to_and_leaves_nothing(under_test: EngineUnderTest, tmp_path: Path) -> None:
    """A process that outlives its trial holds the device, and the next one fails for a reason that is not its own."""
    with _serving(under_test, tmp_path) as running:
        family = living(running.engine.launch)
    assert family
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    code = running.engine.process.returncode
    assert code != -signal.SIGKILL, "it had to be killed: raise exit_grace_s, or mend its exit"
