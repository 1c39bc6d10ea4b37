"""Requests as they were once sent: a trace, what of it is taken, and how fast it is played.

A file is read when it is needed, checked against the digest that was taken when the job was made, and never copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from tuner.frozen import Record
from tuner.inputs import DurationS
from tuner.load.trace_formats import READERS, TraceError, TraceFormat, TraceRow

_DIGEST_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows that are to be sent, in order of time, and what was left out of them."""

    rows: tuple[TraceRow, ...]
    num_left_out: int = 0
    """Rows that are no request to send: failed in the original, or too long for the model."""

    lengths_estimated: bool = False
    """Whether lengths are characters over four and not counts."""

    def fitting(self, max_model_len: int) -> Trace:
        """Without the requests that no context of this length holds."""
        rows = tuple(row for row in self.rows if row.input_tokens + row.output_tokens <= max_model_len)
        return replace(self, rows=rows, num_left_out=self.num_left_out + len(self.rows) - len(rows))

    @property
    def times_s(self) -> tuple[float, ...] | None:
        """When its requests came, or None where it does not say."""
        times = tuple(row.at_s for row in self.rows if row.at_s is not None)
        return times if len(times) == len(self.rows) else None


class TraceSpec(Record):
    """Which trace, and what of it."""

    path: str
    format: TraceFormat
    time_scale: float = Field(default=1.0, gt=0)
    """Times are multiplied by it: 0.1 plays an hour in six minutes."""

    sample: float = Field(default=1.0, gt=0, le=1)
    """Share of the requests to keep, each with the same chance (a chat whole or not at all): the pattern stays."""

    sample_seed: int = Field(default=0, ge=0)
    duration: DurationS | None = None
    """How much of the trace to take, by its own clock; None: all."""

    tokenizer: str | None = None
    """A tokenizer.json to count ShareGPT's tokens with; None: characters over four."""

    digest: str | None = None
    """Of the file as it was when the job was made; filled in."""

    @model_validator(mode="before")
    @classmethod
    def _found(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("path"), str) or data.get("digest"):
            return data
        path = Path(data["path"]).expanduser().resolve()
        if not path.is_file():
            raise ValueError(f"there is no trace at {path}")
        return {**data, "path": str(path), "digest": _digest(path)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGEST_DIGITS]


@lru_cache(maxsize=4)
def read_trace(spec: TraceSpec) -> Trace:
    """Read, cut, sample and scale a trace.

    Raises:
        TraceError: for a file that is missing, has changed, or holds a row that is none; for nothing left.
    """
    path = Path(spec.path)
    try:
        if spec.digest is not None and _digest(path) != spec.digest:
            raise TraceError(f"{path} has changed: its digest was {spec.digest} and is {_digest(path)}")
        found = list(READERS[spec.format](path, spec.tokenizer))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None
    rows = [row for row in found if row is not None]
    num_failed = len(found) - len(rows)
    rows = list(_sampled(_cut(_from_zero(rows), spec), spec))
    if not rows:
        raise TraceError(f"{path}: no request is left of {len(found)} rows: take a longer duration or a larger sample")
    return Trace(
        rows=tuple(replace(row, at_s=None if row.at_s is None else row.at_s * spec.time_scale) for row in rows),
        num_left_out=num_failed,
        lengths_estimated=spec.format == "sharegpt" and spec.tokenizer is None,
    )


def _from_zero(rows: list[TraceRow]) -> list[TraceRow]:
    times = [row.at_s for row in rows if row.at_s is not None]
    if len(times) < len(rows) or not rows:
        return rows
    rows = sorted(rows, key=lambda row: row.at_s or 0.0)
    return [replace(row, at_s=(row.at_s or 0.0) - min(times)) for row in rows]


def _cut(rows: Iterable[TraceRow], spec: TraceSpec) -> Iterator[TraceRow]:
    return (row for row in rows if spec.duration is None or row.at_s is None or row.at_s < spec.duration)


def _sampled(rows: Iterable[TraceRow], spec: TraceSpec) -> Iterator[TraceRow]:
    rng = np.random.default_rng(spec.sample_seed)
    chosen: dict[str, bool] = {}
    for row in rows:
        keep = bool(rng.random() < spec.sample)
        if row.session is not None:
            keep = chosen.setdefault(row.session, keep)
        if keep:
            yield row
