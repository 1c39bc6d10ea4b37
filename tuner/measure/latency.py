"""From request records to figures: percentiles, throughput, and how sure each is. Pure.

Which samples a window holds, for a closed loop in steady state:
- TTFT, TPOT, E2E: requests that *finish* inside the window, also those sent before it. Ends occur at a steady rate, so
  each length is met as often as it is sent; asking for requests wholly inside would prefer the short ones.
- ITL: gaps that end inside the window, of requests that did not fail.
- Throughput: tokens that *arrive* inside the window, of requests that did not fail, finished or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tuner.measure.dependence import effective_samples
from tuner.records import Estimate, RequestRecord

_ALPHA = 0.05
"""All intervals are 95 % intervals."""

_NO_SAMPLE = Estimate(value=float("nan"), num_samples=0)

_MIN_BATCHES, _MAX_BATCHES = 5, 20

# Student's t, 97.5 %, by degrees of freedom from 1 (any statistics textbook's table); batch means need no more.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a stage, in seconds from its first send: `start_s <= t < end_s`."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.end_s - self.start_s

    def holds(self, at_s: float) -> bool:
        """Whether a moment lies inside."""
        return self.start_s <= at_s < self.end_s


def finished_inside(records: Iterable[RequestRecord], window: Window) -> list[RequestRecord]:
    """Requests that ended inside the window, well or badly; those still in flight have not."""
    return [record for record in records if not record.unfinished and window.holds(record.finished_s)]


def ttft_s(record: RequestRecord) -> float:
    """From the intended send to the first token. For a success."""
    assert record.first_token_s is not None  # noqa: S101 - a success has a token
    return record.first_token_s - record.intended_s


def e2e_s(record: RequestRecord) -> float:
    """From the intended send to the last token."""
    return record.finished_s - record.intended_s


def tpot_s(record: RequestRecord) -> float | None:
    """(E2E - TTFT) / (tokens - 1); None for a single token, which has no gap."""
    if record.num_output_tokens <= 1:
        return None
    return (e2e_s(record) - ttft_s(record)) / (record.num_output_tokens - 1)


def itl_gaps_s(record: RequestRecord, window: Window) -> list[float]:
    """Gaps between tokens that end inside the window; tokens that came with the first one have no gap of their own."""
    return [
        after - before
        for before, after in pairwise(record.token_times_s)
        if after != record.first_token_s and window.holds(after)
    ]


def order_statistics_interval(num_samples: int, q: float) -> tuple[int, int] | None:
    """Ranks (from 1) of the two order statistics that hold the q-quantile between them with 95 % confidence.

    Distribution-free: the number of samples below the quantile is binomial. Each tail takes half of the 5 % where
    it can; where even the slowest sample leaves more than that above, the lower tail takes what is left of it.
    None where the samples are too few: under 59 for a p95, under 6 for a median.
    """
    if num_samples == 0:
        return None
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, num_samples + 1)))))
    k = np.arange(num_samples + 1)
    log_choose = log_factorial[-1] - log_factorial - log_factorial[::-1]
    mass = np.exp(log_choose + k * np.log(q) + (num_samples - k) * np.log1p(-q))
    at_least = np.cumsum(mass[::-1])[::-1]
    below = np.concatenate(([0.0], np.cumsum(mass)))
    high = min(int(np.argmax(at_least <= _ALPHA / 2)) if at_least[-1] <= _ALPHA / 2 else num_samples, num_samples)
    left = _ALPHA - at_least[high]
    low = int(np.searchsorted(below, left, side="right")) - 1
    return (low, high) if low >= 1 else None


def percentile(samples: Sequence[float] | Floats, q: float, *, num_independent: int | None = None) -> Estimate:
    """The q-quantile with its distribution-free interval.

    Args:
        samples: in any order.
        num_independent: how many of them count as independent, where they are correlated; all by default.
            The interval's ranks are computed for that many and taken as shares of the sorted samples.
    """
    if len(samples) == 0:
        return _NO_SAMPLE
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    count = len(ordered) if num_independent is None else num_independent
    value = float(np.quantile(ordered, q, method="inverted_cdf"))
    ranks = order_statistics_interval(count, q)
    if ranks is None:
        return Estimate(value=value, num_samples=count)
    low, high = (ordered[min(len(ordered), int(np.ceil(rank * len(ordered) / count))) - 1] for rank in ranks)
    return Estimate(value=value, low=min(value, float(low)), high=max(value, float(high)), num_samples=count)


def dependent_percentile(samples: Sequence[float] | Floats, q: float) -> Estimate:
    """The q-quantile of samples in the order of time, each of which may depend on those before."""
    return percentile(samples, q, num_independent=effective_samples(samples))


def itl_percentile(
    records: Iterable[RequestRecord], window: Window, q: float, *, are_dependent: bool = False
) -> Estimate:
    """A percentile over all gaps, counted as one sample a request.

    The gaps of one request pass through the same steps and wait for the same prefills, so a thousand gaps of thirty
    requests are not a thousand samples: the interval is as wide as that many requests allow.

    Args:
        records: any.
        window: gaps count that end inside.
        q: which quantile.
        are_dependent: whether requests depend on those that began before, and count for less.
    """
    sound = [record for record in records if record.error is None]
    ordered = sorted(sound, key=by_time) if are_dependent else sound
    gaps = [found for record in ordered if (found := itl_gaps_s(record, window))]
    merged = [gap for found in gaps for gap in found]
    sizes = [len(found) for found in gaps]
    return percentile(merged, q, num_independent=effective_samples(merged, sizes) if are_dependent else len(gaps))


def by_time(record: RequestRecord) -> float:
    """Sorts requests by when they were to be sent."""
    return record.intended_s


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """The same estimate in another unit."""
    return Estimate(
        value=estimate.value * factor,
        low=None if estimate.low is None else estimate.low * factor,
        high=None if estimate.high is None else estimate.high * factor,
        num_samples=estimate.num_samples,
    )


def student_t_975(degrees_of_freedom: int) -> float:
    """97.5 % quantile of Student's t for 1 to 19 degrees of freedom."""
    return _T_975[degrees_of_freedom - 1]


def rate_estimate(times_s: Sequence[float] | Floats, window: Window, *, correlation_s: float) -> Estimate:
    """Events per second inside the window, with an interval by batch means and Student's t.

    The window is cut into 5 to 20 equal batches, none shorter than the correlation time where the window allows:
    batches much shorter than a request are not independent and would make the figure look surer than it is.

    Args:
        correlation_s: mean duration of a request.
    """
    num_batches = _MAX_BATCHES
    if correlation_s > 0:
        num_batches = max(_MIN_BATCHES, min(_MAX_BATCHES, int(window.length_s / correlation_s)))
    counts, _ = np.histogram(
        np.asarray(times_s, dtype=np.float64), bins=num_batches, range=(window.start_s, window.end_s)
    )
    rates = counts / (window.length_s / num_batches)
    half = student_t_975(num_batches - 1) * float(np.std(rates, ddof=1)) / num_batches**0.5
    value = float(np.mean(rates))
    return Estimate(value=value, low=max(0.0, value - half), high=value + half, num_samples=num_batches)


def arrival_times_s(records: Iterable[RequestRecord], window: Window) -> Floats:
    """Times of all tokens that arrived inside the window: also of requests still in flight, not of failed ones."""
    times = [record.token_times_s for record in records if record.error is None]
    merged = np.fromiter((at_s for own in times for at_s in own), dtype=np.float64)
    return merged[(merged >= window.start_s) & (merged < window.end_s)]
