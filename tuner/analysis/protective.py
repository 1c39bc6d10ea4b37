"""Choosing the protective profile: what may be tried, in which order, and what the burst says of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.analysis.capacity import is_inside
from tuner.analysis.graph_grid import stages_to_stand_on
from tuner.analysis.pareto import smaller_first
from tuner.analysis.profiles import open_stages, studied
from tuner.analysis.slo import KV_HEADROOM, complies, keeps_headroom, violations
from tuner.answer import BurstEvidence, Slo
from tuner.engine_config import EngineConfig
from tuner.records import EngineFacts, Estimate, RequestRecord, StageRecord, TrialRecord

MEANINGFUL_CUT = 0.8
"""A parameter is meaningfully lower at this share of the ceiling's or less."""

LIVABLE = 0.5
"""A fallback that serves less than this share of production's throughput comes after all that serve more: at 3 a.m. it
would turn most of the users away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectiveCandidate:
    """A smaller config that was measured, and what each cut is for."""

    trial: int
    stage: StageRecord
    """The stage that speaks for it: at its fence, or above it where that holds more than the KV blocks do."""

    users: int
    """The load of its operating point: the stage's, or its fence where that was lowered."""

    config: EngineConfig
    cuts: tuple[str, ...]

    @property
    def least_tokens_per_s(self) -> float:
        """What it serves at least: throughput bends downwards, so that half the load gives more than half of it."""
        return self.stage.output_throughput.value * self.users / self.stage.users


def choose_protective(
    ceiling: EngineConfig,
    trials: Sequence[TrialRecord],
    slo: Slo,
    *,
    burst_tokens: int | None = None,
    production_tokens_per_s: float = 0.0,
) -> list[ProtectiveCandidate]:
    """Measured configs below the ceiling, best first: no parameter above it, sequences or budget at least 20 % below.

    A stage at load L answers for the fence L of its trial's config; where its KV blocks hold fewer of the burst's
    longest requests, for a fence of so many. A smaller share is only taken with fewer sequences. First come those whose
    KV blocks hold the burst, then those whose stage met the SLO with headroom, then those that serve at least `LIVABLE`
    of production's throughput, then those that cut both sequences and budget, then by throughput.

    Args:
        ceiling: production's config, or the defaults where there is no production.
        trials: any trials; only measured study trials count.
        slo: limits, for the order.
        burst_tokens: prompt and output tokens of the burst's longest request; None where the burst is not known.
        production_tokens_per_s: at its operating point; 0 where there is no production.
    """
    ranked = []
    for trial, measured in studied(trials):
        for stage in open_stages(stages_to_stand_on(measured)):
            fence = min(stage.users, trial.config.fence)
            held = _most_held(measured.facts, burst_tokens)
            lowered = fence if held is None else max(1, min(fence, held))
            config = _below(ceiling, trial.config, lowered)
            if config is None:
                continue
            candidate = ProtectiveCandidate(
                trial=trial.number,
                stage=stage,
                users=stage.users if lowered == fence else lowered,
                config=config,
                cuts=_cuts(config, ceiling),
            )
            order = (
                held is not None and config.max_num_seqs > held,
                not (complies(stage, slo) and keeps_headroom(stage)),
                candidate.least_tokens_per_s < LIVABLE * production_tokens_per_s,
                not (config.max_num_seqs < ceiling.max_num_seqs and _meaningful_budget_cut(config, ceiling)),
                -candidate.least_tokens_per_s,
                *smaller_first(config),
                trial.number,
                stage.index,
            )
            ranked.append((order, candidate))
    ranked.sort(key=lambda entry: entry[0])
    first_of_each: dict[tuple[int, int, float], ProtectiveCandidate] = {}
    for _, candidate in ranked:
        first_of_each.setdefault(smaller_first(candidate.config), candidate)
    return list(first_of_each.values()) or _halved_budget(ceiling, trials)


def next_candidate(
    candidates: Sequence[ProtectiveCandidate], tried: Sequence[tuple[EngineConfig, bool]]
) -> ProtectiveCandidate | None:
    """The next to hit with the burst: the best that differs clearly from all tried, and is below all that did not hold.

    Args:
        candidates: best first.
        tried: the configs hit already, and whether each held.
    """

    def says_more(config: EngineConfig) -> bool:
        return all(_differs(config, other) and (held or _is_below(config, other)) for other, held in tried)

    return next((candidate for candidate in candidates if says_more(candidate.config)), None)


def _differs(config: EngineConfig, other: EngineConfig) -> bool:
    pairs = (
        (config.max_num_seqs, other.max_num_seqs),
        (config.max_num_batched_tokens, other.max_num_batched_tokens),
    )
    return any(min(pair) <= MEANINGFUL_CUT * max(pair) for pair in pairs)


def _is_below(config: EngineConfig, other: EngineConfig) -> bool:
    return all(mine <= limit for mine, limit in zip(smaller_first(config), smaller_first(other), strict=True))


