"""One trial: launch, climb, stop early, clean up → `Measured | Failed`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from tuner.climb import Climb, climb, stalled
from tuner.engine_config import EngineConfig
from tuner.engines.adapter import EngineAdapter, OurEngine, recognised, start_timeout_s
from tuner.engines.device_lock import device_names, open_lock, wait_for_turn
from tuner.engines.device_memory import ReadMemory, memory_reader
from tuner.engines.device_return import (
    FREE_S,
    DeviceFull,
    device_after,
    unless_disturbed,
    wait_for_free,
    write_reading,
)
from tuner.engines.process import EngineStartError, RunningEngine, wait_until_ready
from tuner.engines.registry import adapter_of
from tuner.engines.starting import starting
from tuner.frozen import Record
from tuner.gpus import VARIABLE, same_for_all
from tuner.job import TuningJob
from tuner.ladder import Ladder, Plan
from tuner.load.connection import Endpoint
from tuner.load.workload import WorkloadError
from tuner.measure.spec import Target
from tuner.oom_lessons import OUT_OF_MEMORY
from tuner.records import Failed, FailureKind, Measured, StageRecord, TrialOutcome, TrialRecord, TrialRole
from tuner.wording import config_text

logger = logging.getLogger(__name__)

_NOT_RESET = (
    "the engine did not reset its prefix cache between stages that share prefixes: each is measured with what the ones "
    "before it left there"
)

_UNREADABLE = (
    "how much of the device's memory is in use cannot be read: after the launch it is only made sure that no process "
    "of it lives"
)


class TrialSpec(Record):
    """Everything a worker needs to run one trial."""

    number: int
    role: TrialRole
    config: EngineConfig
    origin: str
    job: TuningJob
    plan: Plan
    directory: Path
    kept_stages: tuple[StageRecord, ...] = ()
    """Measured on an earlier launch of this trial, before the run was cut off; they are not repeated."""

    most_start_s: float | None = None
    """What the job's budget allows a start; a `start_timeout` of the job goes before it. None: any. Unit: seconds."""


class TrialNote(Record):
    """Something a person should know while a trial goes on."""

    text: str


TrialEvent = TrialNote | DeviceFull | StageRecord | TrialRecord
"""What a trial reports as it goes: notes, its stages one by one, a device that it left full, itself last."""


class WorkerLost(Record):
    """The process a trial ran in died under it: this says nothing about the config."""

    detail: str


class DeviceHiddenError(RuntimeError):
    """The job asks for a GPU, and its worker is shown none: an engine would fall back to the CPU, or fail late."""


class TrialRunner(Protocol):
    """Where trials run: several at once, each on devices of its own."""

    @property
    def parallel_trials(self) -> int:
        """How many at once."""

    def start(self, spec: TrialSpec) -> None:
        """Begin a trial; fewer than `parallel_trials` run when this is called."""

    def next_event(self) -> tuple[int, TrialEvent | WorkerLost]:
        """Wait for any trial that runs: its number and what it reports.

        Its stages come one by one, as they end; a `TrialRecord` or `WorkerLost` is its last.
        """

    def give_up(self, number: int) -> None:
        """End a trial half-way, its engine with it."""


