"""What every stored value is made of: a frozen record, and a figure that may be unknown."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer


class Record(BaseModel):
    """A frozen value with no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def _null_if_unknown(value: float) -> float | None:
    return None if math.isnan(value) else value


def _nan_if_null(value: object) -> object:
    return math.nan if value is None else value


Figure = Annotated[float, BeforeValidator(_nan_if_null), PlainSerializer(_null_if_unknown, when_used="json")]
"""A measured number: NaN where nothing was measured, so that no comparison with it holds; in JSON null."""
