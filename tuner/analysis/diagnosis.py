"""What saturates at a knee, told from the stages around the bend; a guess is never made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuner.analysis.roofline import StepShares, step_ms, step_shares
from tuner.answer import Binding, KneeFinding, LadderVerdict
from tuner.engine_config import EngineConfig
from tuner.measure.validity import CLIENT_BOUND, OTHERS
from tuner.records import CLIMB_KINDS, EngineFacts, StageRecord

FULL_KV_CACHE = 0.95
WAITING_SHARE = 0.1
"""Share of the requests in flight that must be seen waiting before waiting means anything."""

NEAR_FENCE = 0.9
FULL_BUDGET = 0.5
"""A mean step this full: a budget that makes requests wait is spent in most steps, and the others are nearly empty."""

SATURATED_CORES = 0.9
"""One event loop runs on one core: a process that speaks HTTP can use no more than that."""

HALF = 0.5
"""What takes more than half of the time holds it back: taking all the rest away would not make it twice as fast."""

FLAT_STEP = 0.2
"""Elasticity of the step's time below which a larger batch is as good as free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bend:
    """The stages a diagnosis looks at."""

    first: StageRecord
    """At the knee."""

    past: StageRecord
    """The next one past it; the same where there is none."""

    unloaded: StageRecord | None
    """At load 1."""

    half: StageRecord
    """The highest at half of the load past the bend, or less: a step's time is compared over a doubling, as two
    neighbours may differ by noise alone. The first where there is none."""

    @property
    def waiting(self) -> float | None:
        """Requests that waited for room past the bend, on average."""
        if self.past.mean_waiting is None:
            return None
        return self.past.mean_waiting - (self.past.mean_waiting_deferred or 0.0)

    @property
    def gain(self) -> float:
        """What the load past the knee buys: throughput there over that at the knee."""
        return self.past.output_throughput.value / self.first.output_throughput.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What holds the curve back, and the sentences that say so."""

    binding: Binding | None
    evidence: tuple[str, ...]
    shares: StepShares | None = None
    """What a step past the bend goes into, where the diagnosis came that far."""


def diagnose(
    stages: Sequence[StageRecord], knee: KneeFinding, config: EngineConfig, facts: EngineFacts | None = None
) -> Finding:
    """What holds the curve back, by the first rule that applies.

    The client, then our fence, then KV blocks, then the server's CPU, then requests that wait while the fence and the
    KV cache have room: they wait for the step's tokens. With nothing waiting, a step's time past the bend is computing
    or reading (`roofline.py`): the one whose lower bound is above the other's upper one. Anything else is not told.

    Args:
        facts: what the engine said of its memory; without it memory bandwidth is never claimed, and computing only
            where it takes over half of the step.
    """
    at_client = _client(stages, knee)
    if at_client is not None:
        return at_client
    if knee.verdict is LadderVerdict.FENCED:
        return Finding(binding="fence", evidence=tuple(_fence_evidence(stages, config)))
    bend = bend_of(stages, knee)
    if bend is None:
        return Finding(binding=None, evidence=("the ladder shows no bend, so nothing is seen to saturate",))
    return _kv_blocks(bend) or _server(bend) or _queue(bend, config) or _step(bend, facts)


def binding(
    stages: Sequence[StageRecord], knee: KneeFinding, config: EngineConfig, facts: EngineFacts | None = None
) -> Binding | None:
    """What `diagnose` finds, without its evidence."""
    return diagnose(stages, knee, config, facts).binding


def bend_of(stages: Sequence[StageRecord], knee: KneeFinding) -> Bend | None:
    """The knee's stage and the next unfenced one past it; for a ladder saturated from the start, its first two."""
    ladder = climbed(stages)
    if knee.verdict is LadderVerdict.ALREADY_SATURATED:
        found = ladder[:2]
    elif knee.verdict is LadderVerdict.KNEE and knee.load is not None:
        found = [stage for stage in ladder if stage.load >= (knee.load or 0.0)][:2]
    else:
        return None
    if not found:
        return None
    unloaded = ladder[0] if ladder[0].load == 1 else None
    past = found[-1]
    half = [stage for stage in ladder if 2 * stage.load <= past.load]
    return Bend(first=found[0], past=past, unloaded=unloaded, half=half[-1] if half else found[0])


