"""Profiles are chosen from what was measured, on the safe side of every doubt."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.fakes import records
from tests.tuner.analysis.curves import DOUBLING, climbed
from tuner.analysis.graph_grid import is_on_grid
from tuner.analysis.profiles import ProductionChoice, choose_production, run_verdict
from tuner.analysis.protective import choose_protective, judge_burst
from tuner.answer import LadderVerdict, RunVerdict, Slo
from tuner.engine_config import EngineConfig
from tuner.oom_lessons import ShareCeiling
from tuner.records import (
    Estimate,
    Failed,
    FailureKind,
    Measured,
    RequestRecord,
    StageKind,
    StageRecord,
    TrialRecord,
    TrialRole,
)

WIDE = Slo(ttft_p95_ms=1e6, itl_p95_ms=1e6)
TIGHT = Slo(ttft_p95_ms=1.0, itl_p95_ms=1.0)
BIG = EngineConfig(max_num_seqs=64, max_num_batched_tokens=1024, gpu_memory_utilization=0.7)


def _trial(number: int, config: EngineConfig = BIG, *, factor: float = 1.0, **changes: Any) -> TrialRecord:
    """A trial on the fake curve, all stages with their throughput times `factor` and `changes` on top."""
    stages = tuple(_scaled(stage, factor).model_copy(update=changes) for stage in climbed(config))
    return records.trial(number, config, outcome=Measured(facts=records.facts(config), stages=stages))


def _scaled(stage: StageRecord, factor: float) -> StageRecord:
    figure = records.estimate(stage.output_throughput.value * factor, spread=0.02)
    return stage.model_copy(update={"output_throughput": figure})


def _flat(number: int) -> TrialRecord:
    stages = tuple(
        stage.model_copy(update={"output_throughput": records.estimate(300.0)}) for stage in climbed(BIG, DOUBLING)
    )
    return records.trial(number, BIG, outcome=Measured(facts=records.facts(BIG), stages=stages))


def _straight(number: int) -> TrialRecord:
    stages = tuple(
        stage.model_copy(update={"output_throughput": records.estimate(10.0 * min(stage.load, 64))})
        for stage in climbed(BIG, DOUBLING)
    )
    return records.trial(number, BIG, outcome=Measured(facts=records.facts(BIG), stages=stages))


def _short_of_the_fence(number: int) -> TrialRecord:
    return _straight(number).model_copy(update={"config": BIG.model_copy(update={"max_num_seqs": 128})})


def _failed(number: int) -> TrialRecord:
    return records.trial(number, BIG, outcome=Failed(kind=FailureKind.NO_KV_MEMORY, detail="0 blocks"))


def _chosen(*trials: TrialRecord, slo: Slo = WIDE) -> ProductionChoice:
    choice = choose_production(trials, slo)
    assert choice is not None
    return choice


def test_production_is_pinned_left_of_its_knee() -> None:
    """The exported fence is the measured load just left of the knee, under the measured budget and share."""
    choice = _chosen(_trial(5))

    assert choice.knee.verdict is LadderVerdict.KNEE
    assert choice.knee.load is not None
    assert 0.7 * choice.knee.load <= choice.stage.load < choice.knee.load
    assert choice.config == BIG.model_copy(update={"max_num_seqs": choice.stage.load})
    assert choice.config.max_num_batched_tokens >= choice.config.max_num_seqs
    assert choice.evidence


def test_a_fence_has_a_captured_graph_where_the_engine_captures_any() -> None:
    """Off the grid the largest batches run without a graph, up to several times slower than was measured."""
    config = BIG.model_copy(update={"max_num_seqs": 128, "max_num_batched_tokens": 2048})
    given = {80: 4000, 88: 4350, 96: 4700, 97: 3100, 100: 3050, 103: 4900, 104: 4950, 112: 5000, 128: 5020}
    stages = tuple(
        records.stage(config, load, index=index, num_preemptions=0).model_copy(
            update={"output_throughput": records.estimate(float(rate)), "kv_cache_usage_peak": 0.5}
        )
        for index, (load, rate) in enumerate(given.items())
    )
    facts = records.facts(config)
    fences = {}
    for captures in (True, None, False):
        told = facts.model_copy(update={"captures_graphs": captures})
        trial = records.trial(0, config, outcome=Measured(facts=told, stages=stages))
        choice = _chosen(trial)
        candidates = choose_protective(choice.config, [trial], WIDE)
        assert choice.knee.load == 104
        assert captures is False or all(is_on_grid(each.config.max_num_seqs) for each in candidates)
        fences[captures] = choice.config.max_num_seqs

    assert fences == {True: 96, None: 96, False: 103}


def test_more_throughput_wins_beyond_noise_and_the_smaller_setting_within() -> None:
    """A clear winner is taken; a tie goes to the setting that exposes less."""
    smaller = BIG.model_copy(update={"gpu_memory_utilization": 0.5})

    assert _chosen(_trial(0), _trial(1, smaller, factor=0.8)).trial.number == 0
    assert _chosen(_trial(0), _trial(1, smaller, factor=0.99)).trial.number == 1


def test_what_was_refuted_does_not_come_back_by_way_of_another_trial() -> None:
    """Trials that differ by their fence lead to one setting: launched often enough it would win by luck."""
    higher = BIG.model_copy(update={"max_num_seqs": 128})
    trials = [_trial(0), _trial(1, higher), _trial(2, higher.model_copy(update={"gpu_memory_utilization": 0.9}))]
    ceiling = ShareCeiling(gpu_memory_utilization=0.7, reason="0.95 ran out of memory")
    first = choose_production(trials, WIDE, ceiling=ceiling)
    assert first is not None

    refuted = [first.config]
    while (choice := choose_production(trials, WIDE, ceiling=ceiling, refuted=refuted)) is not None:
        assert choice.config not in refuted
        assert choice.knee.load == first.knee.load  # a stage that is not stood on still shows the curve
        refuted.append(choice.config)
    assert len({config.max_num_seqs for config in refuted}) == len(refuted)


def test_only_measured_study_trials_are_chosen_from() -> None:
    """A confirmation launch or a failed trial is never selected."""
    confirmation = _trial(0).model_copy(update={"role": TrialRole.CONFIRM_PRODUCTION})

    assert choose_production([confirmation, _failed(1)], WIDE) is None
    assert choose_production([_trial(0)], TIGHT) is None


def test_a_ladder_with_a_knee_comes_before_a_faster_one_without() -> None:
    """Throughput at a fence nobody looked past does not win over a known knee."""
    assert _chosen(_straight(0), _trial(1)).trial.number == 1
    assert _chosen(_straight(0)).knee.verdict is LadderVerdict.FENCED


def test_an_invalid_overload_does_not_hide_the_fence() -> None:
    """A ladder that climbed to its fence says "raise max_num_seqs" even where the stage past it could not settle."""
    trial = _straight(0)
    assert isinstance(trial.outcome, Measured)
    stages = tuple(stage.model_copy(update={"valid": not stage.fenced}) for stage in trial.outcome.stages)
    trial = trial.model_copy(update={"outcome": trial.outcome.model_copy(update={"stages": stages})})

    assert _chosen(trial).knee.verdict is LadderVerdict.FENCED


def test_protective_is_below_production_everywhere_and_clearly_somewhere() -> None:
    """No candidate is higher anywhere, each is 20 % lower in sequences or budget, and each cut says what it answers."""
    trials = [_trial(0), _trial(1, BIG.model_copy(update={"max_num_batched_tokens": 512}))]
    trials.append(_trial(2, BIG.model_copy(update={"gpu_memory_utilization": 0.5})))
    trials.append(_trial(3, BIG.model_copy(update={"max_num_batched_tokens": 2048})))
    trials.append(_trial(4, BIG.model_copy(update={"max_num_batched_tokens": 256, "gpu_memory_utilization": 0.5})))
    ceiling = _chosen(*trials).config.model_copy(update={"max_num_seqs": 16, "max_num_batched_tokens": 1024})
    ceiling = ceiling.model_copy(update={"gpu_memory_utilization": 0.7})

    candidates = choose_protective(ceiling, trials, WIDE)

    assert candidates
    for candidate in candidates:
        config = candidate.config
        assert config.max_num_seqs <= 16
        assert config.max_num_batched_tokens <= 1024
        assert config.gpu_memory_utilization <= 0.7
        assert config.max_num_seqs <= 0.8 * 16 or config.max_num_batched_tokens <= 0.8 * 1024
        assert config.gpu_memory_utilization == 0.7 or config.max_num_seqs < 16
        assert candidate.stage.load == config.max_num_seqs
        assert len(candidate.cuts) == sum(
            getattr(config, name) < getattr(ceiling, name)
            for name in ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
        )
    assert candidates[0].config.max_num_batched_tokens < 1024
    assert candidates[0].config.max_num_seqs == 8
    assert len({candidate.config.model_dump_json() for candidate in candidates}) == len(candidates)


def _with_context(trial: TrialRecord, max_model_len: int) -> TrialRecord:
    assert isinstance(trial.outcome, Measured)
    facts = trial.outcome.facts.model_copy(update={"max_model_len": max_model_len})
    return trial.model_copy(update={"outcome": trial.outcome.model_copy(update={"facts": facts})})


def test_protective_holds_the_burst_before_it_is_fast() -> None:
    """Candidates whose KV blocks hold a full batch of the burst's requests come first."""
    blocks = records.facts(BIG).num_gpu_blocks
    assert blocks is not None
    longest = 16 * blocks // 5
    trials = [_with_context(_trial(0), longest)]
    ceiling = _chosen(*trials).config

    plain, for_burst = (
        choose_protective(ceiling, trials, WIDE),
        choose_protective(ceiling, trials, WIDE, burst_tokens=longest),
    )

    assert plain[0].config.max_num_seqs > 4
    assert for_burst[0].config.max_num_seqs == 4


