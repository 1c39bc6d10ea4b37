"""A whole small run as records, computed from a batch server's curve, so that its knee is known.

A step with n running requests takes base + `STEP_SLOPE_MS` x n; a large token budget adds to the base, and load above
the fence waits in the queue. With r = 4.5 such a curve bends at 4.5 x base / slope, for `CHOSEN` at 22 requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tuner.answer import (
    Advice,
    Baseline,
    BurstEvidence,
    Capacity,
    CrossChecks,
    Diagnosis,
    KneeFinding,
    LadderVerdict,
    OperatingPoint,
    ParetoPoint,
    Profile,
    Provenance,
    Recommendation,
    RunVerdict,
    Slo,
    Symptom,
    TimeSplit,
)
from tuner.engine_config import EngineConfig
from tuner.records import (
    EngineFacts,
    Estimate,
    Failed,
    FailureKind,
    Measured,
    MemoryFigures,
    StageKind,
    StageRecord,
    TrialRecord,
    TrialRole,
)

MIB = 2**20
DEVICE_BYTES = 2048 * MIB
WEIGHTS_BYTES = 116 * MIB
ACTIVATION_BYTES = 60 * MIB
KV_BYTES_A_REQUEST = 12 * MIB
STEP_BASE_MS = 10.0
STEP_SLOPE_MS = 2.25
OUTPUT_TOKENS = 64
KNEE = 22
SLO = Slo(ttft_p95_ms=900.0, itl_p95_ms=75.0, derived=True)

DEFAULTS = EngineConfig(max_num_seqs=256, max_num_batched_tokens=2048, gpu_memory_utilization=0.92)
CAUTIOUS = EngineConfig(max_num_seqs=16, max_num_batched_tokens=4096, gpu_memory_utilization=0.88, max_model_len=1024)
CHOSEN = EngineConfig(max_num_seqs=64, max_num_batched_tokens=1024, gpu_memory_utilization=0.70)
STARVED = EngineConfig(max_num_seqs=128, max_num_batched_tokens=2048, gpu_memory_utilization=0.30)
HOPELESS = EngineConfig(max_num_seqs=512, max_num_batched_tokens=8192, gpu_memory_utilization=0.08)
PRODUCTION = CHOSEN.model_copy(update={"max_num_seqs": 20})
PROTECTIVE = PRODUCTION.model_copy(update={"max_num_seqs": 12, "max_num_batched_tokens": 512})


class FakeRun(NamedTuple):
    """What a finished run's reader hands over."""

    recommendation: Recommendation
    trials: tuple[TrialRecord, ...]


def estimate(value: float, *, spread: float = 0.04, num_samples: int = 240) -> Estimate:
    """An estimate whose interval reaches `spread` to each side; under 59 samples it has none."""
    if num_samples < 59:
        return Estimate(value=value, num_samples=num_samples)
    return Estimate(value=value, low=value * (1 - spread), high=value * (1 + spread), num_samples=num_samples)