def run_trial(spec: TrialSpec, *, gpus: tuple[str, ...] = (), read: ReadMemory | None = None) -> Iterator[TrialEvent]:
    """Run `spec` when its devices are free: yields notes, each stage's record as it ends, then the trial's.

    Whatever happens to the engine becomes a `Failed` with its kind; the engine is gone when the last value is yielded,
    and its devices' memory free again, or a `DeviceFull` came before.

    Args:
        spec: what to launch and to measure.
        gpus: the GPUs this trial was given, as `CUDA_VISIBLE_DEVICES` names them; its engine is shown no others.
        read: looks at the memory of the trial's devices; None asks the driver, where they are GPUs.
    """
    environment = _environment(os.environ, gpus)
    read = read or memory_reader(spec.job.engine, environment, num_gpus=len(gpus) or spec.config.num_devices)
    begun = time.perf_counter()
    start_s = 0.0
    stages = list(spec.kept_stages)
    outcome: TrialOutcome
    try:
        with contextlib.ExitStack() as stack:
            yield from _wait_for_devices(spec, device_names(same_for_all(gpus)), stack)
            begun = time.perf_counter()
            _check_gpus(spec, environment)
            before = read()
            if before is None:
                yield TrialNote(text=f"trial {spec.number}: {_UNREADABLE}")
            write_reading(spec.directory, before)
            attempt = yield from _attempted(spec, environment, stages, on_gpu=bool(gpus))
            after, full = device_after(spec.directory, before, read)
            if full is not None:
                yield full
        outcome, start_s = attempt.outcome, attempt.start_s
        if outcome.outcome == "failed" and not attempt.came_up:
            missing = _adapter(spec).not_free(outcome.detail)
            outcome = unless_disturbed(outcome, before, after, missing=missing)
            if full is None:
                yield from _wait_for_memory(_adapter(spec), outcome, read)
    except (DeviceHiddenError, OSError) as error:
        outcome = Failed(kind=FailureKind.INFRASTRUCTURE, detail=str(error))
    yield TrialRecord(
        number=spec.number,
        role=spec.role,
        config=spec.config,
        origin=spec.origin,
        outcome=outcome,
        devices=gpus,
        start_s=start_s,
        measure_s=sum(stage.wall_s for stage in stages),
        wall_s=time.perf_counter() - begun + sum(stage.wall_s for stage in spec.kept_stages),
    )


class _Attempt(NamedTuple):
    """One launch, ended."""

    outcome: TrialOutcome
    start_s: float
    came_up: bool


def _attempted(
    spec: TrialSpec, environment: dict[str, str], stages: list[StageRecord], *, on_gpu: bool
) -> Generator[TrialNote | StageRecord, None, _Attempt]:
    """Launch the engine, climb, end it; each stage is added to `stages` as it ends."""
    begun = time.perf_counter()
    start_s = 0.0
    try:
        with _launched(spec, environment, on_gpu=on_gpu) as engine:
            start_s = yield from _come_up(spec, engine)
            ours = _recognised(spec, engine)
            if isinstance(ours, Failed):
                return _Attempt(ours, start_s, came_up=True)
            for stage in _climb(spec, engine, ours):
                stages.append(stage)
                yield stage
                if _first_not_reset(stages) is stage:
                    yield TrialNote(text=f"trial {spec.number}: {_NOT_RESET}")
            return _Attempt(_outcome(spec, engine, ours, stages), start_s, came_up=True)
    except EngineStartError as error:
        return _Attempt(_not_started(spec, error), time.perf_counter() - begun, came_up=False)
    except WorkloadError as error:
        failed = Failed(kind=FailureKind.INVALID_MEASUREMENT, detail=str(error))
        return _Attempt(failed, start_s, came_up=True)
    except Exception as error:  # the edge of the worker's process: a trial that broke is a value, the study goes on
        logger.exception("trial %d broke", spec.number)
        return _Attempt(_broken(spec, error), start_s, came_up=True)


def _wait_for_memory(adapter: EngineAdapter, failed: Failed, read: ReadMemory) -> Iterator[TrialNote]:
    """Where memory was short only now, give others the time to free it: the setting is tried again after that."""
    missing = adapter.not_free(failed.detail) if failed.kind is FailureKind.INFRASTRUCTURE else None
    if missing is not None:
        yield TrialNote(text=f"waits up to {FREE_S:g} s for memory: {failed.detail}")
        wait_for_free(missing, read)


def _environment(environment: Mapping[str, str], gpus: tuple[str, ...]) -> dict[str, str]:
    """What the engine is started with: this process's environment less Ray's own part, and the GPUs it was given.

    By number those are the driver's, as its tool and its library count; CUDA by itself would number the fastest first.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **kept, VARIABLE: ",".join(gpus)} if gpus else kept


def _wait_for_devices(spec: TrialSpec, devices: Sequence[str], stack: contextlib.ExitStack) -> Iterator[TrialNote]:
    """Hold the trial's devices until `stack` ends; notes say who has one meanwhile."""
    holder = f"run {spec.job.name}, trial {spec.number}, process {os.getpid()}"
    for device in devices:
        for other in wait_for_turn(stack.enter_context(open_lock(device)), holder=holder):
            yield TrialNote(text=f"trial {spec.number} waits for the device: {other} is on it")


