"""When requests come: the shape of an arrival process, and absolute times counted from a stage's start. Pure.

A shape says nothing of how much: that is the stage's load, users in a closed loop, requests per second in an open one,
requests in a batch. So one workload can be measured at many loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from tuner.frozen import Record
from tuner.inputs import DurationS
from tuner.records import Loop

_DRAWN_AT_ONCE = 256


class Closed(Record):
    """Users, each of whom sends a request when the previous one has ended, and perhaps thinks before."""

    kind: Literal["closed"] = "closed"
    think_time: DurationS = 0.0
    """Mean time between an answer and the user's next request; drawn exponentially, as interactive users are modelled
    (Denning and Buzen 1978), so that users do not march in step."""


class Poisson(Record):
    """Many users who do not know of each other."""

    kind: Literal["poisson"]


class Gamma(Record):
    """Arrivals more or less even than Poisson's: gaps from a gamma distribution of this shape."""

    kind: Literal["gamma"]
    burstiness: float = Field(ge=0.01, le=1000)
    """As vLLM defines it: 1 is Poisson, below 1 comes in bursts, above 1 is more even."""


class Constant(Record):
    """One request after each equal gap."""

    kind: Literal["constant"]


class Replayed(Record):
    """As in the workload's trace, stretched or squeezed to the stage's rate."""

    kind: Literal["trace"]


class AllAtOnce(Record):
    """Everything at the start: an offline batch, judged by how long all of it takes."""

    kind: Literal["batch"]


OpenArrivals = Poisson | Gamma | Constant | Replayed
Arrivals = Annotated[Closed | OpenArrivals | AllAtOnce, Field(discriminator="kind")]


def loop_of(arrivals: Arrivals) -> Loop:
    """Who decides when the next request is sent: the answer to the last one, the clock, or nobody."""
    match arrivals:
        case Closed():
            return "closed"
        case AllAtOnce():
            return "batch"
        case _:
            return "open"


def poisson_s(rate_rps: float, rng: np.random.Generator) -> Iterator[float]:
    """Times of a Poisson process, without end."""
    return gamma_s(rate_rps, burstiness=1.0, rng=rng)


def gamma_s(rate_rps: float, *, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """Times whose gaps have mean 1/rate and squared variation 1/burstiness, without end.

    The first request comes after a gap, not at zero: a stage begins at no particular moment of the process.
    """
    _check_rate(rate_rps)
    scale_s = 1 / (rate_rps * burstiness)
    now_s = 0.0
    while True:
        for time_s in now_s + np.cumsum(rng.gamma(burstiness, scale_s, size=_DRAWN_AT_ONCE)):
            now_s = float(time_s)
            yield now_s


def constant_s(rate_rps: float) -> Iterator[float]:
    """Times 1/rate apart, without end; each from its number, so that rounding does not add up."""
    _check_rate(rate_rps)
    return (number / rate_rps for number in count(1))


def replayed_s(times_s: Sequence[float], *, rate_rps: float) -> Iterator[float]:
    """The times of a trace, from its first request on, scaled so that its mean rate becomes this; they end.

    Args:
        times_s: not falling, at least two and not all the same.
    """
    scale = mean_rate_rps(times_s) / rate_rps
    first_s = times_s[0]
    return ((time_s - first_s) * scale for time_s in times_s)


def mean_rate_rps(times_s: Sequence[float]) -> float:
    """Requests per second of a trace: gaps over the time they take.

    Raises:
        ValueError: where that is not a rate.
    """
    span_s = times_s[-1] - times_s[0] if times_s else 0.0
    if span_s <= 0:
        raise ValueError(f"{len(times_s)} requests within {span_s:g} s have no rate: two at different times are needed")
    return (len(times_s) - 1) / span_s


def open_times_s(
    arrivals: OpenArrivals,
    *,
    rate_rps: float,
    rng: np.random.Generator,
    trace_s: Sequence[float] | None = None,
) -> Iterator[float]:
    """When the requests of an open loop are to be sent, in seconds from the stage's start.

    Args:
        trace_s: what `Replayed` replays.

    Raises:
        ValueError: for a rate that is none, or a trace without times.
    """
    match arrivals:
        case Poisson():
            return poisson_s(rate_rps, rng)
        case Gamma():
            return gamma_s(rate_rps, burstiness=arrivals.burstiness, rng=rng)
        case Constant():
            return constant_s(rate_rps)
        case Replayed():
            if trace_s is None:
                raise ValueError("the trace does not say when its requests came: give arrivals of another kind")
            return replayed_s(trace_s, rate_rps=rate_rps)


def think_times_s(mean_s: float, rng: np.random.Generator) -> Iterator[float]:
    """How long a user thinks, again and again; always zero for a mean of zero."""
    while True:
        yield float(rng.exponential(mean_s)) if mean_s else 0.0


def rates_between(low_rps: float, high_rps: float, num_stages: int) -> list[float]:
    """Rates for a ladder, evenly spaced from the lowest to the highest: rising, distinct, never rounded.

    Raises:
        ValueError: where there is no such range.
    """
    _check_rate(low_rps)
    if not low_rps <= high_rps < float("inf") or num_stages < 1:
        raise ValueError(f"no {num_stages} rates lie between {low_rps} and {high_rps} requests/s")
    rates = np.linspace(low_rps, high_rps, num_stages)
    return [float(rate) for rate in np.unique(np.clip(rates, low_rps, high_rps))]


def users_between(low: int, high: int, num_stages: int) -> list[int]:
    """Loads for a closed ladder, evenly spaced on a log scale: whole, rising, distinct, at least 1.

    Fewer than asked for where the range has fewer whole numbers.

    Raises:
        ValueError: where there is no such range.
    """
    if not 1 <= low <= high or num_stages < 1:
        raise ValueError(f"no {num_stages} loads lie between {low} and {high} users")
    users = np.rint(np.geomspace(low, high, num_stages)).astype(int)
    return [int(load) for load in np.unique(np.clip(users, low, high))]


def _check_rate(rate_rps: float) -> None:
    if not 0 < rate_rps < float("inf"):
        raise ValueError(f"rate={rate_rps} requests/s: it must be above 0 and finite")
