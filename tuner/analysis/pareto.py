"""The Pareto front over (config, stage) points: throughput of a device up, p95 TTFT down, p95 ITL down.

Throughput is counted by the device, as a config that takes eight of them must bring eight times as much to be level.
Points closer than their noise do not dominate each other: two figures whose intervals overlap are a tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.analysis.curve import DEFAULT_RELATIVE_NOISE
from tuner.analysis.noise import launch_noise, widened
from tuner.answer import LaunchNoise, ParetoPoint
from tuner.engine_config import EngineConfig
from tuner.records import Estimate, Measured, StageRecord, TrialRecord, TrialRole


@dataclass(frozen=True, slots=True)
class Candidate:
    """One stage of one config, as a point to be compared."""

    trial: int
    config: EngineConfig
    stage: StageRecord

    @property
    def by_device(self) -> StageRecord:
        """The stage with the throughput of one of the devices it took."""
        throughput = per_device(self.stage.output_throughput, self.config)
        return self.stage.model_copy(update={"output_throughput": throughput})


def smaller_first(config: EngineConfig) -> tuple[int, int, float]:
    """Sort key by which ties go to the smaller setting: it exposes less."""
    return config.max_num_seqs, config.max_num_batched_tokens, config.share


def per_device(throughput: Estimate, config: EngineConfig) -> Estimate:
    """What one of the config's devices contributes."""
    num_devices = config.num_devices
    low, high = (None if end is None else end / num_devices for end in (throughput.low, throughput.high))
    return throughput.model_copy(update={"value": throughput.value / num_devices, "low": low, "high": high})


def interval(estimate: Estimate) -> tuple[float, float]:
    """The figure's interval; where it has none, the default noise on either side."""
    if estimate.low is not None and estimate.high is not None:
        return estimate.low, estimate.high
    width = 1.96 * DEFAULT_RELATIVE_NOISE * abs(estimate.value)
    return estimate.value - width, estimate.value + width


def overlap(first: Estimate, second: Estimate) -> bool:
    """Whether two figures are closer than their noise."""
    first_low, first_high = interval(first)
    second_low, second_high = interval(second)
    return first_low <= second_high and second_low <= first_high


def dominates(first: StageRecord, second: StageRecord) -> bool:
    """Whether the first is worse on no axis beyond noise, better on one, and better on balance.

    Ties by overlap are not transitive: `on balance` (the product of the three ratios is above 1) keeps three points
    from dominating each other in a circle.
    """
    axes = [
        _compare(first.output_throughput, second.output_throughput),
        _compare(second.ttft_p95_ms, first.ttft_p95_ms),
        _compare(second.itl_p95_ms, first.itl_p95_ms),
    ]
    return min(axes) >= 0 and max(axes) > 0 and _balance(first) > _balance(second)


def is_comparable(stage: StageRecord) -> bool:
    """Whether the stage may stand on a front: valid, every figure known, no p95 of too few samples."""
    figures = (stage.output_throughput, stage.ttft_p95_ms, stage.itl_p95_ms)
    proven = stage.ttft_p95_ms.has_interval and stage.itl_p95_ms.has_interval
    return stage.valid and proven and all(math.isfinite(figure.value) and figure.value > 0 for figure in figures)


def pareto_front(trials: Sequence[TrialRecord]) -> tuple[ParetoPoint, ...]:
    """The points of the study's measured trials that no other dominates, best throughput first.

    Identical points are all kept, the smaller setting first.
    """
    noise = launch_noise(trials)
    candidates = [
        Candidate(trial.number, trial.config, _with_launch_noise(stage, noise))
        for trial in trials
        if trial.role is TrialRole.STUDY and isinstance(trial.outcome, Measured)
        for stage in trial.outcome.stages
        if is_comparable(stage)
    ]
    judged = [candidate.by_device for candidate in candidates]
    beaten = [any(dominates(other, mine) for other in judged) for mine in judged]
    front = [candidate for candidate, is_beaten in zip(candidates, beaten, strict=True) if not is_beaten]
    front.sort(key=lambda point: (-point.stage.output_throughput.value, smaller_first(point.config), point.stage.load))
    return tuple(_pareto_point(point) for point in front)


def _with_launch_noise(stage: StageRecord, noise: LaunchNoise | None) -> StageRecord:
    return stage.model_copy(update={"output_throughput": widened(stage.output_throughput, noise)})


def _compare(higher: Estimate, lower: Estimate) -> int:
    """1 where the first is clearly larger, -1 where clearly smaller, 0 within noise."""
    if overlap(higher, lower):
        return 0
    return 1 if higher.value > lower.value else -1


def _balance(stage: StageRecord) -> float:
    return (
        math.log(stage.output_throughput.value) - math.log(stage.ttft_p95_ms.value) - math.log(stage.itl_p95_ms.value)
    )


def _pareto_point(point: Candidate) -> ParetoPoint:
    return ParetoPoint(
        trial=point.trial,
        stage=point.stage.index,
        config=point.config,
        load=point.stage.load,
        output_throughput=point.stage.output_throughput.value,
        output_throughput_per_device=point.by_device.output_throughput.value,
        ttft_p95_ms=point.stage.ttft_p95_ms.value,
        itl_p95_ms=point.stage.itl_p95_ms.value,
        peak_memory_bytes=point.stage.memory.in_use_peak_bytes,
        reserved_memory_bytes=point.stage.memory.reserved_bytes,
    )
