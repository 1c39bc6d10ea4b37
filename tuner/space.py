"""The search space: what a study may propose, and which combinations can never work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Annotated, Literal

from pydantic import PlainSerializer, PlainValidator, model_validator

from tuner.conditions import Condition, ConditionError, parse_condition
from tuner.engine_config import EngineConfig
from tuner.frozen import Record
from tuner.inputs import read_preset, validated
from tuner.parameters import SEARCHABLE, Choice, Parameter, Parameters, SearchedValues, checked

SamplerName = Literal["tpe", "nsga2", "gp", "qmc", "random", "grid"]
"""How a study proposes: Optuna's samplers, or every setting in order."""

MOST_COMBINATIONS = 100_000
"""Settings of the largest space: each is looked at when the job is read."""


def _read_condition(given: object) -> Condition:
    if isinstance(given, Condition):
        return given
    if isinstance(given, str):
        return parse_condition(given, set(SEARCHABLE))
    raise ValueError("a condition is a text such as 'max_num_batched_tokens >= 4 * max_num_seqs'")


def _text_of(condition: Condition) -> str:
    return condition.text


ConditionText = Annotated[Condition, PlainValidator(_read_condition), PlainSerializer(_text_of)]
"""A condition over the fields of an engine config, written as a text."""


class SearchSpace(Record):
    """What a study may propose."""

    why: str
    parameters: Parameters
    conditions: tuple[ConditionText, ...] = ()
    """What a combination has to meet. The engine's defaults are measured whether they do or not."""

    cautious_start: SearchedValues
    """The first setting tried after the engine's defaults; cut to what the model and the device allow. A searched
    parameter it does not name starts at its first choice."""

    @property
    def searched(self) -> tuple[str, ...]:
        """Names of the searched parameters."""
        return tuple(self.parameters)

    def parameter(self, name: str) -> Parameter:
        """What the space says of a searched parameter."""
        return self.parameters[name]

    def choices(self, name: str) -> tuple[Choice, ...]:
        """The values a searched parameter may take; numbers in rising order."""
        return self.parameter(name).choices

    @model_validator(mode="after")
    def _of_a_size_to_look_at(self) -> SearchSpace:
        size = math.prod(len(self.choices(name)) for name in self.searched)
        if size > MOST_COMBINATIONS:
            raise ValueError(
                f"{size:,} combinations are too many: leave choices out until {MOST_COMBINATIONS:,} remain"
            )
        return self

    @model_validator(mode="after")
    def _start_of_searched_parameters(self) -> SearchSpace:
        for name, value in self.cautious_start.model_dump(exclude_none=True).items():
            if name not in self.searched:
                raise ValueError(f"cautious_start.{name}: it is not among the searched parameters: leave it out")
            checked(name, value)
        return self


def load_space(name_or_mapping: str | dict[str, object]) -> SearchSpace:
    """The preset of that name, or a space written out in the job.

    Raises:
        InputError: for an unknown preset or a faulty space.
    """
    if isinstance(name_or_mapping, str):
        return validated(SearchSpace, read_preset("spaces", name_or_mapping), where=f"search space {name_or_mapping!r}")
    return validated(SearchSpace, name_or_mapping, where="search_space")


def combinations(space: SearchSpace) -> Iterator[SearchedValues]:
    """Every setting of the space, those that cannot work included."""
    choices = [space.choices(name) for name in space.searched]
    for values in product(*choices):
        yield SearchedValues.model_validate(dict(zip(space.searched, values, strict=True)))


def broken_condition(config: EngineConfig, conditions: Sequence[Condition]) -> str | None:
    """Which of `conditions` the setting breaks, with the values it compares, or None.

    One that looks at a value left to the engine says nothing of this setting.

    Raises:
        ConditionError: where one cannot be evaluated.
    """
    values = config.model_dump()
    for condition in conditions:
        if any(values[name] is None for name in condition.names):
            continue
        of = ", ".join(f"{name}={values[name]}" for name in sorted(condition.names))
        try:
            holds = condition.holds(values)
        except ConditionError as error:
            raise ConditionError(
                f"the condition {condition.text!r} cannot be evaluated at {of}: {error}; mend it or leave it out"
            ) from None
        if not holds:
            return f"the condition {condition.text!r} does not hold at {of}"
    return None


def broken_rule(config: EngineConfig, *, max_model_len: int | None) -> str | None:
    """Why this setting can never work, or None if no rule says so.

    The rules are the engine's own (vLLM: `vllm/config/scheduler.py`); a launch to find out costs seconds to minutes.

    Args:
        max_model_len: the length in force, where it is known.
    """
    budget, seqs = config.max_num_batched_tokens, config.max_num_seqs
    active, scheduled = config.max_num_active_seqs, config.max_num_scheduled_tokens
    if budget < seqs:
        return (
            f"max_num_batched_tokens={budget} is below max_num_seqs={seqs}: "
            "a decode step needs one token per running request"
        )
    if active is not None and active > seqs:
        return f"max_num_active_seqs={active} is above max_num_seqs={seqs}: it narrows that limit"
    if scheduled is not None and scheduled > budget:
        return f"max_num_scheduled_tokens={scheduled} is above max_num_batched_tokens={budget}: it narrows that budget"
    step = budget if scheduled is None else scheduled
    if not config.enable_chunked_prefill and max_model_len is not None and step < max_model_len:
        name = "max_num_batched_tokens" if scheduled is None else "max_num_scheduled_tokens"
        return (
            f"{name}={step} is below max_model_len={max_model_len} with chunked prefill off: "
            "a whole prompt must fit one step"
        )
    return None