def _check_gpus(spec: TrialSpec, environment: Mapping[str, str]) -> None:
    """See to it that an engine that is to compute on GPUs is shown them: none ever falls back to the CPU."""
    shown, size = environment.get(VARIABLE), spec.config.num_devices
    if spec.job.engine.device != "cuda" or shown is None:
        return
    if not shown.strip():
        raise DeviceHiddenError(
            f"{VARIABLE} is set and empty where the engine is launched, but the job asks for device=cuda and "
            f"{spec.config.parallel_sizes}, which takes {size} GPUs: unset it or name {size}"
        )
    if len(shown.split(",")) < size:
        raise DeviceHiddenError(
            f"{VARIABLE}={shown} names fewer GPUs than the {size} that {spec.config.parallel_sizes} takes: name {size} "
            "or lower it"
        )


def _adapter(spec: TrialSpec) -> EngineAdapter:
    return adapter_of(spec.job.engine)


def served_model_name(spec: TrialSpec) -> str:
    """A name no other server answers to: a stray server on our port is noticed by it."""
    return f"{spec.job.name}-trial-{spec.number:04d}-{os.getpid()}"


def _come_up(spec: TrialSpec, engine: RunningEngine) -> Generator[TrialNote, None, float]:
    """Wait until the engine is ready; notes say how far it has come. Returns how long it took, in seconds."""
    adapter, told = _adapter(spec), None
    coming_up = wait_until_ready(engine, adapter.health, timeout_s=_start_limit_s(spec))
    while True:
        try:
            reached = adapter.progress(next(coming_up))
        except StopIteration as ready:
            return float(ready.value)
        if reached not in (None, told):
            told = reached
            yield TrialNote(text=f"trial {spec.number}: {adapter.name} {reached}")


def _start_limit_s(spec: TrialSpec) -> float:
    """A start that hangs, on a GPU for half an hour, would else outlast the job itself."""
    limit_s = start_timeout_s(_adapter(spec), spec.job.engine)
    return limit_s if spec.most_start_s is None or spec.job.engine.start_timeout else min(limit_s, spec.most_start_s)


def _launched(spec: TrialSpec, environment: dict[str, str], *, on_gpu: bool) -> AbstractContextManager[RunningEngine]:
    engine = spec.job.engine
    if on_gpu:
        # `auto` would fall back to the CPU where the engine's torch has no CUDA, and the trials beside it as well.
        engine = engine.model_copy(update={"device": "cuda"})
    return starting(
        _adapter(spec),
        spec.job.model,
        spec.config,
        engine,
        served_model_name=served_model_name(spec),
        directory=spec.directory,
        environment=environment,
    )


def _not_started(spec: TrialSpec, error: EngineStartError) -> Failed:
    log_path = spec.directory / "engine.log"
    if error.timed_out:
        limit_s, asked_s = _start_limit_s(spec), spec.job.engine.start_timeout
        what = f"after engine.start_timeout={asked_s:g}s" if asked_s else f"in {limit_s:.0f} s"
        if limit_s == spec.most_start_s and not asked_s:
            what += ", as long as the job's budget allows"
        detail = (
            f"the engine was not ready {what}{_so_far(spec)}: set a longer engine.start_timeout (15m, 1h) or see "
            f"{log_path} for what it waits for"
        )
        return Failed(kind=FailureKind.START_TIMEOUT, detail=detail)
    return _last_words(spec, was_ready=False, exit_code=error.exit_code)


def _so_far(spec: TrialSpec) -> str:
    """How far a start has come, where the engine's log says that."""
    lines = (spec.directory / "engine.log").read_text(encoding="utf-8", errors="replace").splitlines()
    reached = [words for line in lines if (words := _adapter(spec).progress(line)) is not None]
    return f", though it {reached[-1]}" if reached else ""