def test_a_burst_is_no_longer_than_what_is_sent_of_it() -> None:
    """A trace's requests beyond the context are left out: who makes room for them gives up throughput for nothing."""
    blocks = records.facts(BIG).num_gpu_blocks
    assert blocks is not None
    trials = [_with_context(_trial(0), 32)]
    ceiling = _chosen(*trials).config
    found = choose_protective(ceiling, trials, WIDE, burst_tokens=16 * blocks // 5)
    assert found == choose_protective(ceiling, trials, WIDE, burst_tokens=32)
    assert found[0].config.max_num_seqs > 4


def test_there_is_always_a_protective_candidate() -> None:
    """Production's own ladder gives a fallback, and at load 1, where it has none, the budget is halved."""
    trials = [_trial(0)]
    at_one = BIG.model_copy(update={"max_num_seqs": 1})
    (candidate,) = choose_protective(at_one, trials, TIGHT)

    assert choose_protective(_chosen(*trials).config, trials, TIGHT)
    assert candidate.config == at_one.model_copy(update={"max_num_batched_tokens": 512})
    assert choose_protective(BIG, [_failed(0)], WIDE) == []


def test_other_engine_settings_stay_productions() -> None:
    """A trial with another dtype says nothing about this one; the model length is never raised."""
    other = _trial(0, BIG.model_copy(update={"dtype": "float16"}))
    shorter = _trial(1, BIG.model_copy(update={"max_model_len": 512}))
    candidates = choose_protective(BIG.model_copy(update={"max_num_seqs": 20}), [other, shorter], WIDE)

    assert {candidate.trial for candidate in candidates} == {1}
    assert {candidate.config.max_model_len for candidate in candidates} == {None}


def _request(ttft_s: float = 0.1, tpot_s: float = 0.01, **changes: Any) -> RequestRecord:
    request = RequestRecord(
        index=0,
        intended_s=1.0,
        sent_s=1.0,
        first_token_s=1.0 + ttft_s,
        finished_s=1.0 + ttft_s + 10 * tpot_s,
        num_prompt_tokens=8,
        num_output_tokens=11,
        asked_output_tokens=11,
    )
    return request.model_copy(update=changes)


BURST = records.stage(records.PROTECTIVE, 44, kind=StageKind.BURST)
LIMITS = Slo(ttft_p95_ms=200.0, itl_p95_ms=1000.0)


def test_goodput_counts_requests_that_met_both_limits_themselves() -> None:
    """A request counts by its own TTFT and TPOT, from its intended time; failures, refusals and warm-up never do."""
    good = [_request(), _request(), _request()]
    bad = [
        _request(ttft_s=0.3),
        _request(intended_s=0.5),
        _request(tpot_s=1.1),
        _request(error="cut"),
        _request(rejected=True),
        _request(warm_up=True),
        _request(first_token_s=None),
    ]

    assert judge_burst(BURST, [*good, *bad], LIMITS).goodput_rps == pytest.approx(3 / BURST.measured_s)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_preemptions": 2}, "2 preemptions"),
        ({"num_preemptions": None}, "unknown"),
        ({"num_failed": 1, "first_error": "reset"}, "reset"),
        ({"num_completed": 0}, "no request"),
        ({"kv_cache_usage_peak": 0.96}, "96%"),
        ({"kv_cache_usage_peak": None}, "unknown"),
        ({"itl_p95_ms": Estimate(value=2000.0, low=1900, high=2100, num_samples=99)}, "ITL"),
        ({"itl_p95_ms": Estimate(value=1.0, num_samples=9)}, "ITL"),
    ],
)
def test_each_failure_under_the_burst_fails(change: dict[str, Any], said: str) -> None:
    """A protective profile that preempts, fails, stalls or fills its KV cache, or might have, is not proven."""
    steady = BURST.model_copy(update={"ttft_p95_ms": records.estimate(100.0)})
    evidence = judge_burst(steady.model_copy(update=change), [], LIMITS)

    assert judge_burst(steady, [], LIMITS).passed
    assert judge_burst(steady, [], LIMITS).reasons == ()
    assert not evidence.passed
    assert any(said in reason for reason in evidence.reasons)


