"""Whether a stage measured the engine, the load it names, and nothing else: each doubt is a sentence. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tuner.answer import Slo
from tuner.measure.steady import LITTLE_TOLERANCE
from tuner.records import EndedBy, Loop

MIN_SUCCESS_RATE = 0.99
MIN_OUTPUT_RATIO = 0.98
MAX_PROMPT_DEVIATION = 0.05
MAX_PREFIX_HIT_RATE = 0.01
MIN_COMPLETED = 5

CLIENT_BOUND = "client bound"
"""Begins every reason by which the load generator was the limit and not the engine."""

OTHERS = "others use this server"
"""Begins every reason by which the engine served more than our requests."""

ENGINE_TOLERANCE = 0.5
"""The engine's count of requests may be below the sender's by this share, or by two requests: it is scraped a few times
a second, and a request spends some of its time on the way."""

MAX_FOREIGN_SHARE = 0.05
"""Requests of others that are let pass, as a share of ours: they cost no more of a figure than that."""

MIN_FOREIGN = 0.5
"""Half a request always: several engines behind one server are not read at one moment."""

FOREIGN_AT_THE_ENDS = 3
"""Besides all that are in flight: so many more may have ended by the engine's count and not yet, or no more, by ours
where the window begins and where it ends."""

MAX_SLIP_SHARE = 0.05
"""Most of TTFT that may be the sender's own lateness, both at p95."""

MIN_SLIP_BOUND_MS = 2.0
"""Lateness that is never held against the sender: timers are whole milliseconds, and an operating system with more to
run than cores lets a thread wait for another's time slice."""

IMMATERIAL_SHARE = 0.02
"""Of a limit: so much lateness changes no verdict that the p95's own interval would not leave open."""

MAX_HELD_BACK = 0.05
"""Most of the users that the sender itself may keep from coming back from a pause."""

MAX_CPU_SHARE = 0.5
"""Of one core: the generator runs in one thread, and must be able to take in twice what it measured. It does: a chunk
costs it less the more there are (docs/lab.md), so that half a core used is at least as much again in hand."""

MIN_LAG_BOUND_MS = 5.0
MAX_LAG_SHARE = 0.20
"""The event loop may be late (p95) by a fifth of the median ITL or by 5 ms, the larger: a late loop stamps a token
late, and the next one then seems early. A lag of a fifth moves the p95 of gaps that scatter by a tenth or more by less
than 5 % (the sum of two distributions). What is below 5 ms is the operating system sharing its cores out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the judgement rests on. NaN: no sample; None: unknown."""

    load: int | float
    loop: Loop
    thinks: bool
    """Whether users pause between requests, so that fewer are in flight than there are users."""

    has_an_end: bool
    """Whether all there was to send is the window: a batch or a trace."""

    ended_by: EndedBy
    measured_s: float
    num_users_through: int
    """Users whose first request had ended when the window began."""

    is_filled: bool
    """Open loop: whether as many requests had ended by the window's begin as come in while one is served."""

    trend: bool
    """Whether one half of the window was clearly faster than the other."""

    ttft_drifts: bool
    """Whether requests waited clearly longer, or shorter, in the second half of the window."""

    num_completed: int
    num_failed: int
    num_rejected: int
    first_error: str | None
    num_estimated: int
    """Completed requests whose tokens were counted as one a chunk."""

    sent_prompt_tokens: float
    mean_prompt_tokens: float
    asked_output_tokens: float
    mean_output_tokens: float
    shared_prompt_share: float
    """Share of the prompt tokens that a prefix cache may know by the workload's design."""

    shared_prompt_share_error: float
    """Two standard errors of it: the engine counts other requests than those that ended in the window."""

    prefix_queries: int | None
    prefix_hits: int | None
    num_preemptions: int | None
    mean_in_flight: float
    littles_law_ratio: float | None
    mean_e2e_s: float
    engine_in_flight: float | None
    """Running and waiting, as the engine said on average."""

    foreign_in_flight: float | None
    """Of those, at most scrapes, that are not ours."""

    foreign_ended: int | None
    """Requests that ended in the window by the engine's counter and are not ours."""

    send_slip_p95_ms: float
    send_slip_p99_ms: float
    """Told and not judged: no verdict rests on a p99, and a late send counts in its request's TTFT."""

    mean_held_back: float
    """Users whose pause was over and whom the sender had not let send yet, on average."""

    loop_lag_p95_ms: float
    client_cpu_share: float | None
    """CPU time of the load generator over the window, as a share of it."""

    client_events_per_s: float
    limits: Slo | None
    """What the stage may be judged by."""

    ttft_p95_ms: float
    itl_p50_ms: float


