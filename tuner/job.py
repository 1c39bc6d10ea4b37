"""`TuningJob`: what the user asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SerializationInfo, field_serializer, field_validator, model_validator

from tuner.answer import Expected, Slo
from tuner.engine_config import EngineConfig, FixedParameters
from tuner.engines.definition import EngineDefinition, definition_from, load_definition
from tuner.frozen import Record
from tuner.inputs import DurationS, InputError, SizeBytes, read_preset, read_yaml, validated
from tuner.load.workload import Workload, load_workload, paths_from
from tuner.parameters import SearchedValues
from tuner.redaction import redacted
from tuner.space import SamplerName, SearchSpace, broken_condition, broken_rule, combinations, load_space

_SHARE = "gpu_memory_utilization"
_YAML = (".yaml", ".yml")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class EngineSpec(Record):
    """Which engine to launch, and what about it stays the same."""

    name: Literal["builtin", "vllm", "command"] = "builtin"
    definition: Annotated[EngineDefinition, BeforeValidator(load_definition)] | None = None
    """Of an engine that has no code here (`name: command`): a preset such as llama-cpp, a YAML file, or all of it."""

    command: tuple[str, ...] = ()
    """What starts it, as a list of arguments and never by a shell, such as [/opt/vllm/bin/vllm]; empty takes the
    engine's own name from PATH."""

    environment: Mapping[str, str] = {}
    """Variables that its processes get besides those of this process. Secrets stay out of a job: they are inherited."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the engine computes on; `auto` takes a GPU where there is one."""

    device_memory: SizeBytes | None = None
    """Size of the device on a CPU; None leaves the engine's own choice, half the RAM."""

    law: str | None = None
    """Rehearse on a simulated device instead: a preset of the built-in engine such as `h100-8b`, or a YAML file. The
    answer says `simulated` wherever it goes."""

    cpus: int | None = Field(default=None, ge=1)
    """On a CPU, how many of this machine's CPUs the engine computes on; None leaves it all but the last."""

    fixed: FixedParameters = FixedParameters()
    start_timeout: DurationS | None = None
    """How long a launch may take before it counts as failed; None leaves it to the engine: 5 minutes, for vLLM 10 on a
    CPU and 30 elsewhere. One that dies is noticed at once: this is for one that hangs."""

    @property
    def described(self) -> str:
        """Its name, and where nothing real is measured that it is so."""
        name = self.name if self.definition is None else self.definition.name
        return name if self.law is None else f"{name}, simulated: {self.law}"

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, environment: Mapping[str, str]) -> Mapping[str, str]:
        for name, value in environment.items():
            if redacted(name, value) != value:
                raise ValueError(
                    f"{name} is a secret, and a job is kept in its run's directory: set it where kneetune is started, "
                    "the engine inherits it"
                )
        return environment

    @field_validator("law")
    @classmethod
    def _file_by_its_absolute_path(cls, law: str | None) -> str | None:
        return str(Path(law).expanduser().resolve()) if law is not None and law.endswith(_YAML) else law

    @model_validator(mode="after")
    def _defined(self) -> EngineSpec:
        if (self.name == "command") != (self.definition is not None):
            raise ValueError(
                f"name={self.name}: an engine without code here is `name: command` with a `definition`, a preset "
                "such as llama-cpp or a YAML file; the others take none"
            )
        return self

    @model_validator(mode="after")
    def _one_device(self) -> EngineSpec:
        if self.law is not None and self.device_memory is not None:
            raise ValueError(f"law={self.law} brings a device of its own size: leave device_memory out")
        if self.device == "cuda" and (self.device_memory, self.cpus, self.law) != (None, None, None):
            raise ValueError("device=cuda: device_memory, cpus and law are for a CPU, leave them out")
        return self


class SloSpec(Record):
    """Limits the user gives; without any they are derived from the unloaded engine."""

    ttft_p95: DurationS
    itl_p95: DurationS
    attainment: float = Field(default=0.9, gt=0, lt=1)
    """Share of requests that must be inside both, each by its own TTFT and TPOT, where capacity is stated."""

    @field_validator("ttft_p95", "itl_p95")
    @classmethod
    def _positive(cls, seconds: float) -> float:
        if seconds <= 0:
            raise ValueError("a limit must be above zero, such as 500ms")
        return seconds


