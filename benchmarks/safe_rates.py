"""How honest the safe rate is on queues whose truth is known: `python -m benchmarks.safe_rates`, some ten minutes.

No server and no clock: a stage is what a sender would have seen of a simulated queue, judged by the rules a real stage
is judged by. `wrong` is the share of answers whose true p95 is over the limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing import Pool
from multiprocessing.pool import Pool as Processes

import numpy as np

from benchmarks.queues import QUEUES, Queue, Served, true_p95_s
from tuner.analysis.safe_rate import RateStage, SafeRate, safe_rate
from tuner.answer import Slo
from tuner.load.log import LoadLog
from tuner.measure import latency, saturation, steady
from tuner.measure.latency import Window
from tuner.measure.rate_judgement import arrivals_in, far_bounds, is_settled
from tuner.records import Estimate, RequestRecord

NO_LIMIT_MS = 1e12
BY_NAME = {queue.name: index for index, queue in enumerate(QUEUES)}
SHARES = (0.5, 0.7, 0.8, 0.9, 0.95)
TABLES = ("answers", "intervals")
MIN_REQUESTS = 120
LOOKS = 200
"""Moments at which a stage may be looked at; a real one is asked ten times a second."""


@dataclass(frozen=True, slots=True)
class Search:
    """How much a search may spend."""

    stage_requests: int
    """So many come in the longest stage at 0.8 of capacity."""

    most_stages: int
    relative_step: float


SEARCHES = {"bench": Search(1000, 6, 0.05), "short bench": Search(400, 6, 0.05), "tune": Search(1000, 3, 0.1)}


def log_of(served: Served) -> LoadLog:
    """All that a sender notes of these requests."""
    log = LoadLog()
    columns = (served.come_s.tolist(), served.ttft_s.tolist(), served.done_s.tolist())
    for index, (come_s, ttft_s, done_s) in enumerate(zip(*columns, strict=True)):
        log.records.append(
            RequestRecord(
                index=index,
                intended_s=come_s,
                sent_s=come_s,
                first_token_s=come_s + ttft_s,
                finished_s=done_s,
                token_times_s=(come_s + ttft_s, done_s),
                num_prompt_tokens=1,
                num_output_tokens=2,
                asked_output_tokens=2,
            )
        )
    log.records.sort(key=lambda record: record.finished_s)
    changes = [(at_s, +1) for at_s in columns[0]] + [(at_s, -1) for at_s in columns[2]]
    for at_s, change in sorted(changes):
        log.num_in_flight += change
        log.in_flight.step(at_s, log.num_in_flight)
    return log


def measured(queue: Queue, rate_rps: float, limit_s: float | None, longest_s: float, seed: Sequence[int]) -> RateStage:
    """A stage that begins idle, as a real one: warmed up, ended by the same rules; None is no limit to stop at."""
    rng = np.random.default_rng(seed)
    log = log_of(queue.serve(rate_rps, int(1.4 * longest_s * rate_rps) + 100, rng))
    ended, log.records = log.records, []
    start_s = _warm_s(ended, rate_rps)
    slo = Slo(ttft_p95_ms=NO_LIMIT_MS if limit_s is None else 1e3 * limit_s, itl_p95_ms=NO_LIMIT_MS)
    looks, growth = steady.Looks(MIN_REQUESTS / rate_rps), steady.Looks(saturation.FEWEST_S)
    grows = False
    for number in range(1, LOOKS + 1):
        end_s, last = start_s + longest_s * number / LOOKS, number == LOOKS
        window = Window(start_s, end_s)
        saturated, due = growth.is_due(window.length_s, request_s=0.0), looks.is_due(window.length_s, request_s=0.0)
        if not (saturated or due or last):
            continue
        log.records = [record for record in ended if record.finished_s < end_s]
        inside = latency.finished_inside(log.records, window)
        grows = saturated and limit_s is not None and saturation.is_oversaturated(log, window)
        enough = due and limit_s is not None and len(inside) >= MIN_REQUESTS
        if grows or last or (enough and is_settled(log, inside, window, slo)):
            break
    times_s = [record.intended_s for record in ended]
    seen = arrivals_in(log, window, times_s)
    ttft = [1e3 * latency.ttft_s(record) for record in sorted(inside, key=latency.by_time)]
    sent_rps = min(rate_rps, seen.sent_rps)
    return RateStage(
        rate_rps=rate_rps,
        shown_rps=sent_rps * seen.share_shown,
        sent_rps=sent_rps,
        ttft_p95_far_ms=far_bounds(inside, window, num_states=seen.num_states).ttft_p95_ms,
        itl_p95_far_ms=0.0,
        ttft_p95_ms=latency.dependent_percentile(ttft, 0.95),
        itl_p95_ms=Estimate(value=0.0, low=0.0, high=0.0, num_samples=len(inside)),
        oversaturated=grows,
    )


def _warm_s(ended: Sequence[RequestRecord], rate_rps: float) -> float:
    """When as many requests have ended as come in while one is served."""
    total_s = 0.0
    for number, record in enumerate(ended, start=1):
        total_s += latency.e2e_s(record)
        if number >= max(5.0, rate_rps * total_s / number):
            return record.finished_s
    return ended[-1].finished_s


def searched(queue: Queue, limit_s: float, search: Search, seed: int) -> tuple[SafeRate, int]:
    """A whole search and its number of stages."""
    stages: list[RateStage] = []
    slo = Slo(ttft_p95_ms=1e3 * limit_s, itl_p95_ms=NO_LIMIT_MS)
    longest_s = search.stage_requests / (0.8 * queue.capacity_rps)
    while True:
        found = safe_rate(
            stages,
            slo,
            ceiling_rps=queue.capacity_rps,
            most_stages=search.most_stages,
            relative_step=search.relative_step,
        )
        if found.next_rps is None:
            return found, len(stages)
        longest = max(longest_s, 1.5 * MIN_REQUESTS / found.next_rps)
        stages.append(measured(queue, found.next_rps, limit_s, longest, (seed, len(stages))))


def answers(case: tuple[int, str, float, int]) -> tuple[float | None, int]:
    """The safe rate as a share of the true one, None for no answer, and the stages it took."""
    queue_index, name, share, seed = case
    queue = QUEUES[queue_index]
    found, count = searched(queue, true_p95_s(queue, share), SEARCHES[name], seed)
    return (None if found.rate_rps is None else found.rate_rps / queue.capacity_rps / share), count


def holds(case: tuple[int, float, int, int]) -> tuple[bool, bool] | None:
    """Whether a fixed stage's interval holds the true p95, and whether it lies below; None for no interval."""
    queue_index, share, requests, seed = case
    queue = QUEUES[queue_index]
    rate_rps, true_ms = share * queue.capacity_rps, 1e3 * true_p95_s(queue, share)
    found = measured(queue, rate_rps, None, requests / rate_rps, (seed, 7)).ttft_p95_ms
    if found.low is None or found.high is None:
        return None
    return found.low <= true_ms <= found.high, found.high < true_ms