def stage(
    config: EngineConfig,
    load: int,
    *,
    index: int = 0,
    kind: StageKind = StageKind.LADDER,
    num_preemptions: int | None = None,
    invalid_reasons: tuple[str, ...] = (),
) -> StageRecord:
    """One stage of `config` at `load`, on the curve of this module."""
    running = min(load, config.fence)
    kv_bytes = max(int(config.share * DEVICE_BYTES) - WEIGHTS_BYTES - ACTIVATION_BYTES, MIB)
    pressure = running * KV_BYTES_A_REQUEST / kv_bytes
    preemptions = num_preemptions if num_preemptions is not None else max(0, round((pressure - 1) * 100))
    base_ms = STEP_BASE_MS + config.max_num_batched_tokens / 1024
    itl_ms = (base_ms + STEP_SLOPE_MS * running) * (1 + 0.2 * min(preemptions, 1))
    throughput = 1000 * running / itl_ms
    wait_ms = (load - running) * OUTPUT_TOKENS * itl_ms / running
    ttft_ms = 20 + 6.5 * running + wait_ms + config.max_num_batched_tokens / 50
    e2e_ms = ttft_ms + itl_ms * (OUTPUT_TOKENS - 1)
    samples = 24 if load == 1 else 60 + 4 * load
    return StageRecord(
        index=index,
        kind=kind,
        load=load,
        fenced=load > config.fence,
        workload_hash="9f2c41d07be1",
        warm_up_s=1.5,
        measured_s=6.0,
        wall_s=7.5,
        ended_by="precise" if load > 2 else "time",
        num_warm_up_requests=load,
        num_completed=samples,
        num_failed=0,
        num_rejected=0,
        output_throughput=estimate(throughput, spread=0.03, num_samples=max(samples, 59)),
        request_throughput_rps=throughput / OUTPUT_TOKENS,
        ttft_p50_ms=estimate(ttft_ms * 0.8, num_samples=samples),
        ttft_p95_ms=estimate(ttft_ms, spread=0.08, num_samples=samples),
        itl_p50_ms=estimate(itl_ms, num_samples=samples * OUTPUT_TOKENS),
        itl_p95_ms=estimate(itl_ms * 1.15, spread=0.05, num_samples=samples * OUTPUT_TOKENS),
        tpot_p50_ms=estimate(itl_ms, num_samples=samples),
        tpot_p95_ms=estimate(itl_ms * 1.1, num_samples=samples),
        e2e_p50_ms=estimate(e2e_ms, num_samples=samples),
        e2e_p95_ms=estimate(e2e_ms * 1.1, num_samples=samples),
        longest_stall_ms=itl_ms * 3,
        mean_prompt_tokens=128.0,
        mean_output_tokens=float(OUTPUT_TOKENS),
        mean_in_flight=load * 0.99,
        littles_law_ratio=1.01,
        send_slip_p95_ms=0.4,
        loop_lag_p95_ms=0.3,
        num_preemptions=preemptions,
        kv_cache_usage_peak=min(pressure, 1.0),
        mean_running=running * 0.98,
        mean_waiting=float(load - running),
        peak_running=running,
        memory=MemoryFigures(
            reserved_bytes=int(config.share * DEVICE_BYTES),
            in_use_peak_bytes=WEIGHTS_BYTES + ACTIVATION_BYTES + int(min(pressure, 1.0) * kv_bytes),
            device_peak_bytes=None,
        ),
        valid=not invalid_reasons,
        invalid_reasons=invalid_reasons,
    )


def rate_stage(config: EngineConfig, rate_rps: float, *, index: int = 0) -> StageRecord:
    """One stage of Poisson arrivals at `config`'s fence; from 0.9 of what its closed loop brings on queues grow."""
    ceiling_rps = stage(config, config.fence).request_throughput_rps
    grows = rate_rps > 0.9 * ceiling_rps
    made = stage(config, max(1, int(config.fence * rate_rps / ceiling_rps)), index=index)
    tail = {"ttft_p95_ms": estimate(1e5), "ended_by": "oversaturated"} if grows else {"ttft_p95_ms": estimate(100.0)}
    return made.model_copy(update={"kind": StageKind.RATE, "load": rate_rps, "loop": "open", **tail})


def facts(config: EngineConfig) -> EngineFacts:
    """What an engine started with `config` says of itself."""
    reserved = int(config.share * DEVICE_BYTES)
    return EngineFacts(
        engine="builtin",
        version="0.1.0",
        device="cpu",
        num_gpu_blocks=(reserved - WEIGHTS_BYTES - ACTIVATION_BYTES) // MIB,
        block_size=16,
        max_model_len=config.max_model_len or 2048,
        kv_block_bytes=MIB,
        memory_total_bytes=DEVICE_BYTES,
        memory_reserved_bytes=reserved,
        weights_bytes=WEIGHTS_BYTES,
        activation_peak_bytes=ACTIVATION_BYTES,
        captures_graphs=False,
    )


def ladder(config: EngineConfig) -> tuple[StageRecord, ...]:
    """Doubling 1 to 64, two bisections around the bend, and one stage at twice the fence."""
    steps = [(load, StageKind.LADDER) for load in (1, 2, 4, 8, 16, 32, 64) if load <= 2 * config.max_num_seqs]
    steps += [(load, StageKind.BISECT) for load in (20, 22) if load <= config.max_num_seqs]
    steps.append((2 * config.max_num_seqs, StageKind.OVERLOAD))
    return tuple(stage(config, load, index=index, kind=kind) for index, (load, kind) in enumerate(steps))


