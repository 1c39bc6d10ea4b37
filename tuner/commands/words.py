"""How the command line writes figures and times: shorter than `tuner.wording`, for live lines."""

from __future__ import annotations

import math

from tuner.records import EngineFigures, Estimate


def duration_text(seconds: float) -> str:
    """Minutes and seconds: `4:07`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def estimate_text(estimate: Estimate) -> str:
    """Value and half of its interval: `812 ±14`; the value alone where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.0f}"
    return f"{estimate.value:.0f} ±{(estimate.high - estimate.low) / 2:.0f}"


def milliseconds_text(estimate: Estimate) -> str:
    """A latency, in brackets where there were too few samples to say how sure it is."""
    if math.isnan(estimate.value):
        return "unknown"
    text = f"{estimate.value:.0f} ms" if estimate.value >= 10 else f"{estimate.value:.1f} ms"
    return text if estimate.has_interval else f"({text})"


def preemptions_text(of: EngineFigures) -> str:
    """How many; `?` where it is unknown, `n/a` of an engine that never preempts."""
    if of.num_preemptions is not None:
        return str(of.num_preemptions)
    return "?" if of.is_unknown("num_preemptions") else "n/a"