def main() -> None:
    """Print both tables, or a part of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=TABLES, nargs="+", default=TABLES)
    parser.add_argument("--queues", choices=list(BY_NAME), nargs="+", default=list(BY_NAME))
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--searches", choices=list(SEARCHES), nargs="+", default=list(SEARCHES))
    parser.add_argument("--runs", type=int, default=100)
    asked = parser.parse_args()
    with Pool() as pool:
        if "answers" in asked.table:
            _print_answers(pool, asked.queues, asked.shares, asked.searches, asked.runs)
        if "intervals" in asked.table:
            _print_intervals(pool, asked.queues, asked.shares, asked.runs)


def _print_answers(
    pool: Processes, queues: Sequence[str], shares: Sequence[float], searches: Sequence[str], num_runs: int
) -> None:
    print("| queue | true safe share of capacity | search | answered | wrong | median of the true rate | stages |")
    print("| --- " * 7 + "|")
    for queue, share, search in product(queues, shares, searches):
        made = pool.map(answers, [(BY_NAME[queue], search, share, seed) for seed in range(num_runs)])
        given = [rate for rate, _ in made if rate is not None]
        print(
            f"| {queue} | {share:g} | {search} | {len(given)} of {num_runs} | {sum(rate > 1 for rate in given)} "
            f"| {np.median(given) if given else 0:.2f} | {np.mean([count for _, count in made]):.1f} |",
            flush=True,
        )


def _print_intervals(pool: Processes, queues: Sequence[str], shares: Sequence[float], num_runs: int) -> None:
    print("| queue | share of capacity | requests | has an interval | holds the truth | of all, lies below it |")
    print("| --- " * 6 + "|")
    for queue, share, requests in product(queues, shares, (500, 2000, 8000)):
        each = pool.map(holds, [(BY_NAME[queue], share, requests, seed) for seed in range(num_runs)])
        told = [found for found in each if found is not None]
        print(
            f"| {queue} | {share:g} | {requests} | {len(told) / num_runs:.0%} "
            f"| {np.mean([inside for inside, _ in told]) if told else 0:.0%} "
            f"| {sum(below for _, below in told) / num_runs:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
