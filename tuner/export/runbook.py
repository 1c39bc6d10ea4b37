"""What to do when production leaves the state it was measured in; every figure comes from the run."""

from __future__ import annotations

from typing import NamedTuple

from tuner import wording
from tuner.answer import Profile, Recommendation, Slo
from tuner.engine_config import EngineConfig
from tuner.export.context import knee


class Rung(NamedTuple):
    """One thing to do, cheapest first."""

    action: str
    cost: str


class Trigger(NamedTuple):
    """What is seen, and the first thing to do about it."""

    seen: str
    first: str


def rungs(recommendation: Recommendation) -> tuple[Rung, ...]:
    """What to do when production is in trouble, in order of cost; empty without both profiles."""
    production, protective = recommendation.production, recommendation.protective
    if production is None:
        return ()
    limit = production.operating_point.load
    rate_rps = recommendation.safe_rate_rps
    held_rps = None if rate_rps is None else rate_rps.value if rate_rps.low is None else rate_rps.low
    rate = "" if held_rps is None else f", and arrivals to {wording.number(held_rps)} requests/s, its safe rate"
    gateway = Rung(
        f"At the gateway, hold requests in flight to {limit}, the load production was measured at{rate}; "
        "turn long prompts away first.",
        "no restart; some requests wait or are refused",
    )
    if protective is None:
        return (gateway,)
    return (gateway, *_steps_down(production.config, protective.config), _whole_switch(protective))


def _steps_down(high: EngineConfig, low: EngineConfig) -> list[Rung]:
    steps: list[tuple[str, float | None, float | None, str]] = [
        ("max_num_batched_tokens", high.max_num_batched_tokens, low.max_num_batched_tokens, "long prompts wait longer"),
        ("max_num_seqs", high.max_num_seqs, low.max_num_seqs, "more requests wait in the queue"),
        ("max_model_len", high.max_model_len, low.max_model_len, "longer requests are refused"),
        (
            "gpu_memory_utilization",
            high.gpu_memory_utilization,
            low.gpu_memory_utilization,
            "fewer KV blocks; alone it adds preemptions, so lower max_num_seqs with it",
        ),
    ]
    return [
        Rung(f"Lower `{name}` from {_asked(before)} to {_asked(after)}.", f"a restart; {cost}")
        for name, before, after, cost in steps
        if before != after
    ]


def _asked(value: float | None) -> str:
    return "the model's own length" if value is None else f"{value:.10g}"


def _whole_switch(protective: Profile) -> Rung:
    point = protective.operating_point
    return Rung(
        "Switch to the whole protective profile.",
        f"a second engine and a drain; {wording.throughput(point.output_throughput.value)} at {point.load} "
        "concurrent requests",
    )


def triggers(recommendation: Recommendation) -> tuple[Trigger, ...]:
    """What to watch, with this run's limits, and each symptom's first rung; empty without production."""
    production, slo = recommendation.production, recommendation.slo
    if production is None:
        return ()
    found = [_out_of_memory(recommendation, production)]
    if "num_preemptions" not in production.operating_point.not_applicable:
        found = [_preemptions(recommendation, production), *found]
    if slo is not None:
        found = [_itl(recommendation, production, slo), _ttft(recommendation, production, slo), *found]
    return tuple(found)


def _itl(recommendation: Recommendation, production: Profile, slo: Slo) -> Trigger:
    measured = wording.latency(production.operating_point.itl_p95_ms.value)
    return Trigger(
        f"p95 ITL over {wording.latency(slo.itl_p95_ms)} (measured: {measured})",
        f"budget down{_change(recommendation, 'max_num_batched_tokens')}",
    )


def _ttft(recommendation: Recommendation, production: Profile, slo: Slo) -> Trigger:
    point = production.operating_point
    return Trigger(
        f"p95 TTFT over {wording.latency(slo.ttft_p95_ms)} "
        f"(measured: {wording.latency(point.ttft_p95_ms.value)}) while memory is free (KV cache in use at most "
        f"{wording.kv_use(point)} when measured)",
        f"budget or fence up, the fence no further than the knee: {knee(recommendation)}; with memory short, hold "
        "requests at the gateway",
    )


def _preemptions(recommendation: Recommendation, production: Profile) -> Trigger:
    measured = wording.preemptions(production.operating_point)
    return Trigger(
        f"`vllm:num_preemptions_total` grows (measured at the operating point: {measured})",
        f"sequences down{_change(recommendation, 'max_num_seqs')}",
    )


def _out_of_memory(recommendation: Recommendation, production: Profile) -> Trigger:
    point = production.operating_point
    return Trigger(
        f"out of memory (measured: {wording.memory(point.peak_memory_bytes)} in use at the peak, "
        f"{wording.memory(point.reserved_memory_bytes)} reserved)",
        _less_memory(recommendation, production),
    )


def _less_memory(recommendation: Recommendation, production: Profile) -> str:
    sequences = f"fewer sequences{_change(recommendation, 'max_num_seqs')}"
    if production.config.gpu_memory_utilization is None:
        return sequences
    return f"share down{_change(recommendation, 'gpu_memory_utilization')}, with {sequences}"


