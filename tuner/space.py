"""The search space: which values each parameter may take, and which combinations can never work."""

from __future__ import annotations

import math
from itertools import product
from typing import Literal, get_args

from pydantic import Field, field_validator

from tuner.inputs import read_preset, validated
from tuner.records import EngineConfig, Record

SearchedName = Literal["max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"]
"""The three parameters a study proposes."""

SamplerName = Literal["tpe", "nsga2", "gp", "qmc", "random", "grid"]
"""How a study proposes: Optuna's samplers, or every setting in order."""

SEARCHED: tuple[SearchedName, ...] = get_args(SearchedName)


class SearchedValues(Record):
    """One value for each searched parameter."""

    max_num_seqs: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)
    gpu_memory_utilization: float = Field(gt=0, le=1)


class Parameter(Record):
    """The values one parameter may take, in rising order, and why these."""

    choices: tuple[float, ...] = Field(min_length=1)
    unit: str
    why: str

    @field_validator("choices")
    @classmethod
    def _rising(cls, choices: tuple[float, ...]) -> tuple[float, ...]:
        if list(choices) != sorted(set(choices)):
            raise ValueError("choices must rise and not repeat")
        return choices


class Parameters(Record):
    """The three searched parameters."""

    max_num_seqs: Parameter
    max_num_batched_tokens: Parameter
    gpu_memory_utilization: Parameter

    @field_validator("max_num_seqs", "max_num_batched_tokens")
    @classmethod
    def _whole_and_positive(cls, parameter: Parameter) -> Parameter:
        for value in parameter.choices:
            if not math.isfinite(value) or value != int(value) or value < 1:
                raise ValueError(f"{value:g} is not a whole number of at least 1")
        return parameter

    @field_validator("gpu_memory_utilization")
    @classmethod
    def _a_share(cls, parameter: Parameter) -> Parameter:
        for value in parameter.choices:
            if not 0 < value <= 1:
                raise ValueError(f"{value:g} is outside (0, 1]: it is a share of the device's memory")
        return parameter


class SearchSpace(Record):
    """What a study may propose."""

    why: str
    parameters: Parameters
    cautious_start: SearchedValues
    """The first setting tried after the engine's defaults; cut to what the model and the device allow."""

    def choices(self, name: SearchedName) -> tuple[float, ...]:
        """The values parameter `name` may take, in rising order."""
        parameter: Parameter = getattr(self.parameters, name)
        return parameter.choices


def load_space(name_or_mapping: str | dict[str, object]) -> SearchSpace:
    """The preset of that name, or a space written out in the job.

    Raises:
        InputError: for an unknown preset or a faulty space.
    """
    if isinstance(name_or_mapping, str):
        return validated(SearchSpace, read_preset("spaces", name_or_mapping), where=f"search space {name_or_mapping!r}")
    return validated(SearchSpace, name_or_mapping, where="search_space")


def combinations(space: SearchSpace) -> list[SearchedValues]:
    """Every setting of the space, those that cannot work included."""
    choices = [space.choices(name) for name in SEARCHED]
    return [SearchedValues.model_validate(dict(zip(SEARCHED, values, strict=True))) for values in product(*choices)]


def broken_rule(config: EngineConfig, *, max_model_len: int | None) -> str | None:
    """Why this setting can never work, or None if no rule says so.

    The rules are the engine's own (vLLM: `vllm/config/scheduler.py`); a launch to find out costs seconds to minutes.

    Args:
        max_model_len: the length in force, where it is known.
    """
    budget, seqs = config.max_num_batched_tokens, config.max_num_seqs
    if budget < seqs:
        return (
            f"max_num_batched_tokens={budget} is below max_num_seqs={seqs}: "
            "a decode step needs one token per running request"
        )
    if not config.enable_chunked_prefill and max_model_len is not None and budget < max_model_len:
        return (
            f"max_num_batched_tokens={budget} is below max_model_len={max_model_len} with chunked prefill off: "
            "a whole prompt must fit one step"
        )
    return None