def _last_words(spec: TrialSpec, *, was_ready: bool, exit_code: int | None = None) -> Failed:
    """Why the engine ended; lack of memory is said with the setting that was short of it."""
    words = _adapter(spec).last_words(spec.directory / "engine.log", was_ready=was_ready, exit_code=exit_code)
    if words.kind not in OUT_OF_MEMORY | {FailureKind.NO_KV_MEMORY}:
        return words
    return words.model_copy(update={"detail": f"{words.detail} ({config_text(spec.config)})"})


def _broken(spec: TrialSpec, error: Exception) -> Failed:
    """Why a trial broke off: by the engine's last words if it left any, else for a reason outside the config."""
    words = _last_words(spec, was_ready=True)
    if words.kind is not FailureKind.CRASHED:
        return words
    return Failed(kind=FailureKind.INFRASTRUCTURE, detail=f"{type(error).__name__}: {error}")


def _recognised(spec: TrialSpec, engine: RunningEngine) -> OurEngine | Failed:
    """What the engine says of itself; why nothing may be sent to what answers: not ours, or not as asked."""
    adapter = _adapter(spec)
    reading = adapter.read(engine.base_url, log=engine.log_path)
    ours = recognised(adapter, reading, spec.config, served_model_name=served_model_name(spec), url=engine.base_url)
    if isinstance(ours, OurEngine):
        try:
            for workload in (spec.job.workload, spec.job.burst):
                workload.check_fits(ours.facts.max_model_len)
        except WorkloadError as error:
            return Failed(kind=FailureKind.INVALID_CONFIG, detail=str(error))
    return ours


def _climb(spec: TrialSpec, engine: RunningEngine, ours: OurEngine) -> Iterator[StageRecord]:
    """Measure stage after stage until the plan has no next one or the engine cannot go on."""
    facts = ours.facts
    target = Target(
        endpoint=Endpoint.from_url(engine.base_url),
        model=served_model_name(spec),
        max_model_len=facts.max_model_len,
        # The processes of a simulated engine say nothing about its device's memory.
        root_pid=None if facts.simulated else engine.pid,
        memory=ours.memory,
        metrics=_adapter(spec).metrics,
        not_applicable=_adapter(spec).not_applicable,
    )
    plan = spec.plan
    if isinstance(plan, Ladder):
        plan = plan.model_copy(update={"on_graph_grid": facts.may_capture_graphs})
    task = Climb(
        plan=plan,
        workload=spec.job.workload,
        burst=spec.job.burst,
        measure=spec.job.measure,
        entropy=(spec.job.seed, spec.number),
        fence=spec.config.fence,
        max_model_len=facts.max_model_len,
        caches_prefixes=spec.config.enable_prefix_caching,
    )
    yield from climb(task, target, kept=spec.kept_stages, directory=spec.directory, goes_on=partial(_runs_on, engine))


def _runs_on(engine: RunningEngine, stages: Sequence[StageRecord]) -> bool:
    """Whether the engine lives. What speaks HTTP outlives what computes for a moment, and answers with errors then."""
    if stages and stages[-1].ended_by == "failures" and engine.exit_code() is not None:
        return False
    return engine.is_alive()


def _first_not_reset(stages: Sequence[StageRecord]) -> StageRecord | None:
    return next((stage for stage in stages if stage.prefix_cache_reset == "not reset"), None)


def _outcome(
    spec: TrialSpec, engine: RunningEngine, ours: OurEngine, stages: Sequence[StageRecord]
) -> Measured | Failed:
    if not _runs_on(engine, stages):
        return _last_words(spec, was_ready=True, exit_code=engine.exit_code())
    if stalled(stages):
        last = stages[-1]
        detail = f"at load {last.load} requests waited and no token came; see {engine.log_path}"
        return Failed(kind=FailureKind.STALLED, detail=detail)
    if not any(stage.valid for stage in stages):
        reasons = "; ".join(stages[-1].invalid_reasons) if stages else "no stage was measured"
        return Failed(kind=FailureKind.INVALID_MEASUREMENT, detail=reasons)
    return Measured(facts=ours.facts, stages=tuple(stages))
