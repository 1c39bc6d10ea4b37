"""What saturates is read off the stages around the bend, or not claimed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fakes import records
from tests.tuner.analysis.steps import BANDWIDTH, COMPUTE, Law
from tuner.analysis.diagnosis import binding, diagnose
from tuner.answer import KneeFinding, LadderVerdict
from tuner.records import StageRecord, StepFigures

KNEE = KneeFinding(verdict=LadderVerdict.KNEE, load=16.0)
PAST = 32


def _ladder(law: Law, **change: Any) -> list[StageRecord]:
    """The law's ladder, the stage past the knee changed."""
    return [stage.model_copy(update=change) if stage.load == PAST else stage for stage in law.ladder()]


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({}, "compute"),
        ({"num_preemptions": 3}, "kv_blocks"),
        ({"kv_cache_usage_peak": 0.99}, "kv_blocks"),
        ({"mean_running": 12.0, "mean_waiting": 12.0, "steps": None}, "token_budget"),
        (
            {"mean_running": 12.0, "mean_waiting": 12.0, "steps": StepFigures(mean_tokens=990, per_s=10)},
            "token_budget",
        ),
        ({"mean_running": 12.0, "mean_waiting": 12.0, "steps": StepFigures(mean_tokens=90, per_s=10)}, None),
        ({"mean_running": 62.0, "mean_waiting": 12.0}, "fence"),
        ({"mean_running": 12.0, "mean_waiting": 12.0, "mean_waiting_deferred": 11.0}, "compute"),
        ({"process_cpu_cores": (0.97, 0.6)}, "server_cpu"),
        ({"process_cpu_cores": (0.97,)}, "compute"),
        ({"process_cpu_cores": (0.3, 0.99)}, "compute"),
        ({"steps": StepFigures(mean_tokens=160, per_s=20, model_share=0.3)}, "server_cpu"),
        ({"kv_cache_usage_peak": None}, None),
        ({"num_preemptions": None}, None),
        ({"mean_waiting": None}, None),
    ],
)
def test_each_bottleneck_shows_past_the_bend(change: dict[str, Any], answer: str | None) -> None:
    """The stage past the knee tells the bottlenecks apart; unknown figures tell nothing."""
    finding = diagnose(_ladder(COMPUTE, **change), KNEE, records.CHOSEN, COMPUTE.facts())

    assert finding.binding == answer
    assert finding.evidence


def test_computing_and_reading_are_told_apart_by_the_unloaded_engine() -> None:
    """Two engines with nothing waiting and KV blocks free: only one of them gains from a narrower KV cache."""
    assert binding(COMPUTE.ladder(), KNEE, records.CHOSEN, COMPUTE.facts()) == "compute"
    assert binding(BANDWIDTH.ladder(), KNEE, records.CHOSEN, BANDWIDTH.facts()) == "memory_bandwidth"


def test_without_the_sizes_bandwidth_is_not_claimed() -> None:
    """A server that does not say how large its weights are: what is not computing may be its own work."""
    assert binding(BANDWIDTH.ladder(), KNEE, records.CHOSEN) is None
    assert binding(COMPUTE.ladder(), KNEE, records.CHOSEN) == "compute"
    assert binding(COMPUTE.ladder()[1:], KNEE, records.CHOSEN, COMPUTE.facts()) is None


def test_steps_that_take_no_longer_do_not_saturate() -> None:
    """A decode step that only reads weights is free to hold more requests: the cause is elsewhere."""
    finding = diagnose(Law(base_ms=2, token_ms=0.001, weights_ms=20, context_ms=0.001).ladder(), KNEE, records.CHOSEN)
    assert finding.binding is None
    assert "free" in finding.evidence[-1]


def test_a_noisy_neighbour_does_not_make_steps_look_free() -> None:
    """Refinement puts stages close together; one that was slow by chance must not hide that a doubling costs."""
    slow = COMPUTE.stage(16)
    assert slow.steps is not None
    slow = slow.model_copy(update={"steps": slow.steps.model_copy(update={"per_s": slow.steps.per_s / 2.2})})
    near = slow.model_copy(update={"load": 28})
    finding = diagnose(
        [*COMPUTE.ladder(), near], KNEE.model_copy(update={"load": 28.0}), records.CHOSEN, COMPUTE.facts()
    )
    assert finding.binding == "compute"
    assert "at load 16 and" in finding.evidence[1]


