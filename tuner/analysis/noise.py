"""How much launches of one setting differ from each other, beyond what each stage's own interval shows.

A stage's interval knows what happens while it runs. Threads land on other cores and memory on other pages at every
start: that part is the same for all stages of a launch and is seen only beside another launch. In a closed loop every
fence at or above the load, and every share that preempts nothing, gives the same schedule: so a study measures one
schedule by several launches without meaning to, and what those differ by is noise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from tuner.answer import LaunchNoise
from tuner.measure.latency import student_t_975
from tuner.records import EngineConfig, Estimate, Measured, StageKind, StageRecord, TrialRecord

FEWEST_DEGREES = 4
"""Of freedom: a variance told from fewer is a guess."""

_MOST_DEGREES = 19
_SHARED_KINDS = frozenset({StageKind.LADDER, StageKind.BISECT, StageKind.OPERATING})

_Log = tuple[float, float]
"""Log throughput, and its variance within the stage."""


def launch_noise(trials: Iterable[TrialRecord]) -> LaunchNoise | None:
    """Estimate the variance between launches from schedules that several of them measured.

    One-way analysis of variance with random effects: a launch's effect is the mean over loads of how far it lies from
    its schedule's mean; from the variance of those effects goes what the stages' own intervals explain.

    Returns:
        None where too few schedules were launched more than once.
    """
    squares, degrees, explained, num_launches = 0.0, 0, [], 0
    for launches in _schedules(trials).values():
        effects = _effects(launches)
        if len(effects) < 2:
            continue
        squares += sum(effect**2 for effect, _ in effects)
        explained += [within for _, within in effects]
        degrees += len(effects) - 1
        num_launches += len(effects)
    if degrees < FEWEST_DEGREES:
        return None
    within = float(np.mean(explained))
    return LaunchNoise(
        relative_sd=math.sqrt(max(0.0, squares / degrees - within)),
        num_launches=num_launches,
        degrees_of_freedom=degrees,
    )


def widened(estimate: Estimate, noise: LaunchNoise | None) -> Estimate:
    """One launch's throughput with an interval that holds what another launch would measure."""
    if noise is None or estimate.low is None or estimate.high is None or not estimate.value > 0:
        return estimate
    between = _student_t(noise) * noise.relative_sd * estimate.value
    low = estimate.value - math.hypot(estimate.value - estimate.low, between)
    high = estimate.value + math.hypot(estimate.high - estimate.value, between)
    return estimate.model_copy(update={"low": max(0.0, low), "high": high})


def relative_half_width(estimates: Sequence[Estimate], noise: LaunchNoise) -> float | None:
    """Of the mean over launches: half of its 95 % interval as a share of it; None where a launch gave no interval."""
    variances = [_within(estimate) for estimate in estimates]
    known = [variance for variance in variances if variance is not None]
    if not known or len(known) < len(variances):
        return None
    between = len(known) * noise.relative_sd**2
    return _student_t(noise) * math.sqrt(math.fsum(known) + between) / len(known)


def _student_t(noise: LaunchNoise) -> float:
    return student_t_975(min(noise.degrees_of_freedom, _MOST_DEGREES))


def _schedules(trials: Iterable[TrialRecord]) -> dict[tuple[EngineConfig, str], dict[int, dict[float, _Log]]]:
    """By schedule and trial: what each load gave."""
    found: dict[tuple[EngineConfig, str], dict[int, dict[float, _Log]]] = defaultdict(lambda: defaultdict(dict))
    for trial in trials:
        if not isinstance(trial.outcome, Measured):
            continue
        # Neither the fence nor the share touches a stage that is below the one and preempts nothing.
        schedule = trial.config.fenced(1).model_copy(update={"gpu_memory_utilization": 1.0})
        for stage in trial.outcome.stages:
            variance = _within(stage.output_throughput)
            if variance is not None and _is_shared(stage):
                point = math.log(stage.output_throughput.value), variance
                found[schedule, stage.workload_hash][trial.number].setdefault(stage.load, point)
    return found


def _is_shared(stage: StageRecord) -> bool:
    return stage.valid and not stage.fenced and stage.kind in _SHARED_KINDS and stage.num_preemptions == 0


def _within(estimate: Estimate) -> float | None:
    """Variance of the log throughput within a stage."""
    if estimate.low is None or estimate.high is None or not estimate.value > 0:
        return None
    return ((estimate.high - estimate.low) / 2 / 1.96 / estimate.value) ** 2


def _effects(launches: dict[int, dict[float, _Log]]) -> list[tuple[float, float]]:
    """Of each launch that shares a load with another: its effect, and the variance its stages leave in it."""
    by_load: dict[float, list[float]] = defaultdict(list)
    for stages in launches.values():
        for load, (log_throughput, _) in stages.items():
            by_load[load].append(log_throughput)
    effects = []
    for stages in launches.values():
        shared = {load: point for load, point in stages.items() if len(by_load[load]) > 1}
        if shared:
            offsets = [point[0] - float(np.mean(by_load[load])) for load, point in shared.items()]
            within = math.fsum(point[1] for point in shared.values()) / len(shared) ** 2
            effects.append((float(np.mean(offsets)), within))
    return effects
