"""The parameters a study may propose: which there are, and which values each may take."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from tuner.engine_config import EngineConfig, Setting
from tuner.frozen import Record


class SearchedValues(Record):
    """One value for each searched parameter; None for those that are not searched."""

    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    max_model_len: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    long_prefill_token_threshold: int | None = None
    max_num_active_seqs: int | None = None
    max_num_scheduled_tokens: int | None = None
    watermark: float | None = None
    scheduler_reserve_full_isl: bool | None = None


SEARCHABLE = tuple(SearchedValues.model_fields)
"""Names of what a study may propose; it always proposes the first three."""


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
        numbers = [choice for choice in choices if not isinstance(choice, bool | str)]
        if numbers and len(numbers) < len(choices):
            raise ValueError("choices are all numbers, or all texts, or true and false")
        if numbers != sorted(set(numbers)):
            raise ValueError("choices must rise and not repeat")
        if len(set(choices)) < len(choices):
            raise ValueError("choices must not repeat")
        return choices


class Parameters(Record):
    """The searched parameters: three always, any of the others besides."""

    max_num_seqs: Parameter
    max_num_batched_tokens: Parameter
    gpu_memory_utilization: Parameter
    max_model_len: Parameter | None = None
    enable_chunked_prefill: Parameter | None = None
    enable_prefix_caching: Parameter | None = None
    dtype: Parameter | None = None
    kv_cache_dtype: Parameter | None = None
    long_prefill_token_threshold: Parameter | None = None
    max_num_active_seqs: Parameter | None = None
    max_num_scheduled_tokens: Parameter | None = None
    watermark: Parameter | None = None
    scheduler_reserve_full_isl: Parameter | None = None

    @field_validator("*")
    @classmethod
    def _valid(cls, parameter: Parameter | None, info: ValidationInfo) -> Parameter | None:
        if parameter is None or info.field_name is None:
            return parameter
        choices = tuple(checked(info.field_name, choice) for choice in parameter.choices)
        return parameter.model_copy(update={"choices": choices})


def checked(name: str, value: Setting) -> Setting:
    """The value of that parameter as an engine config holds it.

    Raises:
        ValueError: for a value of the wrong kind, or outside the parameter's limits.
    """
    given = int(value) if isinstance(value, float) and value.is_integer() else value
    any_others = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "gpu_memory_utilization": 1}
    try:
        config = EngineConfig.model_validate({**any_others, name: given}, strict=True)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Input ")
        raise ValueError(f"{name}={value}: it {said}") from None
    valid: Setting = getattr(config, name)
    return valid
