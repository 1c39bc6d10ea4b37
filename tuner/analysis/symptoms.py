"""What three symptoms in operation, and a changed mix of lengths, would mean on the config that was tuned.

Each names what is seen, with this run's figures as the trigger, what it means, and the first thing to do: an engine
that fails at start lacks room for weights or KV blocks; one that dies later ran out under load; memory that is free
while latency rises points at the step's budget, the fence or the queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.analysis.diagnosis import FULL_KV_CACHE, WAITING_SHARE
from tuner.analysis.mix import Tuned, first_growth, forecast
from tuner.answer import Profile, Slo, Symptom
from tuner.records import Failed, FailureKind, Measured, TrialRecord
from tuner.wording import config_text, duration, latency, memory, number

_AT_START = {
    FailureKind.NO_KV_MEMORY: "weights and activations leave no KV blocks for one request: share up, or "
    "`max_model_len` down",
    FailureKind.OOM_STARTUP: "the device has less free than the share asks for, or weights do not fit: "
    "free the device, or share down",
    FailureKind.OOM_GRAPH_CAPTURE: "graph capture needs memory beside the share: share down",
    FailureKind.OOM_SAMPLER_WARMUP: "the sampler's buffers grow with the sequences: sequences down, or share down",
}


def symptoms(
    trials: Sequence[TrialRecord],
    production: Profile | None,
    protective: Profile | None,
    slo: Slo | None,
    tuned: Tuned | None,
) -> tuple[Symptom, ...]:
    """The symptom table of a run; without production only what its failures tell.

    Args:
        tuned: production's figures for a changed mix of lengths; None where a figure is missing.
    """
    found = [*_fails_at_start(trials, production), *_dies_later(trials, production, protective)]
    if production is not None and slo is not None:
        found += _latency_up(production, protective, slo)
    if tuned is not None:
        found += _mix_changed(tuned)
    return tuple(found)


def _fails_at_start(trials: Sequence[TrialRecord], production: Profile | None) -> Iterator[Symptom]:
    """By each kind of failure that was met; where none was, by how long production took to start."""
    for kind, first in _AT_START.items():
        met = [(trial, trial.outcome) for trial in trials if _failed_by(trial, kind)]
        for trial, outcome in met[:1]:
            detail = outcome.detail if isinstance(outcome, Failed) else ""
            yield Symptom(
                symptom="fails_at_start",
                seen=f"the engine ends before it is healthy, as in trial {trial.number} with "
                f"{config_text(trial.config)}",
                means=f"{kind.value} in {len(met)} trials: {detail}",
                first=f"{first}{_back_to(production)}",
            )
    starts = [] if production is None else _starts(trials, production)
    if production is not None and starts and not any(_failed_by(trial, kind) for trial in trials for kind in _AT_START):
        yield Symptom(
            symptom="fails_at_start",
            seen=f"production is not healthy after {duration(2 * max(starts))}, twice the slowest of its {len(starts)} "
            "starts",
            means="no setting of this run failed so; what changed is outside it: other memory in use, model or version",
            first="free the device; then the whole protective profile",
        )


def _dies_later(
    trials: Sequence[TrialRecord], production: Profile | None, protective: Profile | None
) -> Iterator[Symptom]:
    """By lack of memory under load or a crash after the engine was ready."""
    died = [trial for trial in trials if _failed_by(trial, FailureKind.OOM_RUNTIME) or _crashed_under_load(trial)]
    if production is None and not died:
        return
    met = ", ".join(f"trial {trial.number} ({config_text(trial.config)})" for trial in died[:3])
    point = None if production is None else production.operating_point
    in_use = ""
    if point is not None:
        used, reserved = memory(point.peak_memory_bytes), memory(point.reserved_memory_bytes)
        in_use = f"; production had {used} in use of {reserved} reserved"
    kinds = sorted({trial.outcome.kind.value for trial in died if trial.outcome.outcome == "failed"})
    yield Symptom(
        symptom="dies_later",
        seen=f"the engine dies or runs out of memory after it served{f', as in {met}' if met else ''}",
        means=f"{' and '.join(kinds) if kinds else 'met in no trial of this run'}{in_use}",
        first=_less_memory(production, protective),
    )


def _less_memory(production: Profile | None, protective: Profile | None) -> str:
    sequences = f"fewer sequences{_to(production, protective, 'max_num_seqs')}, or `max_model_len` down"
    if production is not None and production.config.gpu_memory_utilization is None:
        return sequences
    share = f"share down with{_to(production, protective, 'gpu_memory_utilization')}"
    return f"{share} {sequences}; more share would only hide it"


def _latency_up(production: Profile, protective: Profile | None, slo: Slo) -> Iterator[Symptom]:
    """Memory free while latency rises: by waiting requests, or by ITL with nothing waiting."""
    config, point = production.config, production.operating_point
    has_kv_use = "kv_cache_usage_peak" not in point.not_applicable
    free = f"`vllm:kv_cache_usage_perc` is below {FULL_KV_CACHE:g}" if has_kv_use else "the engine lives"
    waiting = max(1, round(WAITING_SHARE * config.fence))
    yield Symptom(
        symptom="latency_up",
        seen=f"p95 TTFT over {latency(slo.ttft_p95_ms)}, {waiting} or more requests wait and {free}",
        means=f"with {config.fence} running it is the fence, with fewer the budget of "
        f"{config.max_num_batched_tokens} tokens; measured without: p95 TTFT {latency(point.ttft_p95_ms.value)}",
        first="at the fence hold requests at the gateway or add a replica; below it budget up",
    )
    yield Symptom(
        symptom="latency_up",
        seen=f"p95 ITL over {latency(slo.itl_p95_ms)}, fewer than {waiting} requests wait and {free}",
        means=f"steps are too long, by prefill or by the batch; measured: p95 ITL {latency(point.itl_p95_ms.value)} at "
        f"{point.load} running",
        first=f"budget down{_to(production, protective, 'max_num_batched_tokens')}, then sequences "
        f"down{_to(production, protective, 'max_num_seqs')}",
    )


def _mix_changed(tuned: Tuned) -> Iterator[Symptom]:
    """Where longer prompts, or longer outputs, first ask for tuning again, with what is predicted there."""
    for name, of_prompts, mean in (
        ("prompt", True, tuned.mix.mean_prompt),
        ("output", False, tuned.mix.mean_output),
    ):
        found = first_growth(tuned, of_prompts=of_prompts)
        if found is None:
            continue
        growth, seen = found
        twice = forecast(tuned, tuned.mix.scaled(prompt=2.0) if of_prompts else tuned.mix.scaled(output=2.0))
        fits = "" if twice.requests_that_fit is None else f"{twice.requests_that_fit} requests fit the KV cache, "
        yield Symptom(
            symptom="mix_changed",
            seen=f"mean {name} above {number(mean * growth)} tokens (tuned for {number(mean)})",
            means=f"predicted: {'; '.join(seen.reasons)}. Twice as long: {fits}p95 TTFT {latency(twice.ttft_p95_ms)}, "
            f"p95 ITL {latency(twice.itl_p95_ms)}",
            first="limit lengths at the gateway; tune again with the new mix",
        )


def _failed_by(trial: TrialRecord, kind: FailureKind) -> bool:
    return isinstance(trial.outcome, Failed) and trial.outcome.kind is kind


def _crashed_under_load(trial: TrialRecord) -> bool:
    return _failed_by(trial, FailureKind.CRASHED) and trial.measure_s > 0


def _starts(trials: Sequence[TrialRecord], production: Profile) -> list[float]:
    """How long production's own config took to start, each time. Seconds."""
    return [
        trial.start_s for trial in trials if trial.config == production.config and isinstance(trial.outcome, Measured)
    ]


def _back_to(production: Profile | None) -> str:
    share = None if production is None else production.config.gpu_memory_utilization
    return "" if share is None else f"; production's share of {share:g} starts"


def _to(production: Profile | None, protective: Profile | None, name: str) -> str:
    """Protective's value, where it is below production's: one that was not lowered is nowhere to go."""
    if production is None or protective is None:
        return ""
    high, low = getattr(production.config, name), getattr(protective.config, name)
    return f" (protective: `{name}` {low:g})" if high is not None and low < high else ""
