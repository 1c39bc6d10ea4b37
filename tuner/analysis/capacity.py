"""How much one replica holds with enough requests inside the SLO, and how many replicas an expected load needs.

A request is inside where it met both limits by its own TTFT and TPOT; the load or rate up to which a given share of
requests is inside is what DistServe (Zhong et al. 2024) ranks by and calls goodput. A share counted on n requests has
Wilson's interval (Wilson 1927), which stays inside 0 to 1 and does not collapse at either end:

    centre = (p + z^2 / 2n) / (1 + z^2 / n),    half width = z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n)

One rule for loads and rates: a share is shown where the interval's lower end is at the target or above, surely missed
where its upper end is below, and open in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuner.answer import Capacity, Expected, Profile, Slo
from tuner.measure import latency
from tuner.records import Estimate, RequestRecord

_Z = 1.959964
"""97.5 % quantile of the normal distribution: 95 % intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """How many of a stage's requests were inside the SLO."""

    load: float
    """Concurrent requests of a closed loop, requests per second of an open one."""

    num_inside: int
    num_requests: int
    """Those that ended in the window, failed and refused ones included."""

    oversaturated: bool = False
    """Whether requests came faster than they were served: the share then depends on how long that went on."""

    @property
    def share(self) -> Estimate:
        """The share inside, 0 to 1, with Wilson's interval; NaN where no request ended."""
        if self.num_requests == 0:
            return Estimate(value=math.nan, num_samples=0)
        low, high = wilson_interval(self.num_inside, self.num_requests)
        value = self.num_inside / self.num_requests
        return Estimate(value=value, low=low, high=high, num_samples=self.num_requests)


