"""What an engine is to the tuner: how it is started, what it says of itself, why it ended, and what it cannot do.

An adapter keeps nothing between calls. All of it can be stated as data: a command template, names of flags and of
metrics, and lists of what is not applicable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuner.engine_config import EngineConfig, Setting
from tuner.engines.device_return import NotFree
from tuner.inputs import InputError
from tuner.job import EngineSpec, TuningJob
from tuner.measure.memory import EngineMemory
from tuner.measure.prometheus import MetricNames
from tuner.parameters import SearchedValues
from tuner.records import EngineFacts, Failed, FailureKind

OWN_KEYS = ("command", "environment", "device_memory", "cpus", "law")
"""Keys of a job's engine that not every engine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An engine as it is installed here, known before the first launch."""

    version: str | None
    """None: it does not say."""

    defaults: SearchedValues
    """What it does when it is told nothing: trial 0. Of what else is searched none is set."""

    device: str | None = None
    """What it computes on, where it is known before a launch: `cpu`, `cuda`."""

    flags: frozenset[str] | None = None
    """All that its command line knows; None: it was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a server says of itself once it is up."""

    model_name: str
    """What it serves the model under, by which it is known to be ours."""

    in_force: Mapping[str, Setting] = field(default_factory=dict)
    """The engine parameters it runs with, as far as it tells."""

    facts: EngineFacts | None = None
    """None for a server that does not say what this engine says."""

    memory: EngineMemory = field(default_factory=EngineMemory)
    """The part that stages need for their memory figures."""


LONGEST_START_S = 300.0
"""What a start gets where an adapter knows no better. Unit: seconds."""


class EngineAdapter(Protocol):
    """One engine as the tuner meets it: a command line, a log, and HTTP."""

    @property
    def name(self) -> str:
        """As a job names it."""

    @property
    def settable(self) -> frozenset[str]:
        """The engine parameters it can set, by the names of `EngineConfig`; of the others a job may set none."""

    @property
    def not_applicable(self) -> frozenset[str]:
        """What it has no way to tell: figures of a `StageRecord`, parameters that cannot be read back.

        What is not here and is not told all the same is unknown, and fails closed.
        """

    @property
    def own_keys(self) -> frozenset[str]:
        """Which of `OWN_KEYS` a job may set."""

    @property
    def assumed_start_s(self) -> float:
        """A guess at one start, until a launch was seen. Unit: seconds."""

    def longest_start_s(self, spec: EngineSpec) -> float:
        """What no start here exceeds that does not hang. Unit: seconds."""

    @property
    def metrics(self) -> MetricNames:
        """What its page of metrics calls what is read there."""

    @property
    def health(self) -> str:
        """The page that answers 200 once it serves."""

    @property
    def exit_grace_s(self) -> float:
        """What its first process gets to end by itself after SIGTERM. Unit: seconds."""

    def installed(self, job: TuningJob) -> Installed:
        """Ask the installed engine, once a job.

        Raises:
            InputError: where it is not there, or does not know a parameter the job sets, naming both and the version.
        """

    def command(
        self, model: str, config: EngineConfig, spec: EngineSpec, *, port: int, served_model_name: str
    ) -> list[str]:
        """The argument list that starts this config on 127.0.0.1:`port`, every parameter that is set explicit.

        The config's `extra_args` are part of it, as they are.
        """

    def environment(
        self, inherited: Mapping[str, str], model: str, spec: EngineSpec, *, num_devices: int = 1
    ) -> dict[str, str]:
        """The whole environment it is started with.

        Args:
            inherited: this process's, with the GPUs of the launch and without Ray's own part.
            num_devices: that the config to launch computes on; a question about the engine needs one.
        """

    def progress(self, line: str) -> str | None:
        """How far a start has come, in a few words after its name, by a line of its log; None where it says nothing."""

    def read(self, base_url: str, *, log: Path) -> Reading:
        """Ask a server that answers who it is and which values are in force.

        Args:
            log: what it has written since its launch.

        Raises:
            OSError, LookupError, ValueError: where it does not answer as an engine does.
        """

    def last_words(self, log: Path, *, was_ready: bool, exit_code: int | None = None) -> Failed:
        """Why an engine ended: by the decisive line of its log, else by its exit code.

        Args:
            was_ready: whether it had answered before.
        """

    def not_free(self, detail: str) -> NotFree | None:
        """What a start was short of by the engine's own words, or None where that was not the reason."""


