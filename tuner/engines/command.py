"""Any OpenAI-compatible server as the tuner meets it: what its definition says, carried out."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.engine_config import EngineConfig, Setting
from tuner.engines.adapter import LONGEST_START_S, Installed, Reading, asked
from tuner.engines.definition import EngineDefinition, Place, filled
from tuner.engines.device_return import NotFree
from tuner.engines.memory_failures import log_lines, memory_failure
from tuner.engines.process import how_it_ended, read_url
from tuner.inputs import InputError
from tuner.job import EngineSpec, TuningJob
from tuner.measure.prometheus import MetricNames
from tuner.records import EngineFacts, Failed, FailureKind

ANSWER_S = 10.0
"""A page takes no longer than that. Unit: seconds."""


@dataclass(frozen=True, slots=True)
class CommandEngine:
    """The adapter of an engine that is data."""

    definition: EngineDefinition
    device: str
    """What the job says it computes on; no server has one way to tell."""

    @property
    def name(self) -> str:
        """The definition's."""
        return self.definition.name

    @property
    def settable(self) -> frozenset[str]:
        """The parameters that the definition says how to tell."""
        return self.definition.settable

    @property
    def not_applicable(self) -> frozenset[str]:
        """As the definition declares."""
        return frozenset(self.definition.not_applicable)

    @property
    def own_keys(self) -> frozenset[str]:
        """Its command and its environment, and its CPUs where it can be told them."""
        return frozenset({"command", "environment"} | ({"cpus"} if self.definition.cpus else set()))

    @property
    def metrics(self) -> MetricNames:
        """What its page calls what is read there."""
        return self.definition.metrics

    @property
    def health(self) -> str:
        """The page that answers 200 once it serves."""
        return self.definition.health

    @property
    def assumed_start_s(self) -> float:
        """As the definition says."""
        return self.definition.start_s

    @property
    def exit_grace_s(self) -> float:
        """As the definition says."""
        return self.definition.exit_s

    def longest_start_s(self, spec: EngineSpec) -> float:
        """Five minutes."""
        del spec
        return LONGEST_START_S

    def installed(self, job: TuningJob) -> Installed:
        """See to it that its executable is there, and that every value the job may launch can be told.

        Raises:
            InputError: naming the executable, or the parameter and the value.
        """
        executable = self._executable(job.engine)[0]
        if shutil.which(executable) is None:
            raise InputError(
                f"the engine {self.name} needs {executable}, which is not there: install it, or say where it is: "
                "engine.command"
            )
        for name in self.definition.required:
            if name not in job.search_space.searched and getattr(job.engine.fixed, name) is None:
                raise InputError(f"engine.fixed.{name} is missing: the engine {self.name} must be told one")
        for config in _configs(self.definition, job):
            self._parameters(config)
        return Installed(version=None, defaults=self.definition.defaults)

    def command(
        self, model: str, config: EngineConfig, spec: EngineSpec, *, port: int, served_model_name: str
    ) -> list[str]:
        """The argument list that starts this config, every parameter that is set explicit.

        Raises:
            InputError: for a value that the engine cannot be given.
        """
        launch = {"model": model, "port": str(port), "served_model_name": served_model_name}
        return [
            *self._executable(spec),
            *filled(self.definition.arguments, launch),
            *self._parameters(config),
            *(() if spec.cpus is None else filled(self.definition.cpus, {"value": str(spec.cpus)})),
            *config.extra_args,
        ]

    def _executable(self, spec: EngineSpec) -> tuple[str, ...]:
        return spec.command or self.definition.executable

    def _parameters(self, config: EngineConfig) -> list[str]:
        told = asked(self, config).items()
        return [argument for name, value in told for argument in self.definition.told(name, value)]

    def environment(
        self, inherited: Mapping[str, str], model: str, spec: EngineSpec, *, num_devices: int = 1
    ) -> dict[str, str]:
        """This process's environment with the definition's variables and over them the job's."""
        del model, num_devices
        return {**inherited, **self.definition.environment, **spec.environment}

    def progress(self, line: str) -> str | None:
        """Nothing: a definition does not say how far a start has come."""
        del line
        return None

    def read(self, base_url: str, *, log: Path) -> Reading:
        """Ask a server who it is, and where the definition says for the values in force."""
        model_name = str(_json(f"{base_url}/v1/models")["data"][0]["id"])
        pages: dict[str, Any] = {}
        text = log.read_text(encoding="utf-8", errors="replace")

        def found(place: Place) -> Setting | None:
            if place.log is not None:
                matches = re.findall(place.log, text)
                return matches[-1] if matches else None
            page = str(place.page)
            if page not in pages:
                pages[page] = _json(f"{base_url}{page}")
            return _at(pages[page], place.at)

        told = {name: found(place) for name, place in self.definition.read_back.items()}
        in_force = {name: value for name, value in told.items() if value is not None}
        length = in_force.get("max_model_len")
        version = None if self.definition.version is None else found(self.definition.version)
        if length is None or not str(length).isdecimal():
            return Reading(model_name=model_name, in_force=in_force)
        facts = EngineFacts(
            engine=self.name,
            version="unknown" if version is None else str(version),
            device=self.device if self.device != "auto" else "unknown",
            num_gpu_blocks=None,
            block_size=None,
            max_model_len=int(length),
            captures_graphs=self.definition.captures_graphs,
        )
        return Reading(model_name=model_name, in_force=in_force, facts=facts)

    def last_words(self, log: Path, *, was_ready: bool, exit_code: int | None = None) -> Failed:
        """Why an engine ended: by the definition's patterns, by a line on lack of memory, by its exit code."""
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = list(log_lines(text))
        for pattern in self.definition.failures:
            for line in lines:
                if re.search(pattern.line, line):
                    return Failed(kind=pattern.kind, detail=line)
        without_memory = memory_failure(text, was_ready=was_ready)
        if without_memory is not None:
            return without_memory
        # Nothing kills itself so: somebody did, or the kernel for want of memory; no setting is condemned for either.
        kind = FailureKind.INFRASTRUCTURE if exit_code == -signal.SIGKILL else FailureKind.CRASHED
        return Failed(kind=kind, detail=f"{how_it_ended(exit_code)} and gave no reason; see {log}")

    def not_free(self, detail: str) -> NotFree | None:
        """Never: a definition does not say how an engine words it."""
        del detail
        return None


def _configs(definition: EngineDefinition, job: TuningJob) -> Iterator[EngineConfig]:
    """The defaults, and configs that between them have every value that the job may launch."""
    searched = {name: job.search_space.choices(name) for name in job.search_space.searched}
    first = {name: choices[0] for name, choices in searched.items()}
    for name, choices in searched.items():
        for choice in choices:
            values = definition.defaults.model_copy(update={**first, name: choice})
            yield job.config(values)


def _at(value: object, path: tuple[str | int, ...]) -> Setting | None:
    """The plain value at a place in JSON; None where there is none."""
    for step in path:
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, dict) else None
        else:
            value = value[step] if isinstance(value, list) and len(value) > step else None
    return value if isinstance(value, Setting) else None


def _json(url: str) -> Any:
    return json.loads(read_url(url, timeout_s=ANSWER_S))
