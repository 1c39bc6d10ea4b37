"""Queues whose true percentiles are known from very long runs: what a sender would see of them. Times in seconds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from tuner.measure.latency import Floats

LONG_RUN = 200_000
"""Requests of a run that a true p95 is taken from, a hundredth of them before it is settled."""


@dataclass(frozen=True, slots=True)
class Served:
    """Requests in the order in which they came; each array has shape (requests,)."""

    come_s: Floats
    ttft_s: Floats
    done_s: Floats


@dataclass(frozen=True, slots=True)
class Queue:
    """A server, by what it makes of a number of requests at a rate."""

    name: str
    capacity_rps: float
    serve: Callable[[float, int, np.random.Generator], Served]


def many_servers(servers: int, *, spread: float) -> Callable[[float, int, np.random.Generator], Served]:
    """Places that each serve one request at a time, a second on average: M/G/c with log-normal times, M/M/1 for one.

    Args:
        servers: how many places.
        spread: standard deviation of the logarithm of a service time; 0 is exponential instead.
    """

    def serve(rate_rps: float, count: int, rng: np.random.Generator) -> Served:
        come_s = np.cumsum(rng.exponential(1 / rate_rps, count))
        times_s = rng.lognormal(-(spread**2) / 2, spread, count) if spread else rng.exponential(1.0, count)
        free, begun_s = [0.0] * servers, np.empty(count)
        for index, (at_s, takes_s) in enumerate(zip(come_s.tolist(), times_s.tolist(), strict=True)):
            begun_s[index] = begins_s = max(at_s, heapq.heappop(free))
            heapq.heappush(free, begins_s + takes_s)
        prefill_s = np.minimum(0.1 * rng.gamma(4, 0.25, count), times_s)
        return Served(come_s, begun_s - come_s + prefill_s, begun_s + times_s)

    return serve


def batching_engine(rate_rps: float, count: int, rng: np.random.Generator) -> Served:
    """Steps of 20 ms, 1 ms a running request and 6 ms a prompt; 24 to 40 tokens a request; fence 32."""
    come_s = np.cumsum(rng.exponential(1 / rate_rps, count))
    tokens, arrived = rng.integers(24, 41, count).tolist(), come_s.tolist()
    now_s, step, admitted = 0.0, 0, 0
    running: list[tuple[int, int]] = []
    first_s, done_s = np.empty(count), np.empty(count)
    while admitted < count or running:
        if not running:
            now_s = max(now_s, arrived[admitted])
        before = admitted
        while admitted < count and arrived[admitted] <= now_s and len(running) < 32 and admitted - before < 4:
            heapq.heappush(running, (step + tokens[admitted], admitted))
            admitted += 1
        now_s += 0.02 + 0.001 * len(running) + 0.006 * (admitted - before)
        step += 1
        first_s[before:admitted] = now_s
        while running and running[0][0] <= step:
            done_s[heapq.heappop(running)[1]] = now_s
    return Served(come_s, first_s - come_s, done_s)


QUEUES = (
    Queue("M/M/1", 1.0, many_servers(1, spread=0.0)),
    Queue("M/G/16", 16.0, many_servers(16, spread=0.6)),
    Queue("batching engine", 17.2, batching_engine),
)


@cache
def true_p95_s(queue: Queue, share: float) -> float:
    """p95 TTFT of an endless stage at this share of capacity, rounded to hundredths."""
    served = queue.serve(share * queue.capacity_rps, LONG_RUN, np.random.default_rng(99))
    return float(np.quantile(served.ttft_s[LONG_RUN // 100 :], 0.95))


def true_p95_at_s(queue: Queue, share: float) -> float:
    """As `true_p95_s` for any share, straight between twentieths on a logarithmic scale."""
    low = math.floor(20 * share) / 20
    ends = [math.log(true_p95_s(queue, round(each, 2))) for each in (max(0.05, low), min(0.98, low + 0.05))]
    return math.exp(float(np.interp(share, (max(0.05, low), min(0.98, low + 0.05)), ends)))