def climbed(stages: Sequence[StageRecord]) -> list[StageRecord]:
    """The valid, unfenced stages of the climb in rising load."""
    return sorted(
        (stage for stage in stages if stage.valid and not stage.fenced and stage.kind in CLIMB_KINDS),
        key=lambda stage: stage.load,
    )


def _client(stages: Sequence[StageRecord], knee: KneeFinding) -> Finding | None:
    """The load generator, where the ladder ends below a stage that it could not drive."""
    ladder = climbed(stages)
    top = ladder[-1].load if ladder else 0
    beyond = [stage for stage in stages if stage.load > top and stage.kind in CLIMB_KINDS and not stage.valid]
    said = [stage.invalid_reasons for stage in beyond if not any(r.startswith(OTHERS) for r in stage.invalid_reasons)]
    reasons = [reason for each in said for reason in each if reason.startswith(CLIENT_BOUND)]
    if knee.verdict not in (LadderVerdict.NOT_REACHED, LadderVerdict.TOO_FEW_STAGES) or not reasons:
        return None
    where = f"beyond load {top}" if ladder else "from the first load on"
    return Finding(binding="client", evidence=(f"{where} the load generator is the limit: {reasons[0]}",))


def _fence_evidence(stages: Sequence[StageRecord], config: EngineConfig) -> Iterator[str]:
    ladder = climbed(stages)
    if len(ladder) >= 2:
        low, high = ladder[-2:]
        gain = high.output_throughput.value / low.output_throughput.value - 1
        yield f"throughput still rises at the fence of {config.fence}: {gain:+.0%} from load {low.load} to {high.load}"
    past = [stage for stage in stages if stage.fenced and stage.mean_waiting is not None]
    if past:
        yield f"at load {past[0].load} {past[0].mean_waiting:.1f} requests wait in the queue"


def _kv_blocks(bend: Bend) -> Finding | None:
    """KV blocks, by preemptions or a full cache; an open answer where one of the figures is unknown."""
    for stage in (bend.first, bend.past):
        if (stage.num_preemptions or 0) > 0 or (stage.kv_cache_usage_peak or 0.0) >= FULL_KV_CACHE:
            said = "unknown" if stage.kv_cache_usage_peak is None else f"{stage.kv_cache_usage_peak:.0%}"
            preempted = "unknown" if stage.num_preemptions is None else f"{stage.num_preemptions}"
            sentence = f"at load {stage.load} the KV cache is {said} full at its peak, with {preempted} preemptions"
            return Finding(binding="kv_blocks", evidence=(sentence,))
    figures = ("kv_cache_usage_peak", "num_preemptions")
    unknown = [stage for stage in (bend.first, bend.past) if any(map(stage.is_unknown, figures))]
    if unknown:
        return Finding(binding=None, evidence=(f"KV use or preemptions are unknown at load {unknown[0].load}",))
    return None


def _server(bend: Bend) -> Finding | None:
    """The server's CPU: the process that speaks HTTP is at its limit, or keeps the model idle."""
    past = bend.past
    cores, steps = past.process_cpu_cores, past.steps
    if cores is not None and len(cores) > 1 and cores[0] >= SATURATED_CORES:
        sentence = f"at load {past.load} the process that speaks HTTP uses {cores[0]:.2f} of the one core it can use"
        return Finding(binding="server_cpu", evidence=(sentence,))
    share = None if steps is None else steps.model_share
    if share is not None and share < HALF and (past.mean_running or 0.0) >= 1:
        sentence = (
            f"at load {past.load}, with {past.mean_running:.1f} requests running, steps are in the model {share:.0%} "
            "of the time: the rest is the server's own work between them"
        )
        return Finding(binding="server_cpu", evidence=(sentence,))
    return None