def trial(
    number: int,
    config: EngineConfig,
    *,
    origin: str = "sampler",
    role: TrialRole = TrialRole.STUDY,
    outcome: Measured | Failed | None = None,
) -> TrialRecord:
    """One trial; without an outcome it is measured on a whole ladder."""
    outcome = outcome or Measured(facts=facts(config), stages=ladder(config))
    measure_s = 0.0 if isinstance(outcome, Failed) else sum(stage.wall_s for stage in outcome.stages)
    return TrialRecord(
        number=number,
        role=role,
        config=config,
        origin=origin,
        outcome=outcome,
        start_s=4.0,
        measure_s=measure_s,
        wall_s=measure_s + 5.0,
    )


def study_trials() -> tuple[TrialRecord, ...]:
    """Nine study trials: one without room for KV blocks (number 3), one that preempts (number 4), 5 is the chosen."""
    no_memory = Failed(
        kind=FailureKind.NO_KV_MEMORY,
        detail="share 0.08 of 2048 MiB leaves 0 KV blocks after 116 MiB of weights; see trials/0003/engine.log",
    )
    sampled = [(32, 512, 0.80), (96, 4096, 0.85), (48, 1024, 0.60)]
    return (
        trial(0, DEFAULTS, origin="defaults"),
        trial(1, CAUTIOUS, origin="cautious_start"),
        trial(2, EngineConfig(max_num_seqs=128, max_num_batched_tokens=8192, gpu_memory_utilization=0.9)),
        trial(3, HOPELESS, outcome=no_memory),
        trial(4, STARVED),
        trial(5, CHOSEN),
        *(
            trial(6 + i, EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, gpu_memory_utilization=share))
            for i, (seqs, budget, share) in enumerate(sampled)
        ),
    )


def confirmation_trials() -> tuple[TrialRecord, ...]:
    """Production and the defaults in turn at 16 and 32, then protective under a burst at twice the knee."""
    return (
        _confirmation(9, TrialRole.CONFIRM_PRODUCTION, PRODUCTION, "production"),
        _confirmation(10, TrialRole.CONFIRM_BASELINE, DEFAULTS, "defaults"),
        _confirmation(11, TrialRole.CONFIRM_PRODUCTION, PRODUCTION, "production"),
        _confirmation(12, TrialRole.CONFIRM_BASELINE, DEFAULTS, "defaults"),
        _protective_confirmation(13),
    )


def _confirmation(number: int, role: TrialRole, config: EngineConfig, origin: str) -> TrialRecord:
    stages = (
        stage(config, 16, index=0, kind=StageKind.OPERATING),
        stage(config, 32, index=1, kind=StageKind.DOUBLE),
    )
    return trial(number, config, origin=origin, role=role, outcome=Measured(facts=facts(config), stages=stages))


def _protective_confirmation(number: int) -> TrialRecord:
    stages = (
        stage(PROTECTIVE, 12, index=0, kind=StageKind.OPERATING),
        stage(PROTECTIVE, 2 * KNEE, index=1, kind=StageKind.BURST),
    )
    outcome = Measured(facts=facts(PROTECTIVE), stages=stages)
    return trial(number, PROTECTIVE, origin="protective", role=TrialRole.CONFIRM_PROTECTIVE, outcome=outcome)


def operating_point(of: StageRecord) -> OperatingPoint:
    """The stage as an operating point."""
    return OperatingPoint(
        load=of.load,
        output_throughput=of.output_throughput,
        ttft_p95_ms=of.ttft_p95_ms,
        itl_p95_ms=of.itl_p95_ms,
        num_preemptions=of.num_preemptions,
        kv_cache_usage_peak=of.kv_cache_usage_peak,
        peak_memory_bytes=of.memory.in_use_peak_bytes,
        reserved_memory_bytes=of.memory.reserved_bytes,
    )


def knee_finding() -> KneeFinding:
    """The chosen trial's knee, bound by compute."""
    return KneeFinding(
        verdict=LadderVerdict.KNEE,
        load=float(KNEE),
        interval=(20.0, 25.0),
        cautious_load=5.0,
        binding="compute",
        signals=("step time grows with the batch from 16 on", "KV blocks at most 21 % in use at the knee"),
        cross_checks=CrossChecks(asymptote_crossing=4.9, usl=24.1, kneedle=16.0, ten_percent_per_doubling=32.0),
        warnings=("load 1 has 24 samples: its p95 is not ranked",),
    )


