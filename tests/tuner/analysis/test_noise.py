"""How much launches of one setting differ: taken too small, luck is sold as a gain; too large, gains are hidden."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components

from tests.fakes.records import CHOSEN, estimate, facts, stage
from tuner.analysis.combine import combined, ratio
from tuner.analysis.noise import FEWEST_DEGREES, kept_by_another, launch_noise, widened
from tuner.answer import LaunchNoise
from tuner.engine_config import EngineConfig
from tuner.records import Estimate, Measured, TrialRecord, TrialRole

NOISE = LaunchNoise(relative_sd=0.05, num_launches=8, degrees_of_freedom=6)


def _launch(
    number: int, config: EngineConfig, *, loads: tuple[int, ...], effect: float, spread: float, rng: np.random.Generator
) -> TrialRecord:
    """A launch whose every stage is off by the same `effect`, and each by its own noise besides."""
    stages = []
    for index, load in enumerate(loads):
        made = stage(config, load, index=index, num_preemptions=0)
        seen = made.output_throughput.value * math.exp(effect + spread / 1.96 * rng.standard_normal())
        stages.append(made.model_copy(update={"output_throughput": estimate(seen, spread=spread)}))
    return TrialRecord(
        number=number,
        role=TrialRole.STUDY,
        config=config,
        origin="sampler",
        outcome=Measured(facts=facts(config), stages=tuple(stages)),
    )


def _launches(sd: float, *, num: int, spread: float, seed: int) -> list[TrialRecord]:
    rng = np.random.default_rng(seed)
    # Fences and shares differ, the schedule at these loads does not.
    settings = [
        CHOSEN.model_copy(update={"max_num_seqs": 16 + number, "gpu_memory_utilization": 0.5 + 0.01 * number})
        for number in range(num)
    ]
    return [
        _launch(number, config, loads=(1, 2, 4, 8), effect=sd * rng.standard_normal(), spread=spread, rng=rng)
        for number, config in enumerate(settings)
    ]


def _overlapping(measured: list[set[int]], *, sd: float, spread: float, seed: int) -> list[TrialRecord]:
    """Launches of one schedule, each at the loads it is said to have measured (powers of two)."""
    rng = np.random.default_rng(seed)
    return [
        _launch(
            number,
            CHOSEN.model_copy(update={"max_num_seqs": 64 + number}),
            loads=tuple(2**load for load in sorted(loads)),
            effect=sd * rng.standard_normal(),
            spread=spread,
            rng=rng,
        )
        for number, loads in enumerate(measured)
    ]


@pytest.mark.parametrize("sd", [0.0, 0.03, 0.10])
def test_the_noise_between_launches_is_told_apart_from_the_noise_within(sd: float) -> None:
    """Twenty launches of one schedule, each off by its own amount: that amount comes back, whatever stages scatter."""
    found = [launch_noise(_launches(sd, num=20, spread=0.06, seed=seed)) for seed in range(30)]
    assert all(noise is not None and noise.degrees_of_freedom == 19 for noise in found)
    mean_variance = float(np.mean([noise.relative_sd**2 for noise in found if noise is not None]))
    assert math.sqrt(mean_variance) == pytest.approx(sd, rel=0.25, abs=0.01)


@settings(max_examples=60)
@given(st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=9))
def test_each_connected_set_of_launches_costs_a_degree_of_freedom(measured: list[set[int]]) -> None:
    """Launches that no chain of shared loads connects vouch for nothing together, and make no interval narrower."""
    noise = launch_noise(_overlapping(measured, sd=0.05, spread=0.01, seed=0))
    launches_at = np.array([[load in loads for load in range(6)] for loads in measured])
    num_sets, label = connected_components(launches_at @ launches_at.T)
    degrees = len(measured) - num_sets
    shared = sum(int(np.sum(label == each) > 1) * int(np.sum(label == each)) for each in range(num_sets))

    assert (noise is None) == (degrees < FEWEST_DEGREES)
    assert noise is None or (noise.degrees_of_freedom, noise.num_launches) == (degrees, shared)


@pytest.mark.parametrize(
    "measured",
    [[{k // 2} for k in range(12)], [{k, k + 1} for k in range(12)], [{0, 1, 2, 3}, *({k % 4} for k in range(11))]],
    ids=["pairs", "chain", "star"],
)
def test_launches_that_share_few_loads_tell_the_same_variance(measured: list[set[int]]) -> None:
    """However a study's fences overlap, it is the launches' variance that comes back, and not a part of it."""
    found = [launch_noise(_overlapping(measured, sd=0.05, spread=0.01, seed=seed)) for seed in range(150)]

    mean_variance = float(np.mean([noise.relative_sd**2 for noise in found if noise is not None]))
    assert math.sqrt(mean_variance) == pytest.approx(0.05, rel=0.1)


def test_other_schedules_say_nothing_of_each_other() -> None:
    """Another budget is another schedule: what it gives more or less is no noise."""
    rng = np.random.default_rng(0)
    budgets = [CHOSEN.model_copy(update={"max_num_batched_tokens": 64 * 2**power}) for power in range(8)]
    trials = [
        _launch(number, config, loads=(1, 2, 4), effect=0.1 * number, spread=0.02, rng=rng)
        for number, config in enumerate(budgets)
    ]
    assert launch_noise(trials) is None


def test_what_was_preempted_or_fenced_is_not_compared() -> None:
    """There the fence and the share do touch the schedule."""
    trials = _launches(0.2, num=8, spread=0.02, seed=0)
    for change in ({"num_preemptions": 3}, {"num_preemptions": None}, {"fenced": True}, {"valid": False}):
        spoilt = []
        for trial in trials:
            assert isinstance(trial.outcome, Measured)
            stages = tuple(each.model_copy(update=change) for each in trial.outcome.stages)
            spoilt.append(trial.model_copy(update={"outcome": trial.outcome.model_copy(update={"stages": stages})}))
        assert launch_noise(spoilt) is None


def test_few_launches_tell_no_variance() -> None:
    """Two launches that happen to agree must not make the next figures look exact."""
    assert launch_noise(_launches(0.05, num=4, spread=0.02, seed=0)) is None
    assert launch_noise([]) is None


@given(st.floats(0.0, 0.3), st.floats(0.001, 0.2))
def test_one_launch_is_never_surer_than_its_stage(sd: float, spread: float) -> None:
    """The interval only grows, and an unknown one stays unknown."""
    noise = NOISE.model_copy(update={"relative_sd": sd})
    one = estimate(100.0, spread=spread)
    wider = widened(one, noise)
    assert wider.low is not None
    assert wider.high is not None
    assert wider.low <= (one.low or 0.0)
    assert wider.high >= (one.high or 0.0)
    assert widened(one, None) == one
    bare = Estimate(value=100.0, num_samples=5)
    assert widened(bare, noise) == bare


def test_an_interval_over_launches_holds_the_truth() -> None:
    """Of two launches with known noise between them, 95 in 100 intervals hold the mean; so do those of a gain of 1."""
    rng = np.random.default_rng(3)
    noise = LaunchNoise(relative_sd=0.05, num_launches=30, degrees_of_freedom=19)
    held, held_ratio = 0, 0
    for _ in range(1000):
        seen = [
            estimate(100 * math.exp(0.05 * rng.standard_normal() + 0.03 / 1.96 * rng.standard_normal()), spread=0.03)
            for _ in range(4)
        ]
        mean, gain = combined(seen[:2], noise), ratio(seen[:2], seen[2:], noise)
        held += (mean.low or 0.0) <= 100 <= (mean.high or 0.0)
        assert gain is not None
        held_ratio += (gain.low or 0.0) <= 1 <= (gain.high or 0.0)
    assert 930 <= held <= 985
    assert 930 <= held_ratio <= 985


def test_without_known_noise_launches_are_an_envelope() -> None:
    """Two launches tell no variance: nothing between their ends is ruled out."""
    pair = [estimate(90.0, spread=0.02), estimate(110.0, spread=0.02)]
    both = combined(pair)
    assert (both.value, both.low, both.high) == (100.0, pytest.approx(88.2), pytest.approx(112.2))
    gain = ratio(pair, [estimate(100.0, spread=0.02)] * 2)
    assert gain is not None
    assert (gain.low, gain.high) == (pytest.approx(88.2 / 102), pytest.approx(112.2 / 98))


@pytest.mark.parametrize("degrees", [4, 19])
def test_most_launches_keep_the_share_that_is_promised_of_another(degrees: int) -> None:
    """A rate that was safe on a lucky launch is deployed on an unlucky one: both have their part in the difference."""
    rng, sd, num = np.random.default_rng(3), 0.04, 20_000
    told = sd * np.sqrt(rng.chisquare(degrees, num) / degrees)
    noises = [LaunchNoise(relative_sd=each, num_launches=9, degrees_of_freedom=degrees) for each in told]
    promised = np.array([kept_by_another(noise) for noise in noises])
    kept = np.exp(sd * (rng.standard_normal(num) - rng.standard_normal(num)))
    assert 0.95 <= (kept >= promised).mean() <= 0.985
    assert kept_by_another(LaunchNoise(relative_sd=0.0, num_launches=9, degrees_of_freedom=degrees)) == 1.0
    # However far launches lie apart, the rate to hold arrivals to at the gateway is never none at all.
    assert 0 < kept_by_another(LaunchNoise(relative_sd=0.9, num_launches=9, degrees_of_freedom=degrees)) < 0.1