class Budget(Record):
    """When the search ends: whichever comes first."""

    trials: int = Field(default=12, ge=3, le=10_000)
    """Settings to measure, the engine's defaults and the cautious start included."""

    time: DurationS = 1800.0
    """Wall time of the whole job, confirmations included."""

    device_hours: float | None = Field(default=None, gt=0)
    """Time of all devices together that launches may take, where devices are what is paid for. Unit: device-hours."""

    @field_validator("time")
    @classmethod
    def _some_time(cls, seconds: float) -> float:
        if seconds <= 0:
            raise ValueError("a job needs some time: write one above zero, such as 10m")
        return seconds


class MeasureSpec(Record):
    """How long a stage is held."""

    min_requests: int = Field(default=60, ge=20, le=100_000)
    """Requests a stage tries to complete: 59 is what an interval for a p95 needs."""

    min_time: DurationS = 1.0
    max_time: DurationS = 5.0
    max_warm_up: DurationS = 5.0
    precision: float = Field(default=0.05, gt=0, lt=1)
    """A stage ends early once the interval of its throughput is this narrow, relative to its value, on each side."""

    @model_validator(mode="after")
    def _time_enough(self) -> MeasureSpec:
        if not 0 < self.min_time <= self.max_time:
            raise ValueError(f"min_time={self.min_time:g}s must be above 0 and at most max_time={self.max_time:g}s")
        return self


class TuningJob(Record):
    """A tuning job as asked for."""

    name: str = "tuning"
    """Names the run's directory."""

    model: str = Field(min_length=1)
    engine: EngineSpec = EngineSpec()
    workload: Workload
    burst: Workload
    """What the protective profile is tried with: long prompts."""

    search_space: SearchSpace
    sampler: SamplerName = "tpe"
    slo: SloSpec | None = None
    expected: Expected | None = None
    """The load the deployment has to hold; the answer then says how many replicas that takes."""

    price_per_device_hour: float | None = Field(default=None, gt=0)
    """In any currency; the answer then says what a million output tokens cost."""

    budget: Budget = Budget()
    measure: MeasureSpec = MeasureSpec()
    oom_margin: float = Field(default=0.02, ge=0, lt=1)
    """Share of the device that production stays below the highest that passed, where a higher one ran out of memory."""

    max_load: int = Field(default=1024, ge=2, le=65_536)
    """Load no stage goes beyond."""

    parallel_trials: int | None = Field(default=None, ge=1)
    """Most trials at once, on GPUs of their own; None: as many as fit. On a CPU it is one."""

    seed: int = Field(default=0, ge=0)

    @field_validator("workload", "burst", mode="before")
    @classmethod
    def _named_workload(cls, value: object) -> object:
        return load_workload(value) if isinstance(value, str) else value

    @field_validator("search_space", mode="before")
    @classmethod
    def _named_space(cls, value: object) -> object:
        return load_space(value) if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _name_of_a_directory(cls, name: str) -> str:
        if _RUN_NAME.fullmatch(name) is None:
            raise ValueError(
                "a name is at most 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit"
            )
        return name

    @field_validator("workload", "burst")
    @classmethod
    def _users_who_wait(cls, workload: Workload) -> Workload:
        if workload.loop != "closed":
            raise ValueError(
                f"a ladder climbs in concurrent users, and arrivals of kind {workload.arrivals.kind} have none: "
                "leave arrivals out"
            )
        return workload

    @field_validator("model")
    @classmethod
    def _existing_model(cls, model: str) -> str:
        return resolved_model(model)

    @model_validator(mode="after")
    def _something_to_search(self) -> TuningJob:
        space, fixed = self.search_space, self.engine.fixed
        for name in space.searched:
            if name in fixed.model_fields_set:
                raise ValueError(f"{name} is both searched and fixed: leave it out of search_space or of engine.fixed")
        if all(len(space.choices(name)) == 1 for name in space.searched):
            raise ValueError(
                "search_space: every parameter has a single choice, so there is nothing to search: give one a second"
            )
        lengths = [fixed.max_model_len] if fixed.max_model_len is not None else []
        if "max_model_len" in space.searched:
            lengths = [int(length) for length in space.choices("max_model_len")]
        for workload in (self.workload, self.burst) if lengths else ():
            workload.check_fits(min(lengths))
        return self

    @model_validator(mode="after")
    def _no_share_that_decides_nothing(self) -> TuningJob:
        space, fixed = self.search_space, self.engine.fixed
        moves = _SHARE in space.searched and len(space.choices(_SHARE)) > 1
        for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if moves and (getattr(fixed, name) is not None or name in space.searched):
                raise ValueError(
                    f"{name} says how large the KV cache is, whatever {_SHARE} is: give {_SHARE} a single choice, or "
                    f"leave {name} out"
                )
        return self

    @model_validator(mode="after")
    def _some_setting_can_work(self) -> TuningJob:
        values = self.config(next(combinations(self.search_space))).model_dump()
        for condition in self.search_space.conditions:
            for name in sorted(condition.names):
                if values[name] is None:
                    raise ValueError(
                        f"search_space: the condition {condition.text!r} looks at {name}, which is neither searched "
                        "nor fixed: give it choices or a value in engine.fixed"
                    )
        reasons = [self.impossible(values) for values in combinations(self.search_space)]
        if None not in reasons:
            raise ValueError(
                f"search_space: no setting of {len(reasons)} can work: change choices; of the first, {reasons[0]}"
            )
        return self

    @field_serializer("engine")
    def _fixed_but_not_searched(self, engine: EngineSpec, info: SerializationInfo) -> dict[str, object]:
        return engine.model_dump(mode=info.mode, exclude={"fixed": set(self.search_space.searched)})

    def limits(self) -> Slo | None:
        """The SLO as given; None where it has to be derived."""
        if self.slo is None:
            return None
        return Slo(
            ttft_p95_ms=self.slo.ttft_p95 * 1000,
            itl_p95_ms=self.slo.itl_p95 * 1000,
            attainment=self.slo.attainment,
        )

    def config(self, values: SearchedValues) -> EngineConfig:
        """The whole engine config: what is searched and what is fixed."""
        return EngineConfig(
            **{**self.engine.fixed.model_dump(exclude_none=True), **values.model_dump(exclude_none=True)}
        )

    def impossible(self, values: SearchedValues) -> str | None:
        """Why no launch is spent on a combination: the rule or the condition it breaks; None if it may work."""
        return self.broken_by(self.config(values))

    def broken_by(self, config: EngineConfig) -> str | None:
        """The rule or the condition that a config breaks, in words, or None."""
        rule = broken_rule(config, max_model_len=config.max_model_len)
        return rule or broken_condition(config, self.search_space.conditions)