def asked(adapter: EngineAdapter, config: EngineConfig) -> dict[str, Setting]:
    """What the engine is told of a config, by name: what it can set and what is not left to it."""
    return config.model_dump(include=set(adapter.settable), exclude_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class OurEngine:
    """A server known to be the one we launched, with what it says of itself."""

    facts: EngineFacts
    memory: EngineMemory


def recognised(
    adapter: EngineAdapter, reading: Reading, config: EngineConfig, *, served_model_name: str, url: str
) -> OurEngine | Failed:
    """The server that answered at `url`, or why nothing may be sent to it: not ours, or not as asked."""
    if reading.model_name != served_model_name:
        detail = f"port held by another server: {url} serves {reading.model_name!r}; nothing was sent to it"
        return Failed(kind=FailureKind.INFRASTRUCTURE, detail=detail)
    differs = mismatch(adapter, config, reading)
    if differs is not None:
        return Failed(kind=FailureKind.CONFIG_MISMATCH, detail=differs)
    if reading.facts is None:
        detail = f"{url} does not say what it runs with, as the engine {adapter.name} does"
        return Failed(kind=FailureKind.CONFIG_MISMATCH, detail=detail)
    return OurEngine(facts=reading.facts, memory=reading.memory)


def mismatch(adapter: EngineAdapter, config: EngineConfig, reading: Reading) -> str | None:
    """Which value in force differs from the one asked for, or None. `auto` leaves the choice to the engine."""
    for name, value in asked(adapter, config).items():
        in_force = reading.in_force.get(name)
        if name not in adapter.not_applicable and value != "auto" and str(in_force) != str(value):
            return f"{name}: asked for {value}, the engine runs with {in_force}"
    return None


def check_job(adapter: EngineAdapter, job: TuningJob) -> None:
    """See to it that the engine can be told all that the job says of it, and that its share of memory is searched.

    Raises:
        InputError: naming what it cannot be told, or the share where it has one and the job none.
    """
    if "gpu_memory_utilization" in adapter.settable and "gpu_memory_utilization" not in job.search_space.searched:
        raise InputError(
            f"search_space.parameters.gpu_memory_utilization is missing: the engine {adapter.name} takes a share "
            "of the device's memory, so give it choices"
        )
    found = list(_not_for(adapter, job))
    if found:
        raise InputError(f"the engine {adapter.name} cannot be told {', '.join(found)}: leave that out")


def _not_for(adapter: EngineAdapter, job: TuningJob) -> Iterator[str]:
    engine = job.engine
    for key in OWN_KEYS:
        if getattr(engine, key) and key not in adapter.own_keys:
            yield f"engine.{key}"
    for name in job.search_space.searched:
        # Two are always there; one with a single choice is left to the engine.
        if name not in adapter.settable and len(job.search_space.choices(name)) > 1:
            yield f"search_space.parameters.{name}"
    for name in engine.fixed.model_dump(exclude={"extra_args"}, exclude_defaults=True, exclude_none=True):
        if name not in adapter.settable:
            yield f"engine.fixed.{name}"


def start_timeout_s(adapter: EngineAdapter, spec: EngineSpec) -> float:
    """How long a launch may take: what the job says, else what the engine's start may take here. Unit: seconds."""
    return adapter.longest_start_s(spec) if spec.start_timeout is None else spec.start_timeout
