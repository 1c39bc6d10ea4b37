"""Whether an engine that sends nothing is stuck, told from what it says of itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.measure.prometheus import MetricsSnapshot


def is_idle(samples: Sequence[MetricsSnapshot]) -> bool:
    """Whether the engine last said that it has nothing to do; one that says nothing is not known to be idle."""
    return bool(samples) and samples[-1].running == 0 and samples[-1].waiting == 0


def moved(samples: Sequence[MetricsSnapshot]) -> bool | None:
    """Whether the engine got anywhere between these scrapes; None where two of them do not tell.

    Token counters alone would not show a long prompt: they grow when its last chunk is done. KV use grows with each.
    """
    prompt = _changed([sample.prompt_tokens for sample in samples])
    generated = _changed([sample.generation_tokens for sample in samples])
    usage = _changed([sample.kv_cache_usage for sample in samples])
    if prompt is None and generated is None:
        return usage or None
    return bool(prompt or generated or usage)


def is_stuck(samples: Sequence[MetricsSnapshot]) -> bool:
    """Whether the engine says that it has work and did none of it: never where it does not say."""
    has_work = bool(samples) and ((samples[-1].running or 0) > 0 or (samples[-1].waiting or 0) > 0)
    return has_work and moved(samples) is False


def _changed(values: Sequence[float | None]) -> bool | None:
    known = [value for value in values if value is not None]
    return None if len(known) < 2 else len(set(known)) > 1
