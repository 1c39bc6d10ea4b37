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
from dataclasses import dataclass

import numpy as np

from tuner.answer import LaunchNoise
from tuner.engine_config import EngineConfig
from tuner.measure.latency import student_t_975
from tuner.records import Estimate, Measured, StageKind, StageRecord, TrialRecord

FEWEST_DEGREES = 4
"""Of freedom: a variance told from fewer is a guess."""

_MOST_DEGREES = 19
_SHARED_KINDS = frozenset({StageKind.LADDER, StageKind.BISECT, StageKind.OPERATING})

_RANK_TOLERANCE = 1e-9

_Log = tuple[float, float]
"""Log throughput, and its variance within the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effects:
    """How far the launches of one schedule lie from each other."""

    squares: float
    """Of their effects on log throughput, added up."""

    explained: float
    """How much of that the stages' own noise gives in expectation."""

    degrees: int
    num_launches: int
    """That share a load with another."""


def launch_noise(trials: Iterable[TrialRecord]) -> LaunchNoise | None:
    """Estimate the variance between launches from schedules that several of them measured.

    Two-way analysis of variance, loads fixed and launches random: launches of one schedule are compared at the loads
    they share, directly or by way of others; from the variance of their effects goes what the stages' own intervals
    explain. Launches that no chain of shared loads connects say nothing of each other, so each connected set has a mean
    of its own and costs a degree of freedom.

    Returns:
        None where too few schedules were launched more than once.
    """
    schedules = [_effects(launches) for launches in _schedules(trials).values()]
    degrees = sum(effects.degrees for effects in schedules)
    if degrees < FEWEST_DEGREES:
        return None
    between = math.fsum(effects.squares - effects.explained for effects in schedules)
    return LaunchNoise(
        relative_sd=math.sqrt(max(0.0, between / degrees)),
        num_launches=sum(effects.num_launches for effects in schedules),
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


def kept_by_another(noise: LaunchNoise) -> float:
    """The share of one launch's speed that another launch of the setting keeps, 95 % sure: the logs of both scatter."""
    return math.exp(-math.sqrt(2.0) * _student_t(noise) * noise.relative_sd)


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
    return stage.valid and not stage.fenced and stage.kind in _SHARED_KINDS and stage.has_no_preemptions


def _within(estimate: Estimate) -> float | None:
    """Variance of the log throughput within a stage."""
    if estimate.low is None or estimate.high is None or not estimate.value > 0:
        return None
    return ((estimate.high - estimate.low) / 2 / 1.96 / estimate.value) ** 2


def _effects(launches: dict[int, dict[float, _Log]]) -> _Effects:
    """Least squares for log throughput = load + launch, each connected set of launches about its own mean."""
    numbers = sorted(launches)
    rows = [(number, load, *point) for number in numbers for load, point in sorted(launches[number].items())]
    loads = np.array([load for _, load, _, _ in rows])
    log_throughput, variances = np.array([[seen, variance] for _, _, seen, variance in rows]).T
    is_of = np.array([[number == of for of in numbers] for number, _, _, _ in rows], dtype=np.float64)
    same_load = (loads[:, None] == loads).astype(np.float64)
    about_load = np.eye(len(rows)) - same_load / same_load.sum(axis=1, keepdims=True)
    design = about_load @ is_of
    # What the design cannot tell apart are the means of connected sets; the pseudoinverse sets those to zero.
    solve = np.linalg.pinv(design, rtol=_RANK_TOLERANCE) @ about_load
    return _Effects(
        squares=float(np.sum((solve @ log_throughput) ** 2)),
        explained=float(np.sum(solve**2 @ variances)),
        degrees=int(np.linalg.matrix_rank(design, rtol=_RANK_TOLERANCE)),
        num_launches=int((np.abs(design) > _RANK_TOLERANCE).any(axis=0).sum()),
    )
