"""What can never work is refused before a launch is spent on it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engine_config import EngineConfig
from tuner.inputs import InputError
from tuner.job import load_job
from tuner.placement import Placement
from tuner.planning import cautious_values, default_values, plan_of
from tuner.space import SearchedValues, broken_rule, load_space

ONE_CPU = Placement(parallel_trials=1, num_gpus=0)


def _config(**over: object) -> EngineConfig:
    values = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.9} | over
    return EngineConfig.model_validate(values)


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_a_budget_below_the_sequences_is_named_with_both_values(budget: int, seqs: int) -> None:
    """A decode step needs one token per running request."""
    reason = broken_rule(_config(max_num_seqs=seqs, max_num_batched_tokens=budget), max_model_len=None)
    assert (reason is not None) == (budget < seqs)
    if reason is not None:
        assert str(budget) in reason
        assert str(seqs) in reason


def test_a_short_budget_is_a_matter_of_chunked_prefill() -> None:
    """8192 tokens a step serve 131072-token prompts with chunking, and cannot without."""
    for chunked, works in ((True, True), (False, False)):
        config = _config(max_num_batched_tokens=8192, enable_chunked_prefill=chunked)
        reason = broken_rule(config, max_model_len=131072)
        assert (reason is None) == works
    assert reason is not None
    assert "8192" in reason
    assert "131072" in reason


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_presets_load_and_every_combination_can_work(name: str) -> None:
    """No proposal of a shipped space is wasted on a rule."""
    space = load_space(name)
    smallest_budget = min(space.choices("max_num_batched_tokens"))
    assert smallest_budget >= max(space.choices("max_num_seqs"))


@pytest.mark.parametrize(
    ("over", "told"),
    [
        ({"max_num_seqs": {"choices": [16, 8], "unit": "requests", "why": "x"}}, "rise"),
        ({"max_num_seqs": {"choices": [0, 8], "unit": "requests", "why": "x"}}, "greater than or equal to 1"),
        ({"max_num_seqs": {"choices": [1.5], "unit": "requests", "why": "x"}}, "1.5: it should be a valid integer"),
        ({"gpu_memory_utilization": {"choices": [0.5, 1.2], "unit": "share", "why": "x"}}, "1.2: it should be less"),
        ({"gpu_memory_utilization": {"choices": [0], "unit": "share", "why": "x"}}, "0: it should be greater"),
    ],
)
def test_a_faulty_space_names_the_value(over: dict[str, object], told: str) -> None:
    """A space that holds an impossible value is not searched."""
    space = load_space("cpu").model_dump(mode="json")
    space["parameters"] |= over
    with pytest.raises(InputError, match=told):
        load_space(space)


def test_a_plan_counts_what_the_job_will_do() -> None:
    """`kneetune plan` tells launches and time before anything starts."""
    planned = plan_of(load_job("embedded"), ONE_CPU)
    assert planned.num_combinations == 7 * 5 * 5
    assert planned.impossible == ()
    assert planned.num_study_launches == 9
    assert 0 < planned.expected_s <= planned.budget_s


def test_a_plan_counts_the_safe_rates_time_however_short_its_other_stages() -> None:
    """A stage under a rate may last 20 s in a job whose others last one: nobody is told two minutes for three."""
    quick = {"max_time": "1s", "max_warm_up": "1s"}
    job = load_job("embedded", {"measure": quick, "budget": {"time": "10h", "trials": 3}})
    planned = plan_of(job, ONE_CPU)
    launches = planned.num_study_launches + planned.num_confirmation_launches
    others_s = planned.expected_s - launches * planned.assumed_start_s - planned.most_stages * 1.0
    assert others_s > 50


def test_a_plan_lists_the_impossible() -> None:
    """Combinations that no launch is spent on are shown with their rule."""
    space = load_space("cpu").model_dump(mode="json")
    space["parameters"]["max_num_batched_tokens"]["choices"] = [64, 2048]
    job = load_job("embedded", {"search_space": space})
    impossible = plan_of(job, ONE_CPU).impossible
    assert len(impossible) == 2 * 5
    assert all("max_num_batched_tokens=64 is below" in reason for reason in impossible)


def test_a_workload_longer_than_the_model_is_refused_before_anything_starts() -> None:
    """Both lengths are named, and no engine is launched to find out."""
    with pytest.raises(InputError, match=r"200 tokens.*max_model_len=100"):
        load_job("embedded", {"engine": {"fixed": {"max_model_len": 100}}})


def test_the_first_two_settings() -> None:
    """The engine's defaults come first, the cautious start second, cut to what requests can use."""
    tiny = {"input_len": {"kind": "fixed", "tokens": 4}, "output_len": {"kind": "fixed", "tokens": 4}}
    job = load_job("embedded", {"engine": {"fixed": {"max_model_len": 8}}, "workload": tiny, "burst": tiny})
    assert default_values(job) == SearchedValues(
        max_num_seqs=128, max_num_batched_tokens=2048, gpu_memory_utilization=0.92
    )
    assert cautious_values(job).max_num_batched_tokens == 16 * 8
