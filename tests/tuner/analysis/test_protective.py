"""A fallback must hold, and still serve: one that turns most users away at night is not much better than none."""

from __future__ import annotations

from tests.tuner.analysis.test_profiles import BIG, WIDE, _chosen, _trial
from tuner.analysis.not_further import not_further
from tuner.analysis.protective import LIVABLE, ProtectiveCandidate, choose_protective, next_candidate
from tuner.answer import Slo
from tuner.engine_config import EngineConfig


def _config(seqs: int, budget: int) -> EngineConfig:
    return BIG.model_copy(update={"max_num_seqs": seqs, "max_num_batched_tokens": budget})


def _candidates(*configs: EngineConfig) -> list[ProtectiveCandidate]:
    trial = _trial(0)
    stage = trial.outcome.stages[0] if trial.outcome.outcome == "measured" else None
    assert stage is not None
    return [ProtectiveCandidate(trial=0, stage=stage, users=stage.users, config=config, cuts=()) for config in configs]


def test_one_that_serves_half_comes_before_one_that_cuts_more() -> None:
    """One of a few sequences cut both parameters, came first, and served a fraction."""
    few = _trial(1, _config(64, 256))
    outcome = few.outcome
    assert outcome.outcome == "measured"
    at_two = tuple(stage for stage in outcome.stages if stage.load == 2)
    alone = few.model_copy(update={"outcome": outcome.model_copy(update={"stages": at_two})})
    trials = [_trial(0), alone]
    choice = _chosen(_trial(0))
    most = choice.stage.output_throughput.value

    blind = choose_protective(choice.config, trials, WIDE)
    best = choose_protective(choice.config, trials, WIDE, production_tokens_per_s=most)

    assert blind[0].config.max_num_seqs == 2
    assert blind[0].stage.output_throughput.value < LIVABLE * most
    assert best[0].stage.output_throughput.value >= LIVABLE * most
    assert {each.config for each in blind} == {each.config for each in best}


def test_a_fence_is_lowered_to_what_the_cache_holds_of_the_burst() -> None:
    """Four did not fit by a hair, and one was taken, which served a quarter: three fit."""
    trial = _trial(0)
    outcome = trial.outcome
    assert outcome.outcome == "measured"
    facts = outcome.facts.model_copy(update={"num_gpu_blocks": 194, "block_size": 16, "max_model_len": 2048})
    trial = trial.model_copy(update={"outcome": outcome.model_copy(update={"facts": facts})})
    choice = _chosen(trial)
    most = choice.stage.output_throughput.value
    candidates = choose_protective(choice.config, [trial], WIDE, burst_tokens=808, production_tokens_per_s=most)
    best = candidates[0]

    assert max(each.config.max_num_seqs for each in candidates) == best.config.max_num_seqs == best.users == 3
    assert best.stage.load >= 4
    assert best.least_tokens_per_s == best.stage.output_throughput.value * 3 / best.stage.load


def test_what_is_tried_next_differs_from_what_held_and_is_below_what_did_not() -> None:
    """A launch of thirty seconds for a fence of 15 beside one of 16 says nothing new."""
    candidates = _candidates(_config(16, 512), _config(15, 512), _config(12, 1024), _config(8, 256))

    def following(*tried: tuple[int, bool]) -> EngineConfig | None:
        found = next_candidate(candidates, [(candidates[index].config, held) for index, held in tried])
        return None if found is None else found.config

    assert following() == _config(16, 512)
    assert following((0, True)) == _config(12, 1024)
    assert following((0, False)) == _config(8, 256)
    assert following((0, True), (2, False)) == _config(8, 256)
    assert following((0, False), (3, False)) is None


def test_production_far_left_of_its_knee_says_what_kept_it_there() -> None:
    """A quarter of the knee with no word about it looks like a mistake of the tuner."""
    trial = _trial(0)
    assert trial.outcome.outcome == "measured"
    stages = [stage for stage in trial.outcome.stages if not stage.fenced]
    limit_ms = next(stage.itl_p95_ms.value for stage in stages if stage.load == 2)
    derived = Slo(ttft_p95_ms=1e6, itl_p95_ms=limit_ms, derived=True)
    choice = _chosen(trial, slo=derived)
    assert choice.knee.load is not None
    said = not_further(choice, derived)

    assert said is not None
    assert f"above {limit_ms:.4g} ms" in said
    assert "limits derived from the unloaded engine" in said
    own = not_further(choice, derived.model_copy(update={"derived": False}))
    assert own is not None
    assert "derived" not in own


def test_production_just_left_of_its_knee_needs_no_excuse() -> None:
    """Nothing kept it from standing further right but the knee."""
    choice = _chosen(_trial(0))

    assert not_further(choice, WIDE) is None
