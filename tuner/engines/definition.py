"""An engine as data: how any OpenAI-compatible server is started, told its parameters, and read. Run by `command.py`.

Arguments are lists and never go through a shell; `{name}` in one is replaced, every other brace stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tuner.engine_config import EngineConfig, Setting
from tuner.frozen import Record
from tuner.inputs import InputError, nearest, read_preset, read_yaml, validated
from tuner.measure.prometheus import MetricNames
from tuner.parameters import SearchedValues
from tuner.records import FailureKind, StageRecord

_YAML = (".yaml", ".yml")
_PLACE = re.compile(r"\{([a-z_]+)\}")
_LAUNCH = ("model", "port", "served_model_name")
_TOLD_BY = {
    "num_preemptions": "preemptions",
    "kv_cache_usage_peak": "kv_cache_usage",
    "mean_running": "running",
    "mean_waiting": "waiting",
}
"""Figures of a stage, each with the metric that tells it."""


def _spelled(value: object) -> object:
    """Keys as a YAML file spells them, so that `true:` and `16:` need no quotes."""
    if not isinstance(value, Mapping):
        return value
    return {spelling(key) if isinstance(key, Setting) else key: arguments for key, arguments in value.items()}


def spelling(value: Setting) -> str:
    """A value as YAML spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


Arguments = tuple[str, ...]
Pattern = Annotated[str, AfterValidator(_regular_expression)]
How = Arguments | Annotated[dict[str, Arguments], BeforeValidator(_spelled)]
"""Arguments with `{value}`; or the arguments for each value that the engine can be given, and for no other."""


class Place(Record):
    """Where a running engine tells something: in the JSON of a page, or in its log."""

    page: str | None = Field(default=None, pattern="^/")
    at: tuple[str | int, ...] = ()
    """Keys and indices that lead to the value."""

    log: Pattern | None = None
    """A pattern with one group, which is the value; the last line that matches counts."""

    @model_validator(mode="after")
    def _one_place(self) -> Place:
        if (self.page is None) == (self.log is None):
            raise ValueError("give either page and at, or log")
        if self.page is not None and not self.at:
            raise ValueError(f"page {self.page} needs `at`: the keys that lead to the value")
        if self.log is not None and re.compile(self.log).groups != 1:
            raise ValueError(f"log {self.log!r} needs one group in brackets, around the value")
        return self


class FailurePattern(Record):
    """A line by which an engine that ended says why."""

    line: Pattern
    kind: FailureKind


