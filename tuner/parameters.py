"""The parameters a study may propose: one value for each, or the values each may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator

from tuner.engine_config import EngineConfig, EngineParameters, Setting, TunedParameters
from tuner.frozen import Record
from tuner.inputs import nearest


class SearchedValues(EngineParameters, TunedParameters):
    """One value for each searched parameter; None for those that are not searched, or that the engine does not have."""


SEARCHABLE = tuple(SearchedValues.model_fields)
"""Names of what a study may propose; it always proposes the first three, as far as the engine has them."""


def _plain(value: object) -> object:
    if isinstance(value, Setting):
        return value
    raise ValueError("a choice is a number, a text, true or false")


Choice = Annotated[Setting, BeforeValidator(_plain)]
"""One value a parameter may take."""


class Parameter(Record):
    """The values one parameter may take, and why these. Numbers rise; texts, true and false have no order."""

    choices: tuple[Choice, ...] = Field(min_length=1)
    unit: str = ""
    why: str

    @property
    def is_number(self) -> bool:
        """Whether the choices have an order."""
        return not isinstance(self.choices[0], bool | str)

    @field_validator("choices")
    @classmethod
    def _of_one_kind(cls, choices: tuple[Setting, ...]) -> tuple[Setting, ...]:
        if len({isinstance(choice, bool | str) for choice in choices}) > 1:
            raise ValueError("choices are all numbers, or all texts, or true and false")
        return choices


def _each_checked(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    for name in parameters:
        if name not in SEARCHABLE:
            raise ValueError(f"unknown parameter {name!r}{nearest(name, SEARCHABLE)}")
    for name, field in TunedParameters.model_fields.items():
        if field.is_required() and name not in parameters:
            raise ValueError(f"{name} is missing: add it, with a single choice where it is not to move")
    return {name: _of(name, parameters[name]) for name in SEARCHABLE if name in parameters}


def _of(name: str, parameter: Parameter) -> Parameter:
    choices = tuple(checked(name, choice) for choice in parameter.choices)
    given = list(choices)
    numbers = [choice for choice in choices if not isinstance(choice, bool | str)]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"{name}: choices must rise and not repeat, {given} do not")
    if len(set(choices)) < len(choices):
        raise ValueError(f"{name}: choices must not repeat, as they do in {given}")
    return parameter.model_copy(update={"choices": choices})


Parameters = Annotated[dict[str, Parameter], AfterValidator(_each_checked)]
"""The searched parameters by name, in the order of `SEARCHABLE`: two always, the share where the engine has one, any of
the others besides."""


def checked(name: str, value: Setting) -> Setting:
    """The value of that parameter as an engine config holds it: `16k` tokens are 16,000.

    Raises:
        ValueError: for a value of the wrong kind, or outside the parameter's limits.
    """
    given = int(value) if isinstance(value, float) and value.is_integer() else value
    any_others = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
    try:
        config = EngineConfig.model_validate({**any_others, name: given}, strict=True)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"{name}={value}: {said.replace('Input should', 'it should')}") from None
    valid: Setting = getattr(config, name)
    return valid