def judge_burst(stage: StageRecord, requests: Sequence[RequestRecord], slo: Slo) -> BurstEvidence:
    """What the burst did. It is passed without preemption or failure, with p95 ITL inside the SLO and KV headroom.

    Unknown figures fail. p95 TTFT over its limit is said among the reasons but does not fail: without admission valves
    TTFT at twice the knee's load is time spent in the queue, which says nothing about the setting. Goodput counts it.
    """
    usage = stage.kv_cache_usage_peak
    over = violations(stage, slo)
    failures = [
        (not stage.valid, f"the stage is invalid: {'; '.join(stage.invalid_reasons)}"),
        (stage.is_unknown("num_preemptions"), "preemptions are unknown"),
        ((stage.num_preemptions or 0) > 0, f"{stage.num_preemptions} preemptions"),
        (stage.num_failed > 0, f"{stage.num_failed} requests failed: {stage.first_error}"),
        (stage.num_completed == 0, "no request was completed"),
        (over["itl_p95"] > 0, _over("p95 ITL", stage.itl_p95_ms, slo.itl_p95_ms)),
        (stage.is_unknown("kv_cache_usage_peak"), "peak KV use is unknown"),
        (usage is not None and usage > 1 - KV_HEADROOM, f"KV use peaked at {usage or 0.0:.0%}: under 5 % is left"),
    ]
    reasons = [reason for failed, reason in failures if failed]
    passed = not reasons
    if over["ttft_p95"] > 0:
        reasons.append(f"{_over('p95 TTFT', stage.ttft_p95_ms, slo.ttft_p95_ms)}: requests queue")
    good = sum(is_inside(request, slo) for request in requests if not request.warm_up)
    return BurstEvidence(
        load=stage.load,
        num_completed=stage.num_completed,
        num_failed=stage.num_failed,
        num_rejected=stage.num_rejected,
        num_preemptions=stage.num_preemptions,
        ttft_p95_ms=stage.ttft_p95_ms,
        itl_p95_ms=stage.itl_p95_ms,
        goodput_rps=good / stage.measured_s if stage.measured_s > 0 else 0.0,
        kv_cache_usage_peak=usage,
        not_applicable=stage.not_applicable,
        passed=passed,
        reasons=tuple(reasons),
    )


def _below(ceiling: EngineConfig, measured: EngineConfig, load: int) -> EngineConfig | None:
    """The measured config with its fence at `load`, if that makes it a protective one under the ceiling."""
    tuned = {
        "max_num_seqs": load,
        "max_num_active_seqs": None,
        "max_num_batched_tokens": measured.max_num_batched_tokens,
        "gpu_memory_utilization": measured.gpu_memory_utilization,
    }
    config = ceiling.model_copy(update=tuned)
    same_otherwise = measured.model_copy(update={**tuned, "max_model_len": ceiling.max_model_len}) == config
    fewer = load <= MEANINGFUL_CUT * ceiling.max_num_seqs
    share_alone = config.share < ceiling.share and load == ceiling.max_num_seqs
    lower = (fewer or _meaningful_budget_cut(config, ceiling)) and not share_alone
    return config if same_otherwise and _is_below(config, ceiling) and lower else None


def _meaningful_budget_cut(config: EngineConfig, ceiling: EngineConfig) -> bool:
    return config.max_num_batched_tokens <= MEANINGFUL_CUT * ceiling.max_num_batched_tokens


def _most_held(facts: EngineFacts, burst_tokens: int | None) -> int | None:
    """How many of the burst's longest requests fit the KV blocks with headroom; None where that is not known."""
    if burst_tokens is None or facts.num_gpu_blocks is None or facts.block_size is None:
        return None
    # Of a trace, what is longer than the context is not sent.
    longest = min(burst_tokens, facts.max_model_len)
    return int((1 - KV_HEADROOM) * facts.num_gpu_blocks) // math.ceil(longest / facts.block_size)


def _halved_budget(ceiling: EngineConfig, trials: Sequence[TrialRecord]) -> list[ProtectiveCandidate]:
    """Where nothing smaller was measured (production at load 1): half the budget, with the stage above it as a hint."""
    budget = max(ceiling.max_num_seqs, ceiling.max_num_batched_tokens // 2)
    scheduled = min(budget, ceiling.max_num_scheduled_tokens or budget)
    cut = {"max_num_batched_tokens": budget, "max_num_scheduled_tokens": scheduled if scheduled < budget else None}
    config = ceiling.model_copy(update=cut)
    if not _meaningful_budget_cut(config, ceiling):
        return []
    stages = [
        (abs(stage.load - ceiling.max_num_seqs), trial.number, stage)
        for trial, measured in studied(trials)
        for stage in open_stages(measured.stages)
    ]
    if not stages:
        return []
    _, trial_number, stage = min(stages, key=lambda entry: (entry[0], entry[1], entry[2].index))
    cuts = _cuts(config, ceiling)
    return [ProtectiveCandidate(trial=trial_number, stage=stage, users=stage.users, config=config, cuts=cuts)]


def _cuts(config: EngineConfig, ceiling: EngineConfig) -> tuple[str, ...]:
    """Each parameter below the ceiling's and the failure it answers."""
    pairs = [
        ("max_num_batched_tokens", "long prompts stall decoding, and a smaller budget shortens each stall"),
        ("max_num_seqs", "KV pressure: fewer sequences hold fewer KV blocks and are not preempted"),
        ("gpu_memory_utilization", "out of memory: a smaller share, with fewer sequences, leaves the device room"),
    ]
    return tuple(
        f"{name} {getattr(ceiling, name):g} to {getattr(config, name):g}: {why}"
        for name, why in pairs
        if getattr(ceiling, name) is not None and getattr(config, name) < getattr(ceiling, name)
    )


def _over(name: str, measured: Estimate, limit_ms: float) -> str:
    """Why a p95 does not count as inside its limit: it is over it, or too few samples carry it."""
    if measured.value <= limit_ms:
        return f"{name} {_figure(measured.value)} of {limit_ms:.4g} ms rests on {measured.num_samples} samples: too few"
    return f"{name} {_figure(measured.value)} is over {limit_ms:.4g} ms"


def _figure(value: float) -> str:
    return f"{value:.4g} ms" if math.isfinite(value) else "unknown"