class EngineDefinition(Record):
    """All that the tuner knows of an engine that has no code here."""

    name: str = Field(pattern="^[a-z][a-z0-9._-]*$")
    why: str = ""
    executable: Arguments = Field(min_length=1)
    """What starts it; a job's `engine.command` takes its place."""

    arguments: Arguments
    """What every launch is given, with `{model}`, `{port}` and `{served_model_name}`."""

    parameters: dict[str, How]
    """How it is told each engine parameter, under vLLM's names; of the others a job may set none."""

    cpus: Arguments = ()
    """How it is told `engine.cpus`, with `{value}`; empty: it cannot be told."""

    required: tuple[str, ...] = ()
    """Parameters that a job must set, because what the engine takes otherwise would differ from setting to setting."""

    environment: Mapping[str, str] = {}
    defaults: SearchedValues
    """What it does when it is told nothing."""

    health: str = Field(default="/health", pattern="^/")
    """The page that answers 200 once it serves."""

    read_back: dict[str, Place]
    """Where it tells which value of a parameter is in force."""

    version: Place | None = None
    metrics_page: str = Field(default="/metrics", pattern="^/")
    metrics: MetricNames = MetricNames()
    not_applicable: tuple[str, ...] = ()
    """Figures it has none of, and parameters whose value in force it has no way to tell."""

    captures_graphs: bool | None = None
    failures: tuple[FailurePattern, ...] = ()
    """Tried in this order, each on every line of the log."""

    start_s: float = Field(default=10.0, gt=0)
    """What a start is reckoned with until one was seen."""

    exit_s: float = Field(default=10.0, gt=0)
    """What it gets to end by itself after SIGTERM."""

    @cached_property
    def settable(self) -> frozenset[str]:
        """The parameters it can be told."""
        return frozenset(self.parameters)

    @model_validator(mode="after")
    def _whole(self) -> EngineDefinition:
        _check_places("arguments", self.arguments, allowed=_LAUNCH, needed=_LAUNCH)
        _check_places("cpus", self.cpus, allowed=("value",), needed=("value",) if self.cpus else ())
        known = set(EngineConfig.model_fields) - {"extra_args"}
        for name, how in self.parameters.items():
            if name not in known:
                raise ValueError(f"parameters: unknown parameter {name!r}{nearest(name, known)}")
            for arguments in how.values() if isinstance(how, dict) else (how,):
                needed = () if isinstance(how, dict) else ("value",)
                _check_places(f"parameters.{name}", arguments, allowed=("value",), needed=needed)
        return self

    @model_validator(mode="after")
    def _checked_once_it_runs(self) -> EngineDefinition:
        for name in ("max_num_seqs", "enable_prefix_caching"):
            if name not in self.parameters:
                raise ValueError(f"parameters.{name} is missing: {_NEEDED[name]}")
        if "max_model_len" not in self.read_back:
            raise ValueError("read_back.max_model_len is missing: say where the engine tells its longest request")
        for name in (*self.read_back, *self.required):
            if name not in self.parameters:
                raise ValueError(f"{name} is read back or required, but parameters does not say how it is set")
        for name in sorted(set(self.parameters) - set(self.read_back) - set(self.not_applicable)):
            raise ValueError(f"{name} is set but never checked: add it to read_back, or to not_applicable")
        return self

    @model_validator(mode="after")
    def _figures_told_or_declared(self) -> EngineDefinition:
        for name in self.not_applicable:
            if name not in set(self.parameters) | set(StageRecord.model_fields):
                known = set(self.parameters) | set(_TOLD_BY)
                raise ValueError(f"not_applicable: unknown figure or parameter {name!r}{nearest(name, known)}")
        for figure, metric in _TOLD_BY.items():
            if bool(getattr(self.metrics, metric)) == (figure in self.not_applicable):
                raise ValueError(f"either name the metric of {figure} (metrics.{metric}) or list it in not_applicable")
        return self

    def told(self, name: str, value: Setting) -> Arguments:
        """The arguments that set a parameter.

        Raises:
            InputError: for a value that the engine cannot be given.
        """
        how = self.parameters[name]
        if not isinstance(how, dict):
            return filled(how, {"value": spelling(value)})
        if spelling(value) not in how:
            raise InputError(
                f"the engine {self.name} cannot be told {name}={spelling(value)}: it takes {', '.join(how)}"
            )
        return filled(how[spelling(value)], {"value": spelling(value)})


_NEEDED = {
    "max_num_seqs": "say how the engine is told how many requests may run at once",
    "enable_prefix_caching": "say how it is turned off, or with `false: []` that the engine keeps no prefixes",
}


def filled(arguments: Iterable[str], values: Mapping[str, str]) -> Arguments:
    """The arguments with each `{name}` replaced."""
    return tuple(_PLACE.sub(lambda found: values[found[1]], argument) for argument in arguments)


def _check_places(where: str, arguments: Arguments, *, allowed: tuple[str, ...], needed: tuple[str, ...]) -> None:
    found = {name for argument in arguments for name in _PLACE.findall(argument)}
    for name in sorted(found - set(allowed)):
        raise ValueError(f"{where}: {{{name}}} stands for nothing here{nearest(name, allowed)}")
    for name in sorted(set(needed) - found):
        raise ValueError(f"{where}: {{{name}}} is missing, so that the engine is not told it")


def load_definition(given: object) -> object:
    """A definition by the name of a preset or the path of a YAML file; anything else is left to the validator.

    Raises:
        InputError: for an unknown preset, an unreadable file or a faulty definition.
    """
    if not isinstance(given, str):
        return given
    is_file = given.endswith(_YAML)
    data = read_yaml(Path(given).expanduser()) if is_file else read_preset("engines", given)
    return validated(EngineDefinition, data, where=f"engine definition {given!r}")


def definition_from(folder: Path, engine: object) -> object:
    """A job's engine as plain data, the relative path of its definition taken from `folder` on."""
    given = engine.get("definition") if isinstance(engine, dict) else None
    if not isinstance(engine, dict) or not isinstance(given, str) or not given.endswith(_YAML):
        return engine
    return {**engine, "definition": str(folder / Path(given).expanduser())}
