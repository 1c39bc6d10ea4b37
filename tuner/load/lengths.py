"""How long prompts and outputs are: distributions over whole numbers of tokens, each cut to what it may be.

Cut means conditional on the range, not clipped to it: no weight piles up at the ends. Every distribution is drawn
through its quantile, so that a pair can be correlated by rank (`pairs`), and says its mean as it is after the
cut, because memory and time are reckoned from it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from statistics import NormalDist
from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from tuner.frozen import Record

MOST_TOKENS = 10_000_000
"""Longer than any context: a larger bound is a slip of the pen."""

LEAST_WEIGHT = 1e-6
"""A range that holds less of a distribution than this is not what it describes."""

_BELL = NormalDist()
_WIDEST_SCORE = 9.0
_LEAST_SHARE = 1e-16

Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Floats = npt.NDArray[np.float64]


class Fixed(Record):
    """Every length is the same."""

    kind: Literal["fixed"]
    tokens: Tokens

    @property
    def longest(self) -> int:
        """The largest length this can draw. Unit: tokens."""
        return self.tokens

    @property
    def mean(self) -> float:
        """The mean length. Unit: tokens."""
        return float(self.tokens)

    def quantile(self, share: float) -> int:  # noqa: ARG002 - same signature as its siblings
        """The length that `share` of all draws do not exceed. Unit: tokens."""
        return self.tokens


class Uniform(Record):
    """Whole lengths from `low` to `high`, both included, equally likely."""

    kind: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_order(self.low, self.high)
        return self

    @property
    def longest(self) -> int:
        """The largest length this can draw. Unit: tokens."""
        return self.high

    @property
    def mean(self) -> float:
        """The mean length. Unit: tokens."""
        return (self.low + self.high) / 2

    def quantile(self, share: float) -> int:
        """The length that `share` of all draws do not exceed. Unit: tokens."""
        return min(self.low + int(share * (self.high - self.low + 1)), self.high)


class _Bell(Record):
    """What a normal and a log-normal length have in common: a bell on some axis, rounded and cut to [low, high]."""

    median: float = Field(gt=0, le=MOST_TOKENS)
    """Half of the lengths are below, before the cut. Unit: tokens."""

    cv: float = Field(gt=0, le=10)
    """Standard deviation over mean, before the cut."""

    low: Tokens = 1
    high: Tokens
    """The longest there may be; it is what has to fit the model's context."""

    @model_validator(mode="after")
    def _holds_something(self) -> Self:
        _check_order(self.low, self.high)
        first, last = self._ends
        if last - first < LEAST_WEIGHT:
            raise ValueError(
                f"low={self.low} to high={self.high} holds {last - first:.1e} of the lengths around "
                f"median={self.median:g}: widen the range or move the median into it"
            )
        return self

    @abstractmethod
    def _score(self, tokens: float) -> float:
        """How many standard deviations from the middle of the bell a length lies."""

    @abstractmethod
    def _at_score(self, score: float) -> float:
        """The length so many standard deviations from the middle."""

    @cached_property
    def _ends(self) -> tuple[float, float]:
        """Shares of the whole bell below the range and below its end."""
        return _BELL.cdf(self._score(self.low - 0.5)), _BELL.cdf(self._score(self.high + 0.5))

    @property
    def longest(self) -> int:
        """The largest length this can draw. Unit: tokens."""
        return self.high

    @cached_property
    def mean(self) -> float:
        """The mean length, as it is after rounding and the cut. Unit: tokens."""
        first = max(self.low, int(self._at_score(-_WIDEST_SCORE)))
        last = min(self.high, int(self._at_score(_WIDEST_SCORE)) + 1)
        below = [_BELL.cdf(self._score(edge - 0.5)) for edge in range(first, last + 2)]
        return float(np.average(np.arange(first, last + 1), weights=np.diff(below)))

    def quantile(self, share: float) -> int:
        """The length that `share` of all draws do not exceed. Unit: tokens."""
        first, last = self._ends
        below = min(max(first + share * (last - first), _LEAST_SHARE), 1 - _LEAST_SHARE)
        return round(min(max(self._at_score(_BELL.inv_cdf(below)), self.low), self.high))