def test_queueing_under_the_burst_is_said_and_does_not_fail() -> None:
    """TTFT at twice the knee without valves is a queue: reported, not held against the setting."""
    evidence = judge_burst(BURST, [], Slo(ttft_p95_ms=1.0, itl_p95_ms=1000.0))

    assert evidence.passed
    assert any("TTFT" in reason for reason in evidence.reasons)


def test_resolved_says_its_figures() -> None:
    """A knee and a point left of it make the run resolved, with both loads in the sentence."""
    trials = [_failed(0), _trial(1)]
    choice = _chosen(*trials)
    finding = run_verdict(trials, choice, WIDE)

    assert finding.verdict is RunVerdict.RESOLVED
    assert f"{choice.knee.load:g}" in finding.reason
    assert f"load {choice.stage.load}" in finding.reason


def test_infeasible_slo_names_the_trial_that_comes_closest() -> None:
    """Where no stage meets the limits, users learn by how much and which trial, not a made-up profile."""
    slower = _trial(1, itl_p95_ms=records.estimate(99.0))
    finding = run_verdict([slower, _trial(2)], None, TIGHT)

    assert finding.verdict is RunVerdict.SLO_INFEASIBLE
    assert finding.least_violating_trial == 2
    assert "1 ms" in finding.reason


