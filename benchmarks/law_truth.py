"""What a simulated engine's law implies for a closed loop, worked out without a server or a clock.

The engine's own core runs over a clock that jumps from step to step, so that scheduler and law decide as they do behind
a server. A user whose answer ended sends the next request, which reaches the engine a moment later: after the next step
has begun, so that it is admitted to the one after it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle

import numpy as np

from engine.config import EngineConfig
from engine.core import Core, Submit
from engine.executor.clock import VirtualClock
from engine.executor.simulated import SimulatedExecutor
from engine.request import SamplingParams

ON_THE_WAY_S = 0.001
"""Between an answer's end and the next request's arrival. Any time well under a step gives the same schedule."""

BETWEEN_FIRST_SENDS_S = 0.0002
"""The first wave is sent at once and read one after the other."""

KNEE_ELASTICITY = 1 / 5.5
"""Elasticity of throughput at a knee with r = 4.5, where X^(1 + r) / N is largest."""


@dataclass(frozen=True, slots=True)
class Truth:
    """Figures of one load over a window."""

    output_throughput: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    itl_p50_ms: float
    itl_p95_ms: float


@dataclass(slots=True)
class _Sent:
    at_s: float
    num_output_tokens: int
    token_times_s: list[float]


def closed_loop(
    config: EngineConfig, lengths: Sequence[tuple[int, int]], *, load: int, start_s: float, end_s: float
) -> Truth:
    """Serve `load` users from time 0 on and look at a window.

    Args:
        lengths: (prompt, output) tokens of each request in the order in which they are sent; repeated where too few.
        start_s: of the window; the time before it is warm-up.
        end_s: of the window.
    """
    clock = VirtualClock()
    core = Core(SimulatedExecutor(config, clock=clock))
    drawn, numbers, sent = cycle(lengths), count(), dict[str, _Sent]()
    coming: list[tuple[float, str, Submit]] = []

    def send(at_s: float, arrives_s: float) -> None:
        name, (num_prompt, num_output) = f"{next(numbers):09d}", next(drawn)
        sent[name] = _Sent(at_s, num_output, [])
        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
        request = Submit(request_id=name, prompt_token_ids=_prompt(name, num_prompt), sampling=sampling)
        heapq.heappush(coming, (arrives_s, name, request))

    for user in range(load):
        send(0.0, ON_THE_WAY_S + user * BETWEEN_FIRST_SENDS_S)
    while clock.now_s() < end_s:
        if not core.has_work:
            clock.wait_until(coming[0][0])
        while coming and coming[0][0] <= clock.now_s():
            core.take(heapq.heappop(coming)[2])
        report = core.step()
        now_s = clock.now_s()
        for name in report.request_ids:
            sent[name].token_times_s.append(now_s)
        for _ in report.finished:
            send(now_s, now_s + ON_THE_WAY_S)
    return _figures(list(sent.values()), start_s, end_s)


def _prompt(name: str, num_tokens: int) -> tuple[int, ...]:
    """A prompt no other has: prefix caching finds nothing in it."""
    return tuple(np.random.default_rng(int(name)).integers(0, 256, num_tokens).tolist())


def _figures(sent: Sequence[_Sent], start_s: float, end_s: float) -> Truth:
    done = [each for each in sent if len(each.token_times_s) == each.num_output_tokens]
    ended = [each for each in done if start_s <= each.token_times_s[-1] < end_s]
    ttfts_ms = [1e3 * (each.token_times_s[0] - each.at_s) for each in ended]
    gaps_ms = [1e3 * gap for each in sent for gap in _gaps_s(each, start_s, end_s)]
    num_tokens = sum(start_s <= at_s < end_s for each in sent for at_s in each.token_times_s)
    return Truth(num_tokens / (end_s - start_s), *_percentiles(ttfts_ms), *_percentiles(gaps_ms))


def _gaps_s(each: _Sent, start_s: float, end_s: float) -> Iterator[float]:
    times = np.array(each.token_times_s)
    yield from np.diff(times)[(times[1:] >= start_s) & (times[1:] < end_s)]


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    p50, p95 = np.quantile(values, (0.5, 0.95), method="inverted_cdf")
    return float(p50), float(p95)


def best_load(throughput: dict[int, float]) -> int:
    """The load where X^5.5 / N is largest, of a whole curve: the knee."""
    return max(throughput, key=lambda load: throughput[load] ** (1 / KNEE_ELASTICITY) / load)