class Normal(_Bell):
    """Lengths around a middle, as far above as below it. Its median is its mean."""

    kind: Literal["normal"]

    def _score(self, tokens: float) -> float:
        return (tokens / self.median - 1) / self.cv

    def _at_score(self, score: float) -> float:
        return self.median * (1 + self.cv * score)


class LogNormal(_Bell):
    """Many short lengths and a few long ones, as people write."""

    kind: Literal["lognormal"]

    @property
    def _sigma(self) -> float:
        return math.sqrt(math.log1p(self.cv**2))

    def _score(self, tokens: float) -> float:
        return math.log(tokens / self.median) / self._sigma

    def _at_score(self, score: float) -> float:
        return self.median * math.exp(self._sigma * score)


class Empirical(Record):
    """Lengths as they were seen, each as often as its weight says."""

    kind: Literal["empirical"]
    values: tuple[Tokens, ...] = Field(min_length=1)
    weights: tuple[float, ...] | None = None
    """How often each value comes, in any unit; all alike by default."""

    low: Tokens = 1
    high: Tokens = MOST_TOKENS
    """Values outside [low, high] are left out."""

    @model_validator(mode="after")
    def _holds_something(self) -> Self:
        _check_order(self.low, self.high)
        weights = self.weights or ()
        if self.weights is not None and len(weights) != len(self.values):
            raise ValueError(f"{len(weights)} weights for {len(self.values)} values: give one each")
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise ValueError("a weight is a number of at least 0")
        if not self._kept:
            raise ValueError(f"no value of weight above 0 lies in low={self.low} to high={self.high}")
        return self

    @cached_property
    def _kept(self) -> dict[int, float]:
        """Weight by length, shortest first, of what the cut leaves; they add up to 1."""
        weights = self.weights or (1.0,) * len(self.values)
        kept: dict[int, float] = {}
        for value, weight in sorted(zip(self.values, weights, strict=True)):
            if self.low <= value <= self.high and weight > 0:
                kept[value] = kept.get(value, 0.0) + weight
        total = math.fsum(kept.values())
        return {value: weight / total for value, weight in kept.items()}

    @cached_property
    def _cumulative(self) -> Floats:
        return np.cumsum(list(self._kept.values()))

    @property
    def longest(self) -> int:
        """The largest length this can draw. Unit: tokens."""
        return max(self._kept)

    @property
    def mean(self) -> float:
        """The mean length. Unit: tokens."""
        return math.fsum(value * weight for value, weight in self._kept.items())

    def quantile(self, share: float) -> int:
        """The length that `share` of all draws do not exceed. Unit: tokens."""
        index = int(np.searchsorted(self._cumulative, share, side="right"))
        return list(self._kept)[min(index, len(self._kept) - 1)]


Length = Annotated[Fixed | Uniform | Normal | LogNormal | Empirical, Field(discriminator="kind")]


def pairs(first: Length, second: Length, *, correlation: float, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """Pairs of lengths without end, correlated by rank: a Gaussian copula, so that each keeps its own distribution.

    Args:
        correlation: Spearman's, -1 to 1; reached as far as ties and rounding let it.
    """
    # A normal pair of Pearson correlation r has the rank correlation 6/pi asin(r/2) (Pearson 1907).
    pearson = 2 * math.sin(math.pi * correlation / 6)
    rest = math.sqrt(max(0.0, 1 - pearson**2))
    while True:
        one, other = rng.standard_normal(2)
        yield first.quantile(_BELL.cdf(one)), second.quantile(_BELL.cdf(pearson * one + rest * other))


def _check_order(low: int, high: int) -> None:
    if low > high:
        raise ValueError(f"low={low} is above high={high}: swap them")