def test_runs_without_an_answer_say_why() -> None:
    """Each way of not knowing has its own verdict and none has an exception."""
    assert run_verdict([], None, WIDE).verdict is RunVerdict.NO_FEASIBLE_CONFIG
    assert "2 no_kv_memory" in run_verdict([_failed(0), _failed(1)], None, None).reason
    assert run_verdict([_trial(0, valid=False)], None, None).verdict is RunVerdict.NO_FEASIBLE_CONFIG
    straight, flat = [_straight(0)], [_flat(0)]
    assert run_verdict(straight, choose_production(straight, WIDE), WIDE).verdict is RunVerdict.NOT_REACHED
    assert "up to load 64" in run_verdict(straight, None, WIDE).reason
    assert "raise max_num_seqs" in run_verdict(straight, None, WIDE).reason
    assert "extend the range" in run_verdict([_short_of_the_fence(1), *straight], None, WIDE).reason
    assert run_verdict(flat, choose_production(flat, WIDE), WIDE).verdict is RunVerdict.ALREADY_SATURATED
    short = [records.trial(0, BIG, outcome=Measured(facts=records.facts(BIG), stages=climbed(BIG, (1, 2, 4))))]
    assert run_verdict(short, choose_production(short, WIDE), WIDE).verdict is RunVerdict.TOO_FEW_STAGES