def invalid_reasons(seen: Evidence) -> tuple[str, ...]:
    """Why the stage's figures are not to be used; empty for a valid stage."""
    return (*_ending(seen), *_answers(seen), *_workload(seen), *_consistency(seen), *_others(seen), *_client(seen))


def _ending(seen: Evidence) -> Iterator[str]:
    if seen.ended_by == "stalled":
        yield "stalled: requests were in flight, no token arrived, and the engine did not say that it did anything"
    if seen.ended_by == "failures":
        yield f"stopped early: too many of the latest requests failed, first with: {seen.first_error}"
    if _none_ended(seen):
        yield (
            f"no request finished in {seen.measured_s:.1f} s: give the stage more time (measure.max_time), "
            "or send shorter requests"
        )
    elif seen.loop == "closed" and seen.num_users_through < seen.load:
        yield (
            f"not steady: when warm-up ended, {seen.num_users_through} of {seen.load} users "
            "had seen the end of their first request"
        )
    elif seen.loop == "open" and not seen.is_filled and seen.ended_by in ("time", "precise"):
        yield (
            "not steady: measured before as many requests had ended as come in while one is served: "
            "give warm-up more time (measure.max_warm_up, --time)"
        )
    if seen.ended_by == "time" and seen.has_an_end:
        yield (
            f"not complete: after {seen.measured_s:.1f} s some of what was to be sent had not ended: "
            "give the stage more time"
        )
    if seen.has_an_end or seen.ended_by == "oversaturated":
        return
    if seen.trend:
        yield "not steady: tokens came clearly faster in one half of the window than in the other"
    if seen.ttft_drifts:
        yield "not steady: TTFT was clearly longer in one half of the window than in the other"


def _none_ended(seen: Evidence) -> bool:
    """Whether time was up before any request ended, well or badly: this says nothing about the engine."""
    return seen.ended_by == "time" and seen.num_completed + seen.num_failed + seen.num_rejected == 0


