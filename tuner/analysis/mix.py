"""What a changed mix of lengths does to a config that was tuned for another one, from the run's own figures.

Three things move. A longer request takes more KV blocks, so fewer fit. A longer prompt, for each token generated, puts
more prefill tokens into the mean step, which takes longer by the time the unloaded engine computes them in. And a gap
that meets a prefill is longer by as much of the prompt as fits the step's budget; the p95 shows it once more than one
gap in twenty does. What a model of this kind gets wrong for both mixes alike cancels: only differences are predicted,
and added to what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.answer import Slo
from tuner.records import RequestRecord

SHIFT = 0.10
"""Tune again where the mean step, at one load, takes this much more or less. The knee stands where a doubling of load
buys 10 %: a curve that moved by less moved by no more than the knee counts as nothing."""

TAIL = 0.05
"""Share of gaps above which a p95 is one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How long requests are. Unit: tokens."""

    mean_prompt: float
    p95_prompt: float
    mean_output: float
    p95_output: float

    def scaled(self, *, prompt: float = 1.0, output: float = 1.0) -> Mix:
        """The mix with every length so many times as long."""
        return Mix(
            mean_prompt=self.mean_prompt * prompt,
            p95_prompt=self.p95_prompt * prompt,
            mean_output=self.mean_output * output,
            p95_output=self.p95_output * output,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What the run knows of the config, at its operating point."""

    mix: Mix
    running: int
    """Requests running: the operating point's load."""

    budget: int
    """Most tokens of one step."""

    kv_tokens: float | None
    """Tokens the KV cache holds; None where the engine does not say."""

    step_ms: float
    prefill_tokens_per_ms: float
    """Prompt tokens over TTFT of the unloaded engine."""

    ttft_p95_ms: float
    itl_p95_ms: float
    slo: Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the config would do under another mix, at the same load."""

    requests_that_fit: int | None
    step_ms: float
    ttft_p95_ms: float
    itl_p95_ms: float
    reasons: tuple[str, ...]
    """Why to tune again; empty where the tuned config still answers."""

    @property
    def retune(self) -> bool:
        """Whether the answer no longer holds."""
        return bool(self.reasons)


def mix_of(requests: Sequence[RequestRecord]) -> Mix | None:
    """The lengths of requests that succeeded; None where there are none."""
    done = [request for request in requests if request.error is None and not request.unfinished]
    if not done:
        return None
    prompts = sorted(request.num_prompt_tokens for request in done)
    outputs = sorted(request.num_output_tokens for request in done)
    rank = math.ceil(0.95 * len(done)) - 1
    return Mix(
        mean_prompt=sum(prompts) / len(done),
        p95_prompt=prompts[rank],
        mean_output=sum(outputs) / len(done),
        p95_output=outputs[rank],
    )


def forecast(tuned: Tuned, observed: Mix) -> Forecast:
    """What `observed` does to the tuned config, and whether to tune again."""
    fit = None
    if tuned.kv_tokens is not None:
        fit = math.floor(tuned.kv_tokens / (observed.mean_prompt + observed.mean_output))
    more = _prefill_a_step(tuned, observed) - _prefill_a_step(tuned, tuned.mix)
    step_ms = tuned.step_ms + more / tuned.prefill_tokens_per_ms
    itl = tuned.itl_p95_ms + more / tuned.prefill_tokens_per_ms + _tail_ms(tuned, observed) - _tail_ms(tuned, tuned.mix)
    ttft = tuned.ttft_p95_ms * observed.p95_prompt / tuned.mix.p95_prompt
    return Forecast(
        requests_that_fit=fit,
        step_ms=step_ms,
        ttft_p95_ms=ttft,
        itl_p95_ms=itl,
        reasons=tuple(_reasons(tuned, fit, step_ms, ttft, itl)),
    )


def first_growth(tuned: Tuned, *, of_prompts: bool, most: float = 32.0) -> tuple[float, Forecast] | None:
    """The smallest growth of prompts, or of outputs, that asks for tuning again, in steps of 5 %; None up to `most`."""
    growth = 1.05
    while growth <= most:
        mix = tuned.mix.scaled(prompt=growth) if of_prompts else tuned.mix.scaled(output=growth)
        seen = forecast(tuned, mix)
        if seen.retune:
            return growth, seen
        growth *= 1.05
    return None


def _prefill_a_step(tuned: Tuned, mix: Mix) -> float:
    """Prefill tokens of the mean step: each of the running requests brings a prompt for every output it generates."""
    return min(tuned.running * mix.mean_prompt / mix.mean_output, float(max(0, tuned.budget - tuned.running)))


def _tail_ms(tuned: Tuned, mix: Mix) -> float:
    """What the prefill that a gap at p95 meets adds to it: as much of a prompt as fits the step; 0 below the tail."""
    room = max(1, tuned.budget - tuned.running)
    met = (tuned.running - 1) * math.ceil(mix.mean_prompt / room) / mix.mean_output
    return min(mix.p95_prompt, room) / tuned.prefill_tokens_per_ms if met > TAIL else 0.0


def _reasons(tuned: Tuned, fit: int | None, step_ms: float, ttft_ms: float, itl_ms: float) -> list[str]:
    found = []
    if fit is not None and fit < tuned.running:
        found.append(f"{fit} requests fit the KV cache where {tuned.running} run: preemptions")
    for name, predicted, measured, limit in (
        ("TTFT", ttft_ms, tuned.ttft_p95_ms, tuned.slo.ttft_p95_ms),
        ("ITL", itl_ms, tuned.itl_p95_ms, tuned.slo.itl_p95_ms),
    ):
        if predicted > limit:
            found.append(f"p95 {name} {measured:.4g} to {predicted:.4g} ms, above {limit:.4g} ms")
    if abs(step_ms / tuned.step_ms - 1) > SHIFT:
        found.append(f"the mean step {tuned.step_ms:.3g} to {step_ms:.3g} ms: the knee moves")
    return found
