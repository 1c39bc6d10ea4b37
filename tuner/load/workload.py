"""What is sent: lengths, sampling parameters, and prompts that no prefix cache has seen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from tuner.inputs import read_preset, validated
from tuner.records import Record

_HASH_DIGITS = 12


class WorkloadError(ValueError):
    """A workload the engine cannot serve whole; the message holds both lengths."""


class Fixed(Record):
    """Every length is the same."""

    kind: Literal["fixed"]
    tokens: int = Field(ge=1)

    @property
    def longest(self) -> int:
        """The largest length this can draw. Unit: tokens."""
        return self.tokens

    @property
    def mean(self) -> float:
        """The mean length. Unit: tokens."""
        return float(self.tokens)

    def draw(self, rng: np.random.Generator) -> int:  # noqa: ARG002 - same signature as its siblings
        """One length. Unit: tokens."""
        return self.tokens


class Uniform(Record):
    """Whole lengths from `low` to `high`, both included, equally likely."""

    kind: Literal["uniform"]
    low: int = Field(ge=1)
    high: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}: swap them")
        return self

    @property
    def longest(self) -> int:
        """The largest length this can draw. Unit: tokens."""
        return self.high

    @property
    def mean(self) -> float:
        """The mean length. Unit: tokens."""
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator) -> int:
        """One length. Unit: tokens."""
        return int(rng.integers(self.low, self.high, endpoint=True))


Length = Annotated[Fixed | Uniform, Field(discriminator="kind")]


class Workload(Record):
    """What each request looks like. Two workloads of one hash send the same kind of load."""

    name: str = "custom"
    why: str = "written out in the job"
    """Who sends such requests, and what they are good for in a tuning job."""

    input_len: Length
    output_len: Length
    temperature: float = Field(default=0.0, ge=0)
    ignore_eos: bool = True
    """Generate the asked number of tokens whatever the model says, so that stages are comparable."""

    @property
    def hash(self) -> str:
        """Twelve hex digits that change with anything that is sent; the name and the reason are not sent."""
        sent = self.model_dump_json(exclude={"name", "why"})
        return hashlib.sha256(sent.encode()).hexdigest()[:_HASH_DIGITS]

    @property
    def longest_request_tokens(self) -> int:
        """Prompt and output of the longest request this can draw. Unit: tokens."""
        return self.input_len.longest + self.output_len.longest

    @property
    def mean_request_tokens(self) -> float:
        """Prompt and output of the mean request. Unit: tokens."""
        return self.input_len.mean + self.output_len.mean

    def check_fits(self, max_model_len: int) -> None:
        """Refuse a workload the engine cannot serve whole.

        Raises:
            WorkloadError: where the longest request is above `max_model_len`.
        """
        if self.longest_request_tokens > max_model_len:
            raise WorkloadError(
                f"workload {self.name}: its longest request has {self.longest_request_tokens} tokens "
                f"({self.input_len.longest} in, {self.output_len.longest} out), above max_model_len={max_model_len}: "
                "shorten the workload or raise max_model_len"
            )


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One request, ready to be sent."""

    index: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    ignore_eos: bool


def requests(
    workload: Workload, *, token_ids: range, max_model_len: int, entropy: Sequence[int]
) -> Iterator[PromptRequest]:
    """Draw requests without end; the same entropy gives the same sequence, any other shares no prompt with it.

    Lengths follow from the study's seed alone: every stage of every trial gets the same sequence of them, so that two
    settings do not differ by the luck of the draw (common random numbers).

    Args:
        token_ids: ids that are ordinary tokens in the model's vocabulary.
        entropy: (study seed, trial, stage, repeat): whatever tells this sequence from all others of a study.

    Raises:
        WorkloadError: where the longest request does not fit `max_model_len`.
    """
    workload.check_fits(max_model_len)
    lengths = np.random.default_rng(np.random.SeedSequence(entropy[0]))
    ids = np.random.default_rng(np.random.SeedSequence(list(entropy)))
    return _draw_requests(workload, token_ids, lengths, ids)


def _draw_requests(
    workload: Workload, token_ids: range, lengths_rng: np.random.Generator, ids_rng: np.random.Generator
) -> Iterator[PromptRequest]:
    index = 0
    while True:
        num_prompt_tokens = workload.input_len.draw(lengths_rng)
        ids = ids_rng.integers(token_ids.start, token_ids.stop, size=num_prompt_tokens)
        yield PromptRequest(
            index=index,
            prompt_token_ids=tuple(ids.tolist()),
            max_tokens=workload.output_len.draw(lengths_rng),
            temperature=workload.temperature,
            ignore_eos=workload.ignore_eos,
        )
        index += 1


def load_workload(name_or_mapping: str | Mapping[str, object]) -> Workload:
    """A preset by its name, or a workload written out as a mapping (`name` and `why` may be left out there).

    Raises:
        InputError: for an unknown preset (naming the nearest and all known) or a mapping that says something wrong.
    """
    if isinstance(name_or_mapping, str):
        preset = read_preset("workloads", name_or_mapping)
        data = {"name": name_or_mapping, **preset} if isinstance(preset, dict) else preset
        return validated(Workload, data, where=f"workload {name_or_mapping!r}")
    return validated(Workload, name_or_mapping, where="workload")