def _change(recommendation: Recommendation, name: str) -> str:
    """` from A to B` where protective is lower; where it is not, that no lower value was proven."""
    high, low = recommendation.production, recommendation.protective
    if high is None or low is None:
        return " (no lower value was proven in this run)"
    before, after = getattr(high.config, name), getattr(low.config, name)
    if before == after:
        return f" from {_asked(before)} (protective keeps it: no lower value was proven in this run)"
    return f" from {_asked(before)} to {_asked(after)}"


def runbook(recommendation: Recommendation) -> str:
    """One page of Markdown: which file when, what to watch, what to do first, how to switch and how to return."""
    production, protective = recommendation.production, recommendation.protective
    parts = [_which_file(recommendation)]
    if production is not None:
        parts += [_watch(recommendation), _symptoms(recommendation), _order(recommendation)]
        if protective is not None:
            parts += [_switch(production, protective), _return(production, protective)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _which_file(recommendation: Recommendation) -> str:
    lines = ["# Runbook", "", f"Verdict: `{recommendation.verdict}`. {_one_line(recommendation.reason)}", ""]
    if recommendation.provenance.simulated:
        lines += ["**Simulated: these figures came from a model of the engine, not from a device.**", ""]
    lines += ["## Which file when", ""]
    production, protective = recommendation.production, recommendation.protective
    if production is None:
        lines.append("- There is no production file: the verdict does not back one.")
    else:
        lines.append(f"- **production**: every day, {_holds(production)}. Knee: {knee(recommendation)}.")
    if protective is None:
        lines.append("- There is no protective file: no setting was proven as one.")
    else:
        lines.append(f"- **protective**: when a trigger below holds on, {_holds(protective)}. {_burst(protective)}")
    return "\n".join(lines)


def _holds(profile: Profile) -> str:
    point = profile.operating_point
    return (
        f"up to {point.load} concurrent requests at {wording.throughput(point.output_throughput.value)}, "
        f"p95 TTFT {wording.latency(point.ttft_p95_ms.value)}, p95 ITL {wording.latency(point.itl_p95_ms.value)}"
    )


def _burst(protective: Profile) -> str:
    burst = protective.burst
    if burst is None:
        return "It was not measured under a burst."
    if burst.passed:
        return f"It held a burst of long prompts at {burst.load} concurrent requests."
    reasons = "; ".join(map(_one_line, burst.reasons))
    return f"**It did not pass its burst at {burst.load} concurrent requests: {reasons}.**"


def _watch(recommendation: Recommendation) -> str:
    rows = [f"| {trigger.seen} | {trigger.first} |" for trigger in triggers(recommendation)]
    return "\n".join(["## What to watch, what to do first", "", "| seen | first |", "| --- | --- |", *rows])


SYMPTOMS = {
    "fails_at_start": "fails at start",
    "dies_later": "dies later",
    "latency_up": "memory free, latency up",
    "mix_changed": "other lengths",
}
"""A symptom's name in words."""


def _symptoms(recommendation: Recommendation) -> str:
    """What else may be seen, what it means on this engine, and what to do first."""
    found = () if recommendation.diagnosis is None else recommendation.diagnosis.symptoms
    rows = [
        f"| {SYMPTOMS[each.symptom]} | {_one_line(each.seen)} | {_one_line(each.means)} | {_one_line(each.first)} |"
        for each in found
    ]
    head = [
        "## Symptoms and what they mean here",
        "",
        "| symptom | seen | means | first |",
        "| --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows]) if rows else ""


def _order(recommendation: Recommendation) -> str:
    rows = [f"{i}. {rung.action} Cost: {rung.cost}." for i, rung in enumerate(rungs(recommendation), start=1)]
    return "\n".join(["## If that is not enough, in order of cost", "", *rows])


def _switch(production: Profile, protective: Profile) -> str:
    return "\n".join(
        [
            "## How to switch",
            "",
            f"1. Start protective beside production, on a port of its own. {_fits(production, protective)}",
            "2. Wait for its `/health`, then send new requests there.",
            "3. Let production drain: by its /metrics nothing runs and nothing waits.",
            "4. Stop production with SIGTERM.",
        ]
    )


def _fits(production: Profile, protective: Profile) -> str:
    high, low = production.config.gpu_memory_utilization, protective.config.gpu_memory_utilization
    if high is None or low is None:
        return "The engine holds to no share of the device, so see first that there is memory for both."
    if high + low <= 1:
        return f"Both fit one device (shares {high:g} + {low:g})."
    return (
        f"Both do not fit one device (shares {high:g} + {low:g} = {high + low:.2g}): use a second one, "
        "or drain first and accept the gap."
    )


def _return(production: Profile, protective: Profile) -> str:
    point, load = protective.operating_point, production.operating_point.load
    measured = f"{wording.latency(point.ttft_p95_ms.value)}, {wording.latency(point.itl_p95_ms.value)}"
    return "\n".join(
        [
            "## How to return",
            "",
            "The same way back, when all of this has held for as long as the trouble lasted:",
            "",
            f"- requests in flight, queue included, at most {load};",
            f"- p95 TTFT and p95 ITL near what protective was measured at ({measured}), not merely inside the limits;",
            "- no new preemption.",
            "",
            "If the trigger comes back, stay on protective twice as long before the next try.",
        ]
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