def diagnosis() -> Diagnosis:
    """Compute-bound, a piece of advice of each kind, and a symptom of each."""
    return Diagnosis(
        binding="compute",
        evidence=("by the prefill speed at load 1 computing takes 61% to 74% of it",),
        advice=(
            Advice(parameter="max_num_seqs", change="raised", effect="would_hurt", why="+2% throughput past load 22"),
            Advice(parameter="kv_cache_dtype", change="fp8", effect="cannot_help", why="21% of KV in use"),
            Advice(parameter="tensor_parallel_size", change="doubled", effect="can_help", why="each does half"),
        ),
        symptoms=(
            Symptom(symptom="fails_at_start", seen="not healthy after 8 s", means="other use", first="free the device"),
            Symptom(symptom="dies_later", seen="it dies after it served", means="met in no trial", first="share down"),
            Symptom(symptom="latency_up", seen="p95 TTFT over 900 ms", means="the fence", first="add a replica"),
            Symptom(symptom="mix_changed", seen="mean prompt above 190 tokens", means="ITL up", first="tune again"),
        ),
    )


def capacity() -> Capacity:
    """Nine in ten requests inside the SLO up to 20; three replicas for what is expected."""
    return Capacity(
        attainment_target=0.9,
        load=20,
        load_share=Estimate(value=0.95, low=0.9, high=0.98, num_samples=140),
        replicas=3,
        reason="3 replicas: 45 users at 20 running requests each",
        cost_per_million_tokens=2.5,
    )


def production_profile() -> Profile:
    """Production: left of the knee, re-measured twice."""
    return Profile(
        name="production",
        config=PRODUCTION,
        operating_point=operating_point(stage(PRODUCTION, 16, kind=StageKind.OPERATING)),
        trial=5,
        confirmed_by=(9, 11),
        evidence=("The most output throughput among the settings inside the SLO.", "The fence of 20 is left of 22."),
    )


def protective_profile(*, passed: bool = True) -> Profile:
    """Protective: fewer sequences and a smaller budget, proven (or not) under the burst."""
    burst = stage(PROTECTIVE, 2 * KNEE, kind=StageKind.BURST)
    return Profile(
        name="protective",
        config=PROTECTIVE,
        operating_point=operating_point(stage(PROTECTIVE, 12, kind=StageKind.OPERATING)),
        trial=6,
        confirmed_by=(13,),
        evidence=("No preemption under the burst.",),
        cuts=(
            "max_num_batched_tokens 1024 to 512: long prompts stall decoding",
            "max_num_seqs 20 to 12: KV blocks run short under long prompts",
        ),
        burst=BurstEvidence(
            load=burst.load,
            num_completed=96,
            num_failed=0,
            num_rejected=0,
            num_preemptions=0 if passed else 31,
            ttft_p95_ms=estimate(820.0 if passed else 2600.0, num_samples=96),
            itl_p95_ms=estimate(48.0, num_samples=6144),
            goodput_rps=4.1,
            kv_cache_usage_peak=0.62 if passed else 1.0,
            passed=passed,
            reasons=() if passed else ("31 preemptions under the burst", "p95 TTFT 2.6 s is over the limit of 900 ms"),
        ),
    )


def baseline(*, gain: Estimate | None = None) -> Baseline:
    """The defaults, re-measured at production's load."""
    at_defaults, at_production = stage(DEFAULTS, 16), stage(PRODUCTION, 16)
    ratio = at_production.output_throughput.value / at_defaults.output_throughput.value
    return Baseline(
        trial=0,
        config=DEFAULTS,
        operating_point=operating_point(stage(DEFAULTS, 16, kind=StageKind.OPERATING)),
        confirmed_by=(10, 12),
        throughput_gain=gain or Estimate(value=ratio, low=ratio - 0.015, high=ratio + 0.015, num_samples=2),
    )


def front(trials: Iterable[TrialRecord]) -> tuple[ParetoPoint, ...]:
    """The climbed stages with enough samples that none beats on all three objectives."""
    points = [
        ParetoPoint(
            trial=trial.number,
            stage=at.index,
            config=trial.config,
            load=at.load,
            output_throughput=at.output_throughput.value,
            ttft_p95_ms=at.ttft_p95_ms.value,
            itl_p95_ms=at.itl_p95_ms.value,
        )
        for trial in trials
        if isinstance(trial.outcome, Measured)
        for at in trial.outcome.stages
        if at.kind is not StageKind.OVERLOAD and not at.fenced and at.ttft_p95_ms.has_interval
    ]
    return tuple(point for point in points if not any(_beats(other, point) for other in points))