def resolved_model(model: str) -> str:
    """A folder or a .gguf file by its absolute path, which means the same wherever it is used; any other name as it is.

    Raises:
        ValueError: for what looks like a folder and is none, or has no config.json.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(path.resolve())
    if model == "embedded" or (not path.is_dir() and _HUB_ID.fullmatch(model)):
        return model
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path.absolute()} is not a Hugging Face folder: it has no config.json. "
            "A model is `embedded`, such a folder, a .gguf file, or a hub id (owner/name)"
        )
    return str(path.resolve())


def load_job(path_or_preset: str, overrides: dict[str, object] | None = None) -> TuningJob:
    """Read a job file, or the preset of that name, with some of its keys replaced.

    Args:
        path_or_preset: a path ending in .yaml or .yml, or a preset's name.
        overrides: top-level keys and their new values; of a group such as `budget` only the keys given are replaced.

    Raises:
        InputError: naming the file, the key, the value and what would do.
    """
    path = Path(path_or_preset)
    is_file = path.suffix in _YAML or path.is_file()
    data = read_yaml(path) if is_file else read_preset("jobs", path_or_preset)
    if not isinstance(data, dict):
        raise InputError(
            f"{path_or_preset}: a job is keys and values, this holds {_kind_of(data)}: start from the preset "
            "`default` in search_spaces/jobs/"
        )
    if is_file:
        data |= {name: paths_from(path.parent, data[name]) for name in ("workload", "burst") if name in data}
        data |= {"engine": definition_from(path.parent, data["engine"])} if "engine" in data else {}
    job = validated(TuningJob, _merged(data, overrides or {}), where=path_or_preset)
    law = job.engine.law
    if law is not None and law.endswith(_YAML) and not Path(law).is_file():
        raise InputError(f"{path_or_preset}: engine.law: there is no file {law}; name a law's file, or a preset's name")
    return job


def _kind_of(data: object) -> str:
    return "nothing" if data is None else f"a {type(data).__name__}"


def _merged(base: dict[str, object], over: dict[str, object]) -> dict[str, object]:
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return result
