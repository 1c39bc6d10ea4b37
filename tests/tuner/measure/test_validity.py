"""Each way in which a stage measures something else than the engine is named with its figures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tuner.answer import Slo
from tuner.measure.validity import Evidence, invalid_reasons

LIMITS = Slo(ttft_p95_ms=500.0, itl_p95_ms=500.0)

SOUND = Evidence(
    load=8,
    loop="closed",
    thinks=False,
    has_an_end=False,
    ended_by="precise",
    measured_s=20.0,
    num_users_through=8,
    is_filled=True,
    trend=False,
    ttft_drifts=False,
    num_completed=200,
    num_failed=0,
    num_rejected=0,
    first_error=None,
    num_estimated=0,
    sent_prompt_tokens=1000.0,
    mean_prompt_tokens=1027.0,
    asked_output_tokens=2048.0,
    mean_output_tokens=2048.0,
    shared_prompt_share=0.0,
    shared_prompt_share_error=0.0,
    prefix_queries=10_000,
    prefix_hits=50,
    num_preemptions=0,
    mean_in_flight=7.99,
    littles_law_ratio=0.99,
    mean_e2e_s=0.8,
    engine_in_flight=8.3,
    foreign_in_flight=0.0,
    foreign_ended=2,
    send_slip_p95_ms=0.3,
    send_slip_p99_ms=7.25,
    mean_held_back=0.0,
    limits=None,
    loop_lag_p95_ms=1.0,
    client_cpu_share=0.12,
    client_events_per_s=1400.0,
    ttft_p95_ms=120.0,
    itl_p50_ms=10.0,
)


def test_a_sound_stage_is_valid() -> None:
    """A rule that fires on good stages leaves nothing to find a knee in."""
    assert invalid_reasons(SOUND) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_failed": 3, "first_error": "cut stream"}, ["98.5%", "3 of 203", "99%", "cut stream"]),
        ({"num_completed": 0, "num_failed": 200, "first_error": "refused"}, ["0.0%", "refused"]),
        ({"num_completed": 4}, ["4 completed", "5 are needed"]),
        ({"load": 64, "num_users_through": 64, "mean_in_flight": 64.0, "num_completed": 31}, ["31", "32 are needed"]),
        ({"mean_output_tokens": 300.0}, ["short outputs", "300.0", "2048.0"]),
        ({"mean_prompt_tokens": 5128.0}, ["5128.0", "1000.0"]),
        ({"prefix_hits": 100}, ["warm cache", "1.0%"]),
        ({"prefix_hits": 100, "num_preemptions": None}, ["warm cache"]),
        ({"littles_law_ratio": 0.85}, ["Little", "0.85", "7.99"]),
        ({"foreign_in_flight": 1.0}, ["others use this server: 1 requests", "7.99 of ours"]),
        (
            {
                "load": 1,
                "num_users_through": 1,
                "mean_in_flight": 1.0,
                "engine_in_flight": 2.0,
                "foreign_ended": 20,
                "num_completed": 20,
            },
            ["others use this server: 20 requests ended", "beside 20 of ours"],
        ),
        ({"engine_in_flight": 3.0}, ["3.00", "7.99"]),
        (
            {"ended_by": "time", "num_completed": 0, "num_users_through": 0, "littles_law_ratio": None},
            ["no request finished in 20.0 s", "measure.max_time"],
        ),
        ({"mean_in_flight": 5.4, "engine_in_flight": None}, ["load not held", "5.40", "8"]),
        ({"send_slip_p95_ms": 6.1}, ["client bound", "6.10", "p99 7.25", "120.0"]),
        ({"loop_lag_p95_ms": 5.5}, ["client bound", "5.5", "5.0"]),
        ({"client_cpu_share": 0.61, "client_events_per_s": 41000.0}, ["client bound", "61%", "41000", "50%"]),
        ({"ttft_p95_ms": 5.0, "send_slip_p95_ms": 2.1}, ["client bound", "2.10", "5.0", "2.00 ms"]),
        ({"send_slip_p95_ms": 10.5, "limits": LIMITS}, ["client bound", "10.50", "10.00 ms", "2% of its limit"]),
        ({"loop_lag_p95_ms": 10.1, "limits": LIMITS}, ["client bound", "10.1", "10.0 ms"]),
        ({"mean_held_back": 0.5}, ["client bound", "0.5 of 8"]),
        ({"loop": "open", "load": 4.5, "mean_held_back": 0.5}, ["client bound", "0.5 of 7.99"]),
        ({"num_users_through": 7}, ["not steady", "7 of 8"]),
        ({"trend": True}, ["not steady"]),
        ({"ttft_drifts": True}, ["not steady: TTFT"]),
        ({"ended_by": "stalled"}, ["stalled"]),
        ({"ended_by": "failures", "first_error": "HTTP 500"}, ["HTTP 500"]),
        ({"num_estimated": 3}, ["estimated", "3 requests"]),
        ({"loop": "open", "num_completed": 4}, ["4 completed", "5 are needed"]),
        ({"loop": "open", "trend": True}, ["not steady"]),
        ({"loop": "open", "ended_by": "time", "is_filled": False}, ["not steady", "measure.max_warm_up"]),
        ({"loop": "open", "send_slip_p95_ms": 6.1}, ["client bound", "6.10", "120.0"]),
        ({"loop": "open", "littles_law_ratio": 0.85}, ["Little", "0.85"]),
        ({"loop": "open", "has_an_end": True, "ended_by": "time"}, ["not complete", "20.0 s"]),
        ({"loop": "batch", "has_an_end": True, "ended_by": "complete", "num_failed": 9}, ["success rate"]),
        ({"shared_prompt_share": 0.5, "prefix_hits": 5200}, ["warm cache", "52.0%", "50.0%"]),
    ],
)
def test_each_doubt_is_a_sentence_with_its_figures(change: dict[str, Any], words: list[str]) -> None:
    """Who reads "invalid" must see what was measured and what was expected."""
    reasons = invalid_reasons(replace(SOUND, **change))
    assert reasons
    assert all(any(word in reason for reason in reasons) for word in words), reasons


@pytest.mark.parametrize(
    "change",
    [
        {"num_failed": 2},
        {"prefix_hits": 5000, "num_preemptions": 4},
        {"prefix_hits": None, "prefix_queries": None},
        {"prefix_queries": 0, "prefix_hits": 0},
        {"num_rejected": 50, "mean_in_flight": 5.0, "engine_in_flight": 5.5},
        {"loop_lag_p95_ms": 15.0, "itl_p50_ms": 80.0},
        {"littles_law_ratio": None},
        {"ttft_p95_ms": 5.0, "send_slip_p95_ms": 1.9},
        {"loop": "open", "ttft_p95_ms": 20.0, "send_slip_p95_ms": 9.5, "limits": LIMITS},
        {"loop_lag_p95_ms": 9.9, "limits": LIMITS},
        {"loop_lag_p95_ms": 1e3 * math.nan, "send_slip_p95_ms": math.nan},
        {"thinks": True, "mean_in_flight": 0.1, "engine_in_flight": 0.1, "mean_held_back": 0.3},
        {"client_cpu_share": 0.49},
        {"client_cpu_share": None},
        {"littles_law_ratio": 0.7, "mean_e2e_s": 5.0},
        {"engine_in_flight": None, "foreign_in_flight": None, "foreign_ended": None},
        {"foreign_ended": 20},
        {"foreign_in_flight": 0.5},
        {
            "mean_in_flight": 64.0,
            "load": 64,
            "num_users_through": 64,
            "engine_in_flight": 67.0,
            "foreign_in_flight": 3.0,
        },
        {"load": 1, "num_users_through": 1, "mean_in_flight": 1.0, "engine_in_flight": 0.4},
        {"loop": "open", "load": 0.25, "num_users_through": 0, "num_completed": 5},
        {"loop": "open", "load": 400.5, "num_users_through": 3},
        {"loop": "open", "ended_by": "oversaturated", "is_filled": False},
        {"loop": "open", "ended_by": "oversaturated", "trend": True, "ttft_drifts": True, "littles_law_ratio": 0.6},
        {"loop": "open", "has_an_end": True, "ended_by": "complete", "trend": True, "ttft_drifts": True},
        {"loop": "batch", "has_an_end": True, "ended_by": "complete", "load": 2, "num_completed": 2},
        {"thinks": True, "mean_in_flight": 3.0, "engine_in_flight": 3.2},
        {"shared_prompt_share": 0.5, "prefix_hits": 5090},
        {"shared_prompt_share": 0.25, "shared_prompt_share_error": 0.1, "prefix_hits": 3500},
    ],
)
def test_what_is_allowed_stays_valid(change: dict[str, Any]) -> None:
    """Recomputed prefixes after a preemption, refusals by a valve, and a slow engine's coarser clock are no faults."""
    assert invalid_reasons(replace(SOUND, **change)) == ()


def test_a_dead_server_is_not_the_load_generators_fault() -> None:
    """Without one first token there is no TTFT that a late send could have spoilt: the error says why."""
    dead = replace(SOUND, num_completed=0, num_failed=20, first_error="refused", ttft_p95_ms=math.nan)
    reasons = invalid_reasons(replace(dead, send_slip_p95_ms=1.3))
    assert any("refused" in reason for reason in reasons)
    assert not any("client bound" in reason for reason in reasons)