def _beats(one: ParetoPoint, other: ParetoPoint) -> bool:
    mine = (-one.output_throughput, one.ttft_p95_ms, one.itl_p95_ms)
    theirs = (-other.output_throughput, other.ttft_p95_ms, other.itl_p95_ms)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def time_split() -> TimeSplit:
    """Eight minutes, most of them load under measurement."""
    return TimeSplit(wall_s=812.0, start_s=56.0, measure_s=741.0, overhead_s=15.0)


def provenance(*, simulated: bool = False) -> Provenance:
    """The built-in engine on two CPU cores."""
    return Provenance(
        kneetune_version="0.1.0",
        engine="builtin",
        engine_version="0.1.0",
        model="embedded",
        model_hash="5be1c0ffee21",
        workload="chat-short",
        workload_hash="9f2c41d07be1",
        device="cpu",
        hardware="2 cores, 8 GiB RAM",
        python="3.11.2",
        packages={"torch": "2.13.0", "optuna": "5.0.0"},
        seed=0,
        created="2026-11-29T17:00:00+00:00",
        simulated=simulated,
    )


def resolved_run() -> FakeRun:
    """The usual run: a knee, production, protective and the defaults beside them."""
    trials = study_trials()
    recommendation = Recommendation(
        verdict=RunVerdict.RESOLVED,
        reason="Throughput bends at 22 concurrent requests (20 to 25); production runs at 16 behind a fence of 20.",
        slo=SLO,
        knee=knee_finding(),
        knee_trial=5,
        production=production_profile(),
        protective=protective_profile(),
        baseline=baseline(),
        diagnosis=diagnosis(),
        pareto=front(trials),
        capacity=capacity(),
        num_trials=len(trials),
        num_failed=1,
        time=time_split(),
        provenance=provenance(),
        warnings=("The SLO was derived from the unloaded engine; give limits of your own.",),
    )
    return FakeRun(recommendation, (*trials, *confirmation_trials()))


_REASONS = {
    RunVerdict.NOT_REACHED: "No bend up to 64 concurrent requests; a higher ladder may find one.",
    RunVerdict.ALREADY_SATURATED: "Throughput is flat from 1 concurrent request on.",
    RunVerdict.TOO_FEW_STAGES: "Only 3 valid stages where 5 are needed.",
    RunVerdict.SLO_INFEASIBLE: "No setting meets p95 TTFT 20 ms and p95 ITL 5 ms; trial 6 comes closest.",
    RunVerdict.NO_FEASIBLE_CONFIG: "All 9 settings failed; the last one had no room for KV blocks.",
}


def unresolved_run(verdict: RunVerdict) -> FakeRun:
    """A run without a production profile, for each reason there is."""
    none_feasible = verdict is RunVerdict.NO_FEASIBLE_CONFIG
    infeasible = verdict is RunVerdict.SLO_INFEASIBLE
    failed = Failed(kind=FailureKind.NO_KV_MEMORY, detail="0 KV blocks left; see engine.log")
    trials = study_trials()
    if none_feasible:
        trials = tuple(trial(t.number, t.config, origin=t.origin, outcome=failed) for t in trials)
    by_ladder = {
        RunVerdict.NOT_REACHED: LadderVerdict.NOT_REACHED,
        RunVerdict.ALREADY_SATURATED: LadderVerdict.ALREADY_SATURATED,
        RunVerdict.TOO_FEW_STAGES: LadderVerdict.TOO_FEW_STAGES,
    }
    ladder_verdict = by_ladder.get(verdict)
    recommendation = Recommendation(
        verdict=verdict,
        reason=_REASONS[verdict],
        slo=None if none_feasible else Slo(ttft_p95_ms=20, itl_p95_ms=5) if infeasible else SLO,
        knee=KneeFinding(verdict=ladder_verdict) if ladder_verdict else None,
        knee_trial=5 if ladder_verdict else None,
        production=None,
        protective=None if none_feasible else protective_profile(passed=not infeasible),
        baseline=None if none_feasible else baseline().model_copy(update={"throughput_gain": None}),
        least_violating_trial=6 if infeasible else None,
        num_trials=len(trials),
        num_failed=len(trials) if none_feasible else 1,
        time=time_split(),
        provenance=provenance(),
    )
    return FakeRun(recommendation, trials)
