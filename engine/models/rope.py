"""Rotary position embeddings: the angles each `rope_type` gives, as transformers computes them.

A pair of values of a head is turned by `position x frequency`, with frequencies `theta ** (-2 i / D)` for i in
[0, D / 2) (Su et al. 2021, arXiv:2104.09864). The types differ in how they stretch those frequencies to longer contexts
(transformers: `modeling_rope_utils.py`; the fields keep the checkpoint's names).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator
from torch import Tensor

from engine.config import ConfigError

Size = Annotated[int, Field(gt=0, lt=2**31)]
Factor = Annotated[float, Field(gt=0, le=1e6)]
"""No checkpoint is stretched further, and what is computed from these stays a number that torch can count to."""


class Rope(BaseModel):
    """Nothing is stretched (`default`).

    That is what `dynamic` is too, up to `max_position_embeddings` positions, and this engine serves no more: beyond,
    its frequencies would follow the length of each request.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    rope_theta: float = Field(gt=1)

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Radians a position for each pair of a head's values: (head_dim / 2,) float32."""
        exponents = torch.arange(0, head_dim, 2).float() / head_dim
        return 1.0 / self.rope_theta**exponents

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    def num_positions(self, max_position_embeddings: int) -> int:
        """Most positions of a request: the checkpoint's own, which counts what llama3 and yarn stretch already.

        (vLLM: `vllm/config/model.py`, `_get_and_verify_max_len`.)
        """
        return max_position_embeddings


class LinearRope(Rope):
    """All frequencies divided by a factor: positions are squeezed into the range that was trained."""

    factor: Factor

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """(head_dim / 2,) float32."""
        return super().inverse_frequencies(head_dim) / self.factor

    def num_positions(self, max_position_embeddings: int) -> int:
        """`factor` times as many."""
        return int(max_position_embeddings * self.factor)


class Llama3Rope(Rope):
    """Llama 3.1 and later: slow frequencies divided by the factor, fast ones kept, a blend in between."""

    factor: Factor
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: Size

    @model_validator(mode="after")
    def _check_order(self) -> Llama3Rope:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} is not above low_freq_factor={self.low_freq_factor}"
            )
        return self

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """(head_dim / 2,) float32."""
        frequencies = super().inverse_frequencies(head_dim)
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


class YarnRope(Rope):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp over the pairs from kept to divided, and sharper attention."""

    factor: Factor
    original_max_position_embeddings: Size
    attention_factor: PositiveFloat | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True
    """Whether the ramp begins and ends at whole pairs."""

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """(head_dim / 2,) float32."""
        frequencies = super().inverse_frequencies(head_dim)
        first, last = self._pair(self.beta_fast, head_dim), self._pair(self.beta_slow, head_dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        if first == last:
            last += 0.001
        divided = ((torch.arange(head_dim // 2).float() - first) / (last - first)).clamp(0.0, 1.0)
        return divided * frequencies / self.factor + (1 - divided) * frequencies

    def _pair(self, turns: float, head_dim: int) -> float:
        """The pair, as a fraction, that turns so many times over the context that was trained."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(self.rope_theta))

    @property
    def magnitude(self) -> float:
        """`attention_factor`, or what the paper makes of `factor`."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpness(self.mscale) / self._sharpness(self.mscale_all_dim)
        return self._sharpness(1.0)

    def _sharpness(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


_KINDS: Mapping[str, type[Rope]] = {
    "default": Rope,
    "dynamic": Rope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}


def read_rope(said: Mapping[str, object], *, rope_theta: float, max_position_embeddings: int) -> Rope:
    """Read one `rope_parameters` (transformers 5) or `rope_scaling` (before).

    Args:
        said: what the checkpoint says; null is as good as nothing.
        rope_theta: taken where `said` has none.
        max_position_embeddings: taken for `original_max_position_embeddings` where `said` has none.

    Raises:
        ConfigError: for a type that is not computed, naming those that are.
        pydantic.ValidationError: for a value that is missing or makes no sense.
    """
    given = {name: value for name, value in said.items() if value is not None}
    if given.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(f"partial_rotary_factor={given['partial_rotary_factor']!r} is not supported; supported: 1.0")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        reason = " (which of its factors apply depends on how long each request is)" if kind == "longrope" else ""
        raise ConfigError(f"rope_type={kind!r} is not supported{reason}; supported: {', '.join(_KINDS)}")
    filled = {"rope_theta": rope_theta, "original_max_position_embeddings": max_position_embeddings, **given}
    return _KINDS[kind].model_validate(filled)