def test_a_range_that_the_client_cut_off_is_not_blamed_on_the_range() -> None:
    """Who reads `extend the range` must know that the loads beyond were measured, and why they did not count."""
    trial = _short_of_the_fence(1)
    assert trial.outcome.outcome == "measured"
    bound = {"load": 512, "valid": False, "invalid_reasons": ("client bound: its CPU was busy",)}
    beyond = trial.outcome.stages[-1].model_copy(update=bound)
    outcome = trial.outcome.model_copy(update={"stages": (*trial.outcome.stages, beyond)})
    reason = run_verdict([trial.model_copy(update={"outcome": outcome})], None, WIDE).reason
    assert "1 stages beyond it were invalid, such as: client bound: its CPU was busy" in reason


def test_limits_other_than_the_slo_are_not_blamed_on_it() -> None:
    """Preemptions everywhere, or too few samples everywhere, are named as themselves."""
    preempting = [_trial(0, num_preemptions=1)]
    unproven = [_trial(0, ttft_p95_ms=Estimate(value=5.0, num_samples=40))]

    assert choose_production(preempting, WIDE) is None
    assert run_verdict(preempting, None, WIDE).verdict is RunVerdict.NO_FEASIBLE_CONFIG
    assert "preemption" in run_verdict(preempting, None, WIDE).reason
    assert run_verdict(unproven, None, WIDE).verdict is RunVerdict.TOO_FEW_STAGES
    assert "59 samples" in run_verdict(unproven, None, WIDE).reason
    unknown = [_trial(0, ttft_p95_ms=Estimate(value=math.nan, num_samples=0))]
    assert run_verdict(unknown, None, WIDE).verdict is RunVerdict.SLO_INFEASIBLE


def test_a_lower_limit_on_running_requests_is_the_fence() -> None:
    """Where fewer may run than the buffers hold, production is fenced by one limit that the engine accepts."""
    narrow = BIG.model_copy(update={"max_num_active_seqs": 32, "max_num_scheduled_tokens": 700})
    choice = choose_production([_trial(0, narrow)], WIDE)

    assert choice is not None
    assert all(not stage.fenced for stage in climbed(narrow) if stage.load <= 32)
    assert (choice.config.max_num_seqs, choice.config.max_num_active_seqs) == (choice.stage.load, None)
    assert choice.config.max_num_scheduled_tokens == 700
    candidates = choose_protective(choice.config, [_trial(0, narrow)], WIDE)
    assert candidates
    for candidate in candidates:
        config = candidate.config
        assert config.max_num_active_seqs is None
        assert (config.max_num_scheduled_tokens or 0) <= config.max_num_batched_tokens


def test_half_a_budget_takes_the_scheduled_tokens_along() -> None:
    """A protective candidate that no engine would start is no fallback."""
    ceiling = BIG.model_copy(update={"max_num_seqs": 1, "max_num_scheduled_tokens": 700})
    (candidate,) = choose_protective(ceiling, [_trial(0, BIG)], WIDE)

    assert candidate.config.max_num_batched_tokens == 512
    assert candidate.config.max_num_scheduled_tokens is None