@given(
    base=st.floats(0, 30),
    token=st.floats(0.001, 2),
    weights=st.floats(0.5, 50),
    context=st.floats(0.001, 2),
    prompt=st.integers(8, 4000),
    output=st.integers(8, 2000),
    overlap=st.booleans(),
)
def test_neither_roof_is_claimed_where_the_other_is_higher(
    *, base: float, token: float, weights: float, context: float, prompt: int, output: int, overlap: bool
) -> None:
    """Whatever the law, a named bottleneck is the larger part of the step: nobody buys the wrong device."""
    law = Law(
        base_ms=base,
        token_ms=token,
        weights_ms=weights,
        context_ms=context,
        prompt=prompt,
        output=output,
        overlap=overlap,
    )
    answer = binding(law.ladder(), KNEE, records.CHOSEN, law.facts())
    assume(answer is not None)
    if answer == "compute":
        assert law.computing_ms(PAST) >= 0.999 * law.reading_ms(PAST)
    else:
        assert answer == "memory_bandwidth"
        assert law.reading_ms(PAST) >= 0.999 * law.computing_ms(PAST)


def test_verdicts_without_a_bend() -> None:
    """A fence is named as our own limit, with its figures; an unfinished ladder has no bottleneck yet."""
    fenced = diagnose(COMPUTE.ladder(), KneeFinding(verdict=LadderVerdict.FENCED), records.CHOSEN)
    assert fenced.binding == "fence"
    assert "the fence of 64" in fenced.evidence[0]
    assert binding(COMPUTE.ladder(), KneeFinding(verdict=LadderVerdict.NOT_REACHED), records.CHOSEN) is None
    saturated = KneeFinding(verdict=LadderVerdict.ALREADY_SATURATED)
    heavy = Law(token_ms=5.0, weights_ms=4, context_ms=0.05)
    assert binding(heavy.ladder(), saturated, records.CHOSEN, heavy.facts()) == "compute"
    assert binding([], KNEE, records.CHOSEN) is None


def test_a_ladder_that_ends_at_the_client_says_so() -> None:
    """The curve stops where the load generator does: more load from one machine would show nothing of the engine."""
    late = {"valid": False, "invalid_reasons": ("client bound: requests left 80.00 ms late (p95)",)}
    ladder = [stage.model_copy(update=late) if stage.load >= PAST else stage for stage in COMPUTE.ladder()]
    finding = diagnose(ladder, KneeFinding(verdict=LadderVerdict.NOT_REACHED), records.CHOSEN)
    assert finding.binding == "client"
    assert "80.00 ms late" in finding.evidence[0]
    assert "beyond load 16" in finding.evidence[0]


def test_a_server_that_others_use_is_not_the_clients_fault() -> None:
    """Where somebody else's load spoilt the stages, a faster client would change nothing."""
    reasons = ("others use this server: 4 requests running", "client bound: requests left 80.00 ms late (p95)")
    ladder = [stage.model_copy(update={"valid": False, "invalid_reasons": reasons}) for stage in COMPUTE.ladder()]
    finding = diagnose(ladder, KneeFinding(verdict=LadderVerdict.TOO_FEW_STAGES), records.CHOSEN)
    assert finding.binding is None
    late = [stage.model_copy(update={"invalid_reasons": reasons[1:]}) for stage in ladder]
    told = diagnose(late, KneeFinding(verdict=LadderVerdict.TOO_FEW_STAGES), records.CHOSEN)
    assert told.binding == "client"
    assert "from the first load on" in told.evidence[0]


def test_an_old_record_without_steps_is_still_read() -> None:
    """A run measured before steps were counted keeps its diagnosis: throughput and lengths say what was computed."""
    ladder = [stage.model_copy(update={"steps": None}) for stage in COMPUTE.ladder()]
    assert binding(ladder, KNEE, records.CHOSEN, COMPUTE.facts()) == "compute"
    dumped = COMPUTE.ladder()[0].model_dump(
        mode="json", exclude={"steps", "process_cpu_cores", "mean_waiting_deferred"}
    )
    assert StageRecord.model_validate(dumped).steps is None