def wilson_interval(num_inside: int, num_requests: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share counted on at least one request."""
    share, n = num_inside / num_requests, num_requests
    spread = 1 + _Z**2 / n
    centre = (share + _Z**2 / (2 * n)) / spread
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2)) / spread
    return max(0.0, centre - half), min(1.0, centre + half)


def is_inside(request: RequestRecord, slo: Slo) -> bool:
    """Whether a request met both limits by its own TTFT and TPOT; a single token has no gap to be late."""
    if request.error is not None or request.rejected or request.first_token_s is None:
        return False
    tpot_s = latency.tpot_s(request) or 0.0
    return 1e3 * latency.ttft_s(request) <= slo.ttft_p95_ms and 1e3 * tpot_s <= slo.itl_p95_ms


def attainment(load: float, requests: Sequence[RequestRecord], slo: Slo, *, oversaturated: bool = False) -> Attainment:
    """Count a stage's requests. Warm-up and what was still in flight at the end do not count."""
    ended = [request for request in requests if not request.warm_up and not request.unfinished]
    num_inside = sum(is_inside(request, slo) for request in ended)
    return Attainment(load=load, num_inside=num_inside, num_requests=len(ended), oversaturated=oversaturated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far a target reaches along loads or rates."""

    shown: Attainment | None = None
    """The largest that was shown to have the target."""

    open_up_to: Attainment | None = None
    """The largest above it that may have it: its requests are too few to say."""


def reach(attained: Sequence[Attainment], target: float) -> Reach:
    """How far at least `target` of the requests are inside, below the first load that surely has fewer.

    Repeats of a load are counted together. One that falls short by luck does not end the search; an oversaturated one
    does, as a queue without end keeps no limit.
    """
    found = Reach()
    for each in _merged(attained):
        if each.oversaturated or (each.share.high or 0.0) < target:
            break
        is_shown = (each.share.low or 0.0) >= target
        found = Reach(shown=each) if is_shown else Reach(shown=found.shown, open_up_to=each)
    return found


def _merged(attained: Sequence[Attainment]) -> list[Attainment]:
    """One a load, in rising order, without those that had no request.

    Of a load that was oversaturated once and settled another time, what it was when it settled.
    """
    groups: dict[float, list[Attainment]] = {}
    for each in sorted(attained, key=lambda one: one.load):
        if each.oversaturated or each.num_requests:
            groups.setdefault(each.load, []).append(each)
    return [_sum([each for each in group if not each.oversaturated] or group) for group in groups.values()]


def _sum(repeats: Sequence[Attainment]) -> Attainment:
    num_inside, num_requests = sum(one.num_inside for one in repeats), sum(one.num_requests for one in repeats)
    return replace(repeats[0], num_inside=num_inside, num_requests=num_requests)


def capacity(
    production: Profile,
    *,
    closed: Sequence[Attainment],
    open_: Sequence[Attainment],
    target: float,
    request_rate_rps: Estimate,
    safe_rate_rps: Estimate | None = None,
    expected: Expected | None = None,
    price_per_device_hour: float | None = None,
    mean_output_tokens: float = math.nan,
) -> Capacity:
    """What one replica of production holds, and what an expected load takes.

    Args:
        closed: what concurrent requests meet under production's fence.
        open_: stages under a rate, by requests per second.
        target: share of requests that must be inside the SLO.
        request_rate_rps: completions a second at production's operating point.
        safe_rate_rps: the highest rate that was measured safe, where it was.
    """
    loads, rates = reach(closed, target), reach(open_, target)
    replicas, reason = None, None
    if expected is not None:
        none_safe = bool(open_) and safe_rate_rps is None
        if none_safe and expected.users is None:
            tried = min(attained.load for attained in open_)
            reason = f"how many replicas it takes is unknown: no rate was safe, down to {tried:.3g} requests/s"
        else:
            replicas, reason = _replicas(production, request_rate_rps, safe_rate_rps, expected)
    return Capacity(
        attainment_target=target,
        load=None if loads.shown is None else round(loads.shown.load),
        load_share=None if loads.shown is None else loads.shown.share,
        open_load=None if loads.open_up_to is None else round(loads.open_up_to.load),
        rate_rps=None if rates.shown is None else rates.shown.load,
        rate_share=None if rates.shown is None else rates.shown.share,
        open_rate_rps=None if rates.open_up_to is None else rates.open_up_to.load,
        replicas=replicas,
        reason=reason,
        cost_per_million_tokens=_cost(production, price_per_device_hour, expected, replicas, mean_output_tokens),
    )


def _replicas(production: Profile, rate: Estimate, safe: Estimate | None, expected: Expected) -> tuple[int | None, str]:
    """The larger of what the rate and what the concurrency asks for; one sentence with its figures."""
    seats = production.config.fence
    if expected.users is not None:
        by_seats = math.ceil(expected.users / seats)
        return by_seats, f"{by_seats} replicas: {expected.users} users at {seats} running requests each"
    wanted = expected.rate_rps or 0.0
    measured = safe or rate
    bound = measured.low if measured.low is not None else measured.value
    if not bound > 0:
        return None, f"how many replicas {wanted:g} requests/s take is unknown: no rate of production is known"
    by_rate = math.ceil(wanted / bound)
    in_flight = wanted * production.operating_point.load / rate.value if rate.value > 0 else math.nan
    by_seats = math.ceil(in_flight / seats) if math.isfinite(in_flight) else 0
    source = (
        f"the safe rate of at least {bound:.3g} requests/s"
        if safe is not None
        else f"at least {bound:.3g} requests/s at the closed-loop operating point, critical load in an open loop"
    )
    replicas = max(by_rate, by_seats)
    return replicas, (
        f"{replicas} replicas for {wanted:g} requests/s: {by_rate} by {source}, "
        f"{by_seats} by {in_flight:.3g} requests in flight at {seats} running each"
    )


def _cost(
    production: Profile,
    price: float | None,
    expected: Expected | None,
    replicas: int | None,
    mean_output_tokens: float,
) -> float | None:
    """Price of a million output tokens: at the expected rate where one is given, else with every replica full."""
    if price is None:
        return None
    devices = production.config.num_devices
    tokens_per_s = production.operating_point.output_throughput.value
    if expected is not None and expected.rate_rps is not None and replicas is not None:
        devices, tokens_per_s = devices * replicas, expected.rate_rps * mean_output_tokens
    cost = price * devices / 3600 / tokens_per_s * 1e6
    return cost if math.isfinite(cost) else None
