"""The symptom table of a run names its own failures and its own figures."""

from __future__ import annotations

from tests.fakes import records
from tests.tuner.analysis.test_mix import TUNED
from tuner.analysis.symptoms import symptoms
from tuner.answer import Symptom
from tuner.records import Failed, FailureKind, TrialRecord


def _table(*more: TrialRecord) -> dict[str, list[Symptom]]:
    trials = (*records.study_trials(), *records.confirmation_trials(), *more)
    found = symptoms(trials, records.production_profile(), records.protective_profile(), records.SLO, TUNED)
    return {each.symptom: [other for other in found if other.symptom == each.symptom] for each in found}


def _failed(kind: FailureKind, *, measure_s: float) -> TrialRecord:
    failed = Failed(kind=kind, detail="CUDA out of memory")
    trial = records.trial(20, records.DEFAULTS, outcome=failed)
    return trial.model_copy(update={"measure_s": measure_s})


def test_a_start_that_failed_is_named_with_its_cause_and_its_way_out() -> None:
    """Weights that leave no room want more share; the other lack of memory at start wants less."""
    (seen,) = _table()["fails_at_start"]
    assert "trial 3" in seen.seen
    assert "gpu_memory_utilization=0.08" in seen.seen
    assert seen.means.startswith("no_kv_memory in 1 trials: share 0.08")
    assert seen.first.startswith("weights and activations leave no KV blocks for one request: share up")
    assert "production's share of 0.7 starts" in seen.first
    _, graphs = _table(_failed(FailureKind.OOM_GRAPH_CAPTURE, measure_s=0.0))["fails_at_start"]
    assert "share down" in graphs.first


def test_a_run_without_failed_starts_knows_how_long_a_start_takes() -> None:
    """Twice the slowest start that was seen is what tells a hanging start from a slow one."""
    trials = records.confirmation_trials()
    found = symptoms(trials, records.production_profile(), None, records.SLO, None)
    assert found[0].symptom == "fails_at_start"
    assert "not healthy after 8 s, twice the slowest of its 2 starts" in found[0].seen


def test_only_a_death_under_load_is_a_later_one() -> None:
    """An engine that ran out of memory while it served wants less share with fewer sequences."""
    (never,) = _table()["dies_later"]
    assert "met in no trial of this run" in never.means
    assert "368 MiB in use of 1.4 GiB reserved" in never.means
    assert "`max_num_seqs` 12" in never.first
    assert "gpu_memory_utilization" not in never.first
    (early,) = _table(_failed(FailureKind.CRASHED, measure_s=0.0))["dies_later"]
    assert early == never
    for kind in (FailureKind.CRASHED, FailureKind.OOM_RUNTIME):
        (died,) = _table(_failed(kind, measure_s=4.0))["dies_later"]
        assert "trial 20" in died.seen
        assert died.means.startswith(kind.value)


def test_free_memory_and_latency_up_is_told_by_what_waits() -> None:
    """The same free memory wants a larger budget where requests wait, and a smaller one where steps are long."""
    waits, long_steps = _table()["latency_up"]
    assert "p95 TTFT over 900 ms, 2 or more requests wait" in waits.seen
    assert "with 20 running it is the fence, with fewer the budget of 1024 tokens" in waits.means
    assert "p95 ITL over 75 ms, fewer than 2 requests wait" in long_steps.seen
    assert long_steps.first.startswith("budget down (protective: `max_num_batched_tokens` 512)")


def test_a_changed_mix_has_a_trigger_and_a_forecast() -> None:
    """The operator knows from which mean length on the answer is stale, and what to expect beyond."""
    prompts, outputs = _table()["mix_changed"]
    assert prompts.seen.startswith("mean prompt above ")
    assert "(tuned for 200)" in prompts.seen
    assert "Twice as long: 154 requests fit the KV cache, p95 TTFT 300 ms" in prompts.means
    assert outputs.seen.startswith("mean output above ")


def test_a_run_without_an_answer_still_says_why_engines_failed() -> None:
    """Where nothing started, the cause of that is the whole answer."""
    trials = [_failed(FailureKind.OOM_STARTUP, measure_s=0.0)]
    (only,) = symptoms(trials, None, None, None, None)
    assert "oom_startup in 1 trials: CUDA out of memory" in only.means
