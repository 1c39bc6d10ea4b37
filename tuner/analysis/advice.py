"""For each parameter, whether moving it can still help where the curve bends, and the figure that says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tuner.analysis.cross_checks import SMALL_GAIN_PER_DOUBLING
from tuner.analysis.diagnosis import (
    FULL_BUDGET,
    FULL_KV_CACHE,
    Bend,
    Finding,
    bend_of,
    budget_use,
    climbed,
    step_budget,
)
from tuner.analysis.slo import over_within_the_fence
from tuner.answer import Advice, KneeFinding, Slo
from tuner.engine_config import EngineConfig
from tuner.memory_model import MemoryModel
from tuner.records import EngineFacts, StageRecord
from tuner.wording import number

KV_WORTH_HALVING = 0.2
"""Share of the bytes read from which fewer bytes a token of keys and values make themselves felt: a tenth of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What the advice rests on."""

    finding: Finding
    bend: Bend | None
    config: EngineConfig
    facts: EngineFacts | None
    over: str
    """Which limits the highest load within the fence is over, in words; empty: none is known to be."""

    evidence: str
    """Why the binding is what it is, in the diagnosis' last words."""

    @property
    def kv_use(self) -> float | None:
        """The most of the KV cache seen in use past the bend."""
        return None if self.bend is None else self.bend.past.kv_cache_usage_peak

    @property
    def kv_is_free(self) -> bool:
        """Whether the KV cache is known to have room past the bend."""
        return self.kv_use is not None and self.kv_use < FULL_KV_CACHE and self.finding.binding != "kv_blocks"


def advise(
    finding: Finding,
    stages: Sequence[StageRecord],
    knee: KneeFinding,
    config: EngineConfig,
    facts: EngineFacts | None = None,
    slo: Slo | None = None,
) -> tuple[Advice, ...]:
    """One piece of advice a parameter, in the order in which a person would think of them.

    Args:
        finding: what `diagnose` found on the same stages.
        slo: the limits in force, where there are any: what they rule out does not help.
    """
    evidence = finding.evidence[-1] if finding.evidence else "the stages do not tell what saturates"
    top = climbed(stages)[-1:]
    over = "" if slo is None or not top else over_within_the_fence(top[0], slo)
    bend = bend_of(stages, knee)
    case = _Case(finding=finding, bend=bend, config=config, facts=facts, over=over, evidence=evidence)
    return (
        _max_num_seqs(case),
        _max_num_batched_tokens(case),
        *(() if config.gpu_memory_utilization is None else (_gpu_memory_utilization(case),)),
        _max_model_len(case),
        _kv_cache_dtype(case),
        _tensor_parallel_size(case),
    )


def _max_num_seqs(case: _Case) -> Advice:
    name, change, bend = "max_num_seqs", "raised", case.bend
    if case.finding.binding == "fence" and case.over:
        why = (
            f"within the fence of {case.config.fence} {case.over} already: the limits are left before the fence is met"
        )
        return Advice(parameter=name, change=change, effect="cannot_help", why=why)
    if case.finding.binding == "fence":
        return Advice(parameter=name, change=change, effect="can_help", why=case.evidence)
    if bend is None or bend.past.load == bend.first.load:
        return Advice(parameter=name, change=change, effect="unknown", why=case.evidence)
    first, past = bend.first, bend.past
    buys = (
        f"past the knee load {first.load} to {past.load} buys {bend.gain - 1:+.0%} throughput, while p95 ITL goes from "
        f"{number(first.itl_p95_ms.value)} to {number(past.itl_p95_ms.value)} ms"
    )
    hurts = math.log(bend.gain) < math.log2(SMALL_GAIN_PER_DOUBLING) * math.log(past.load / first.load)
    preempted = (past.num_preemptions or 0) > 0
    if preempted:
        buys = f"{buys}, with {past.num_preemptions} preemptions"
    # A gain that is not small contradicts the knee: noise, so the stage past it does not tell.
    effect: Literal["would_hurt", "unknown"] = "would_hurt" if hurts or preempted else "unknown"
    return Advice(parameter=name, change=change, effect=effect, why=buys)