def _queue(bend: Bend, config: EngineConfig) -> Finding | None:
    """What requests wait for past the bend while KV blocks are free; None where they do not wait."""
    past, waiting = bend.past, bend.waiting
    if past.mean_running is None or waiting is None:
        return Finding(binding=None, evidence=(f"running or waiting requests are unknown at load {past.load}",))
    if waiting < WAITING_SHARE * past.mean_in_flight:
        return None
    queued = f"at load {past.load} {waiting:.1f} requests wait while {past.mean_running:.1f} run and KV blocks are free"
    if past.mean_running >= NEAR_FENCE * config.fence:
        return Finding(binding="fence", evidence=(f"{queued}: the fence of {config.fence} is met",))
    full = budget_use(past, config)
    if full is None:
        return Finding(
            binding="token_budget", evidence=(f"{queued}, below the fence of {config.fence}: for the step's tokens",)
        )
    held = f"a step holds {full:.0%} of the budget of {step_budget(config)} tokens"
    return Finding(binding="token_budget" if full >= FULL_BUDGET else None, evidence=(f"{queued}, and {held}",))


def step_budget(config: EngineConfig) -> int:
    """Most tokens of one step. Unit: tokens."""
    return config.max_num_scheduled_tokens or config.max_num_batched_tokens


def budget_use(stage: StageRecord, config: EngineConfig) -> float | None:
    """How full the mean step is, as a share of its token budget; None where the engine does not count."""
    return None if stage.steps is None else stage.steps.mean_tokens / step_budget(config)


def _step(bend: Bend, facts: EngineFacts | None) -> Finding:
    """What takes a step's time, with nothing waiting: computing, or reading weights, keys and values."""
    half, past = bend.half, bend.past
    evidence = [f"at load {past.load} {bend.waiting or 0.0:.1f} requests wait and KV blocks are free"]
    before, after = step_ms(half), step_ms(past)
    if before is None or after is None:
        return Finding(binding=None, evidence=(*evidence, "the time of a step is unknown"))
    if past.load > half.load:
        elasticity = math.log(after / before) / math.log(past.load / half.load)
        evidence.append(f"a step takes {before:.3g} ms at load {half.load} and {after:.3g} ms at load {past.load}")
        if elasticity < FLAT_STEP:
            evidence.append("a larger batch is as good as free there, so it is not the step that saturates")
            return Finding(binding=None, evidence=tuple(evidence))
    shares = None if bend.unloaded is None else step_shares(bend.unloaded, past, facts)
    if shares is None:
        evidence.append(
            "there is no valid stage at load 1 to compare with, so computing and reading cannot be told apart"
        )
        return Finding(binding=None, evidence=tuple(evidence))
    reading = "at most an unknown part" if shares.reading_high is None else f"at most {_part(shares.reading_high)}"
    low, high = _part(shares.compute_low), _part(shares.compute_high)
    computing = low if low == high else f"{low} to {high}"
    evidence.append(
        f"by the prefill speed at load 1 computing takes {computing} of it, "
        f"reading {_part(shares.reading_low)} or more and {reading}"
    )
    return Finding(binding=_roof(shares), evidence=tuple(evidence), shares=shares)


def _part(share: float) -> str:
    """A share of a step; an upper bound above all of it says no more than all of it."""
    return f"{min(1.0, share):.0%}"


def _roof(shares: StepShares) -> Binding | None:
    """The one whose least is above the other's most; None where the bounds overlap, or contradict each other."""
    if shares.reading_high is None:
        return "compute" if shares.compute_low > HALF else None
    if shares.compute_low > shares.reading_high:
        return "compute"
    if shares.compute_high < shares.reading_low <= shares.reading_high:
        return "memory_bandwidth"
    return None
