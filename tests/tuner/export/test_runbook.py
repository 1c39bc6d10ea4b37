"""The runbook's triggers and rungs."""

from __future__ import annotations

import pytest

from tests.fakes.records import PRODUCTION, PROTECTIVE, protective_profile, resolved_run, unresolved_run
from tuner.answer import Recommendation, RunVerdict
from tuner.export.runbook import runbook, rungs, triggers


def with_protective(**changes: float) -> Recommendation:
    """The usual answer with a protective config of production's values and these changes."""
    recommendation = resolved_run().recommendation
    protective = protective_profile().model_copy(update={"config": PRODUCTION.model_copy(update=changes)})
    return recommendation.model_copy(update={"protective": protective})


def test_rungs_rise_in_cost_and_name_both_values() -> None:
    """At night, the first thing to try is the one that needs no restart."""
    actions = [rung.action for rung in rungs(resolved_run().recommendation)]

    assert "16" in actions[0]
    assert actions[1] == "Lower `max_num_batched_tokens` from 1024 to 512."
    assert actions[2] == "Lower `max_num_seqs` from 20 to 12."
    assert actions[-1].startswith("Switch to the whole protective profile")


def test_only_what_protective_lowers_is_a_rung() -> None:
    """No rung asks for a value that was not proven."""
    actions = " ".join(rung.action for rung in rungs(with_protective(max_num_seqs=8)))

    assert "from 20 to 8" in actions
    assert "max_num_batched_tokens" not in actions
    assert "gpu_memory_utilization" not in actions


def test_triggers_carry_this_runs_limits_and_first_rungs() -> None:
    """Each symptom names its own first rung, with the run's own figures."""
    itl, ttft, preemptions, memory = triggers(resolved_run().recommendation)

    assert "over 75 ms" in itl.seen
    assert itl.first == "budget down from 1024 to 512"
    assert "over 900 ms" in ttft.seen
    assert "22 concurrent requests (20 to 25)" in ttft.first
    assert preemptions.first == "sequences down from 20 to 12"
    assert "368 MiB in use" in memory.seen
    assert "no lower value was proven" in memory.first


def test_both_profiles_are_said_to_fit_only_where_their_shares_do() -> None:
    """Nobody starts protective beside production on a device that cannot hold both."""
    assert "Both do not fit one device (shares 0.7 + 0.7 = 1.4)" in runbook(resolved_run().recommendation)
    assert "Both fit one device (shares 0.7 + 0.3)" in runbook(with_protective(gpu_memory_utilization=0.3))


def test_a_burst_that_was_not_held_is_on_the_page() -> None:
    """A protective profile that failed its proof is not handed over as a safe one."""
    recommendation = resolved_run().recommendation.model_copy(update={"protective": protective_profile(passed=False)})

    assert "did not pass its burst at 44 concurrent requests: 31 preemptions" in runbook(recommendation)


@pytest.mark.parametrize("verdict", [verdict for verdict in RunVerdict if verdict is not RunVerdict.RESOLVED])
def test_without_production_the_page_says_so(verdict: RunVerdict) -> None:
    """The page never sends anybody to a file that does not exist."""
    recommendation = unresolved_run(verdict).recommendation
    text = runbook(recommendation)

    assert "There is no production file" in text
    assert recommendation.reason in text
    assert "How to switch" not in text
    assert rungs(recommendation) == triggers(recommendation) == ()


def test_without_protective_no_lower_value_is_invented() -> None:
    """With nothing proven below production, only the gateway is left."""
    text = runbook(resolved_run().recommendation.model_copy(update={"protective": None}))

    assert "There is no protective file" in text
    assert "How to switch" not in text
    assert str(PROTECTIVE.max_num_batched_tokens) not in text


def test_each_symptom_has_its_meaning_and_its_first_step() -> None:
    """At night nobody works out what "memory free, latency up" means on this engine."""
    text = runbook(resolved_run().recommendation)

    for name, seen in (
        ("fails at start", "not healthy after 8 s"),
        ("dies later", "it dies after it served"),
        ("memory free, latency up", "p95 TTFT over 900 ms"),
        ("other lengths", "mean prompt above 190 tokens"),
    ):
        assert f"| {name} | {seen} |" in text
    without = resolved_run().recommendation.model_copy(update={"diagnosis": None})
    assert "What symptoms mean" not in runbook(without)


def test_the_runbook_is_one_page() -> None:
    """It is read at night."""
    assert len(runbook(resolved_run().recommendation).splitlines()) < 60