def _max_num_batched_tokens(case: _Case) -> Advice:
    name, change = "max_num_batched_tokens", "raised"
    full = None if case.bend is None else budget_use(case.bend.past, case.config)
    budget = step_budget(case.config)
    if case.finding.binding == "token_budget":
        why = f"{case.evidence}; TTFT falls, and a longer step raises ITL"
        return Advice(parameter=name, change=change, effect="can_help", why=why)
    if full is None:
        return Advice(parameter=name, change=change, effect="unknown", why="the engine does not count a step's tokens")
    held = f"a step past the knee holds {full:.0%} of the budget of {budget} tokens"
    if full < FULL_BUDGET:
        return Advice(parameter=name, change=change, effect="cannot_help", why=held)
    return Advice(parameter=name, change=change, effect="cannot_help", why=f"{held}, and nothing waits for more")


def _gpu_memory_utilization(case: _Case) -> Advice:
    name, change = "gpu_memory_utilization", "raised"
    if case.kv_is_free:
        why = f"at most {case.kv_use:.0%} of the KV cache was in use past the knee"
        return Advice(parameter=name, change=change, effect="cannot_help", why=why)
    if case.finding.binding != "kv_blocks":
        return Advice(parameter=name, change=change, effect="unknown", why="how full the KV cache was is unknown")
    memory = None if case.facts is None else MemoryModel.calibrated(case.config, case.facts)
    worth = (
        "" if memory is None else f"; 0.01 of the device is {0.01 * memory.total_bytes / memory.block_bytes:.0f} blocks"
    )
    return Advice(parameter=name, change=change, effect="can_help", why=f"{case.evidence}{worth}")


def _max_model_len(case: _Case) -> Advice:
    name, change, bend = "max_model_len", "lowered", case.bend
    if bend is None:
        return Advice(parameter=name, change=change, effect="unknown", why=case.evidence)
    if "kv_cache_usage_peak" in bend.past.not_applicable:
        why = "the engine has no KV blocks to tell of: what a shorter length frees is not known"
        return Advice(parameter=name, change=change, effect="unknown", why=why)
    tokens = bend.past.mean_prompt_tokens + bend.past.mean_output_tokens
    why = f"blocks are taken by tokens in use, {number(tokens)} a request here, and not by the length that is allowed"
    return Advice(parameter=name, change=change, effect="cannot_help", why=why)


def _kv_cache_dtype(case: _Case) -> Advice:
    name, change = "kv_cache_dtype", "fp8"
    if case.config.kv_cache_dtype.startswith("fp8"):
        return Advice(parameter=name, change=change, effect="cannot_help", why="the KV cache is kept in it already")
    if case.finding.binding == "kv_blocks":
        why = f"{case.evidence}; a token then takes half the bytes of a 16-bit one or less: check the output's quality"
        return Advice(parameter=name, change=change, effect="can_help", why=why)
    shares = case.finding.shares
    if case.finding.binding == "memory_bandwidth" and shares is not None and shares.kv_bytes_share is not None:
        why = f"keys and values are {shares.kv_bytes_share:.0%} of the bytes a step reads"
        helps = shares.kv_bytes_share >= KV_WORTH_HALVING
        return Advice(parameter=name, change=change, effect="can_help" if helps else "cannot_help", why=why)
    if case.finding.binding is None or not case.kv_is_free:
        return Advice(parameter=name, change=change, effect="unknown", why=case.evidence)
    why = f"{case.kv_use:.0%} of the KV cache was in use at the most, and reading it is not what saturates"
    return Advice(parameter=name, change=change, effect="cannot_help", why=why)


def _tensor_parallel_size(case: _Case) -> Advice:
    name, change, found = "tensor_parallel_size", "doubled", case.finding.binding
    if case.facts is not None and case.facts.device.startswith("cpu"):
        return Advice(
            parameter=name, change=change, effect="cannot_help", why=f"the engine computes on one {case.facts.device}"
        )
    if found in ("compute", "memory_bandwidth"):
        why = f"{case.evidence}; each device then does half, for twice the devices: compare with two replicas"
        return Advice(parameter=name, change=change, effect="can_help", why=why)
    if found == "kv_blocks":
        weights = None if case.facts is None else case.facts.weights_bytes
        room = "" if weights is None else f": {weights / 2**31:.2g} GiB of weights leave each device"
        return Advice(parameter=name, change=change, effect="can_help", why=f"{case.evidence}{room}")
    if found is None:
        return Advice(parameter=name, change=change, effect="unknown", why=case.evidence)
    return Advice(
        parameter=name, change=change, effect="cannot_help", why=f"a device is not what saturates: {case.evidence}"
    )