def _answers(seen: Evidence) -> Iterator[str]:
    num_ended = seen.num_completed + seen.num_failed
    if num_ended and seen.num_completed < MIN_SUCCESS_RATE * num_ended:
        yield (
            f"success rate {seen.num_completed / num_ended:.1%} ({seen.num_failed} of {num_ended} failed) is below "
            f"{MIN_SUCCESS_RATE:.0%}; first failure: {seen.first_error}"
        )
    fewest = max(MIN_COMPLETED, int(seen.load // 2)) if seen.loop == "closed" else MIN_COMPLETED
    if seen.loop == "batch":
        fewest = 1
    if seen.num_completed < fewest and not _none_ended(seen):
        yield f"too few requests: {seen.num_completed} completed, {fewest} are needed at load {seen.load}"
    if seen.num_estimated:
        yield f"token counts are estimated: the server gave none for {seen.num_estimated} requests"


def _workload(seen: Evidence) -> Iterator[str]:
    if seen.mean_output_tokens < MIN_OUTPUT_RATIO * seen.asked_output_tokens:
        yield (
            f"short outputs: {seen.mean_output_tokens:.1f} tokens on average where {seen.asked_output_tokens:.1f} "
            "were asked for"
        )
    if abs(seen.mean_prompt_tokens - seen.sent_prompt_tokens) > MAX_PROMPT_DEVIATION * seen.sent_prompt_tokens:
        yield (
            f"prompt length: the server counted {seen.mean_prompt_tokens:.1f} tokens on average where "
            f"{seen.sent_prompt_tokens:.1f} were sent"
        )
    if seen.prefix_queries and seen.prefix_hits is not None and not seen.num_preemptions:
        hit_rate = seen.prefix_hits / seen.prefix_queries
        if hit_rate >= seen.shared_prompt_share + seen.shared_prompt_share_error + MAX_PREFIX_HIT_RATE:
            yield (
                f"warm cache: {hit_rate:.1%} of the prompt tokens were prefix-cache hits though only "
                f"{seen.shared_prompt_share:.1%} are shared by design"
            )


def _consistency(seen: Evidence) -> Iterator[str]:
    if (
        seen.loop == "closed"
        and not seen.thinks
        and not seen.num_rejected
        and abs(seen.load - seen.mean_in_flight) > LITTLE_TOLERANCE * seen.load
    ):
        yield f"load not held: {seen.mean_in_flight:.2f} requests in flight on average where {seen.load} were to be"
    ratio = seen.littles_law_ratio
    tolerance = LITTLE_TOLERANCE + seen.mean_e2e_s / seen.measured_s
    if ratio is not None and seen.ended_by != "oversaturated" and abs(1 - ratio) > tolerance:
        yield (
            f"Little's law: throughput x latency is {ratio:.2f} of the {seen.mean_in_flight:.2f} requests in flight, "
            f"more than {tolerance:.0%} off"
        )
    inside = seen.engine_in_flight
    if inside is not None and seen.mean_in_flight - inside > max(2.0, ENGINE_TOLERANCE * seen.mean_in_flight):
        yield (
            f"another count: the engine had {inside:.2f} requests on average where {seen.mean_in_flight:.2f} "
            f"of ours were in flight, more than {ENGINE_TOLERANCE:.0%} fewer"
        )


def _others(seen: Evidence) -> Iterator[str]:
    """Requests that are not ours: what the engine does for them it does not do for us."""
    beside, ours = seen.foreign_in_flight, seen.mean_in_flight
    if beside is not None and beside > MIN_FOREIGN + MAX_FOREIGN_SHARE * ours:
        yield (f"{OTHERS}: {beside:g} requests running or waiting that are not ours, beside {ours:.2f} of ours")
        return
    ended, num_ours = seen.foreign_ended, seen.num_completed + seen.num_failed
    if ended is not None and ended > FOREIGN_AT_THE_ENDS + ours + MAX_FOREIGN_SHARE * num_ours:
        yield f"{OTHERS}: {ended} requests ended that are not ours, beside {num_ours} of ours"


def _client(seen: Evidence) -> Iterator[str]:
    """Where the sender's own lateness spoils a figure that is judged.

    A request that left late spoils TTFT, a late event loop spoils ITL, and users who were kept from coming back spoil
    the load. Each is compared with what it would spoil, and never counts below what an operating system's timers do,
    nor below a share of the limit that the figure is held against.
    """
    # Without a single first token there is nothing a late send could have spoilt: something else is wrong.
    has_ttft = not math.isnan(seen.ttft_p95_ms)
    limits = seen.limits
    ttft_limit_ms, itl_limit_ms = (0.0, 0.0) if limits is None else (limits.ttft_p95_ms, limits.itl_p95_ms)
    slip_ms = max(MIN_SLIP_BOUND_MS, MAX_SLIP_SHARE * seen.ttft_p95_ms, IMMATERIAL_SHARE * ttft_limit_ms)
    if has_ttft and seen.send_slip_p95_ms > slip_ms:
        yield (
            f"{CLIENT_BOUND}: requests left {seen.send_slip_p95_ms:.2f} ms late (p95; p99 {seen.send_slip_p99_ms:.2f} "
            f"ms), above {slip_ms:.2f} ms: the larger of {MAX_SLIP_SHARE:.0%} of the p95 TTFT of "
            f"{seen.ttft_p95_ms:.1f} ms, "
            f"{IMMATERIAL_SHARE:.0%} of its limit, and {MIN_SLIP_BOUND_MS:.2f} ms"
        )
    crowd = seen.load if seen.loop == "closed" else seen.mean_in_flight
    if seen.mean_held_back > MAX_HELD_BACK * crowd:
        yield (
            f"{CLIENT_BOUND}: {seen.mean_held_back:.1f} of {crowd:.3g} users on average were over their pause and not "
            "let send yet by the load generator"
        )
    if seen.client_cpu_share is not None and seen.client_cpu_share > MAX_CPU_SHARE:
        yield (
            f"{CLIENT_BOUND}: the load generator used {seen.client_cpu_share:.0%} of a core for "
            f"{seen.client_events_per_s:.0f} chunks a second and has {MAX_CPU_SHARE:.0%}, to be able to take in twice "
            "what it measures: measure at a lower load, or from a faster core"
        )
    lag_ms = max(MIN_LAG_BOUND_MS, MAX_LAG_SHARE * seen.itl_p50_ms, IMMATERIAL_SHARE * itl_limit_ms)
    if seen.loop_lag_p95_ms > lag_ms:
        yield (
            f"{CLIENT_BOUND}: the load generator's event loop ran {seen.loop_lag_p95_ms:.1f} ms late (p95), "
            f"above {lag_ms:.1f} ms: the larger of {MAX_LAG_SHARE:.0%} of the median ITL, {IMMATERIAL_SHARE:.0%} of "
            f"the limit of p95 ITL, and {MIN_LAG_BOUND_MS:.1f} ms"
        )
