"""The answer's diagnosis and capacity, put together from the choice, the trials and what single requests tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.analysis.advice import advise
from tuner.analysis.capacity import Attainment, capacity
from tuner.analysis.diagnosis import climbed, diagnose, step_budget
from tuner.analysis.mix import Mix, Tuned
from tuner.analysis.profiles import ProductionChoice
from tuner.analysis.roofline import step_ms
from tuner.analysis.symptoms import symptoms
from tuner.answer import Capacity, Diagnosis, Expected, Profile, Slo
from tuner.memory_model import MemoryModel
from tuner.records import Estimate, Measured, TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What single requests of the knee's trial tell."""

    closed: tuple[Attainment, ...] = ()
    """Each closed-loop stage of its climb."""

    open: tuple[Attainment, ...] = ()
    """Each stage under a rate."""

    mix: Mix | None = None
    """Lengths at the operating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the job says of the deployment."""

    expected: Expected | None = None
    price_per_device_hour: float | None = None


def diagnosis_of(
    choice: ProductionChoice | None,
    trials: Sequence[TrialRecord],
    production: Profile | None,
    protective: Profile | None,
    slo: Slo | None,
    mix: Mix | None,
) -> Diagnosis:
    """What binds at the knee, what still helps, and the symptom table; without a choice only what failures tell."""
    if choice is None or not isinstance(choice.trial.outcome, Measured):
        return Diagnosis(binding=None, symptoms=symptoms(trials, production, protective, slo, None))
    outcome, config = choice.trial.outcome, choice.trial.config
    finding = diagnose(outcome.stages, choice.knee, config, outcome.facts)
    tuned = None if production is None or slo is None or mix is None else _tuned(choice, outcome, production, slo, mix)
    return Diagnosis(
        binding=finding.binding,
        evidence=finding.evidence,
        advice=advise(finding, outcome.stages, choice.knee, config, outcome.facts, slo),
        symptoms=symptoms(trials, production, protective, slo, tuned),
    )


def capacity_of(
    production: Profile | None,
    choice: ProductionChoice | None,
    slo: Slo | None,
    requests: Requests,
    wanted: Wanted,
    safe_rate_rps: Estimate | None = None,
) -> Capacity | None:
    """What a replica of production holds; None without production."""
    if production is None or choice is None or slo is None:
        return None
    tokens = choice.stage.mean_output_tokens
    throughput = production.operating_point.output_throughput
    rate = Estimate(
        value=throughput.value / tokens if tokens > 0 else math.nan,
        low=None if throughput.low is None or not tokens > 0 else throughput.low / tokens,
        high=None if throughput.high is None or not tokens > 0 else throughput.high / tokens,
        num_samples=throughput.num_samples,
    )
    return capacity(
        production,
        closed=requests.closed,
        open_=requests.open,
        target=slo.attainment,
        request_rate_rps=rate,
        safe_rate_rps=safe_rate_rps,
        expected=wanted.expected,
        price_per_device_hour=wanted.price_per_device_hour,
        mean_output_tokens=tokens,
    )


def _tuned(choice: ProductionChoice, outcome: Measured, production: Profile, slo: Slo, mix: Mix) -> Tuned | None:
    """Production's figures for a changed mix of lengths; None where the unloaded engine or the step is not known."""
    ladder, step = climbed(outcome.stages), step_ms(choice.stage)
    if step is None or not ladder or ladder[0].load != 1 or not ladder[0].ttft_p50_ms.value > 0:
        return None
    point, memory = production.operating_point, MemoryModel.calibrated(choice.trial.config, outcome.facts)
    return Tuned(
        mix=mix,
        running=point.load,
        budget=step_budget(production.config),
        kv_tokens=None if memory is None else float(memory.num_blocks(production.config) * memory.block_size),
        step_ms=step,
        prefill_tokens_per_ms=ladder[0].mean_prompt_tokens / ladder[0].ttft_p50_ms.value,
        ttft_p95_ms=point.ttft_p95_ms.value,
        itl_p95_ms=point.itl_p95_ms.value,
        slo=slo,
    )
