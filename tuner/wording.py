"""Figures in words: every one with its unit, its interval where it has one, and `unknown` where it is missing."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from tuner.answer import Capacity, SafeRateFigure
from tuner.engine_config import EngineConfig, Setting
from tuner.records import EngineFigures, Estimate, StageRecord

UNKNOWN = "unknown"
NOT_APPLICABLE = "not applicable"
THREE = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
"""What is always searched, the third where the engine has it."""


def config_text(config: EngineConfig) -> str:
    """The three values that are always searched, and what else is not at its default, in one short line."""
    three = {name: value for name in THREE if (value := getattr(config, name)) is not None}
    words = [f"{name}={value}" for name, value in {**_settings(three), **further(config)}.items()]
    if config.data_parallel_size > 1:
        words.append(f"({total_concurrency(config)} at once)")
    return " ".join(words)


def total_concurrency(config: EngineConfig) -> str:
    """How many requests run at once over all cores, and what that is the product of."""
    limit = "max_num_active_seqs" if config.fence < config.max_num_seqs * config.data_parallel_size else "max_num_seqs"
    cores = " x data_parallel_size" if config.data_parallel_size > 1 else ""
    return f"{limit}{cores} = {config.fence} requests"


def further(config: EngineConfig) -> dict[str, str]:
    """The parameters beside those three that are not at their default, each with its value."""
    return _settings(config.model_dump(exclude=set(THREE), exclude_defaults=True))


def _settings(values: dict[str, Setting]) -> dict[str, str]:
    return {name: setting(value) for name, value in values.items()}


def memory_share(config: EngineConfig) -> str:
    """The share of the device's memory, or that the engine has no such setting."""
    return NOT_APPLICABLE if config.gpu_memory_utilization is None else f"{config.gpu_memory_utilization:g}"


def setting(value: Setting | tuple[str, ...]) -> str:
    """A parameter's value as a YAML file spells it; further arguments as a shell does."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return shlex.join(value)
    return value if isinstance(value, str) else f"{value:.10g}"


def number(value: float) -> str:
    """Three significant digits, whole above 1000, no exponent: 0.123, 12.3, 412, 10,240."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.3f}" if "e" in text else text


def latency(value_ms: float) -> str:
    """Milliseconds below a second, seconds from there on."""
    return f"{number(value_ms)} ms" if value_ms < 1000 else f"{number(value_ms / 1000)} s"


def throughput(value: float) -> str:
    """Output tokens per second."""
    return f"{number(value)} tok/s"


def memory(value_bytes: int | None) -> str:
    """MiB below a GiB, GiB from there on."""
    if value_bytes is None:
        return UNKNOWN
    mib = value_bytes / 2**20
    return f"{number(mib)} MiB" if mib < 1024 else f"{number(mib / 1024)} GiB"


def share(value: float | None) -> str:
    """A part of one as a percentage."""
    return UNKNOWN if value is None else f"{number(100 * value)} %"


def count(value: int | None) -> str:
    """A count; a missing one is unknown, not 0."""
    return UNKNOWN if value is None else f"{value:,}"


def preemptions(of: EngineFigures) -> str:
    """How many there were, or that the engine never preempts."""
    return NOT_APPLICABLE if "num_preemptions" in of.not_applicable else count(of.num_preemptions)


def kv_use(of: EngineFigures) -> str:
    """The most of the KV cache that was in use, or that the engine has no such figure."""
    return NOT_APPLICABLE if "kv_cache_usage_peak" in of.not_applicable else share(of.kv_cache_usage_peak)


def duration(value_s: float) -> str:
    """Seconds below two minutes, minutes and seconds from there on."""
    if value_s < 120:
        return f"{number(value_s)} s"
    minutes, seconds = divmod(round(value_s), 60)
    return f"{minutes} min {seconds:02d} s"


def interval(estimate: Estimate, words: Callable[[float], str]) -> str:
    """The 95 % interval, or how few samples there were."""
    if estimate.low is None or estimate.high is None:
        return f"too few samples: {estimate.num_samples}"
    return f"{words(estimate.low)} to {words(estimate.high)}"


def estimated(estimate: Estimate, words: Callable[[float], str]) -> str:
    """The figure with its interval: `412 tok/s (398 tok/s to 426 tok/s)`."""
    return f"{words(estimate.value)} ({interval(estimate, words)})"


def gain(ratio: Estimate) -> str:
    """What production is worth beside the defaults, no more than its interval allows to say."""
    value, low, high = (None if x is None else f"{100 * (x - 1):+.1f} %" for x in (ratio.value, ratio.low, ratio.high))
    if ratio.low is None or ratio.high is None:
        return f"{value} output throughput beside the defaults, but too few samples to tell it from no gain"
    within = f"95 % interval {low} to {high}"
    if ratio.low > 1:
        return f"{value} output throughput over the defaults ({within})"
    if ratio.high < 1:
        return f"Slower than the defaults: {value} output throughput ({within})"
    return f"No difference from the defaults beyond noise: {value} output throughput ({within})"


def held(capacity: Capacity) -> str:
    """How much one replica holds with the asked share of requests inside the SLO, and how far that is open."""
    share = f"{100 * capacity.attainment_target:g} % of requests inside the SLO"
    if capacity.load is None or capacity.load_share is None:
        said = f"at no measured load were {share}" if capacity.open_load is None else f"{share} is shown at no load"
    else:
        said = f"{share} up to {capacity.load} concurrent requests ({_attained(capacity.load_share)} there)"
    if capacity.open_load is not None:
        said = f"{said}, open up to {capacity.open_load}: too few requests to say"
    if capacity.rate_rps is not None and capacity.rate_share is not None:
        said = f"{said}, and up to {number(capacity.rate_rps)} requests/s ({_attained(capacity.rate_share)})"
    if capacity.open_rate_rps is not None:
        said = f"{said}, open up to {number(capacity.open_rate_rps)} requests/s: too few requests to say"
    return said


def load(stage: StageRecord) -> str:
    """Users, or the rate that was offered with the one that was sent: `50/s, sent 46.5/s`."""
    if stage.loop != "open":
        return str(stage.load)
    sent = "" if stage.sent_rps is None else f", sent {number(stage.sent_rps)}/s"
    return f"{number(stage.load)}/s{sent}"


def safe_rate(rate_rps: SafeRateFigure) -> str:
    """The safe rate, what was offered and sent to see it, and the rate above it that was not shown to be safe."""
    high = rate_rps.high
    above = "the highest that was tried" if high is None else f"{number(high)} was not shown to be safe"
    seen = ""
    if rate_rps.offered_rps is not None and rate_rps.sent_rps is not None:
        seen = f" (offered {number(rate_rps.offered_rps)}, sent {number(rate_rps.sent_rps)})"
    slower = ""
    if rate_rps.low is not None and rate_rps.low < rate_rps.value:
        slower = f", {number(rate_rps.low)} by a launch that is slower, as launches here differ"
    return f"{number(rate_rps.value)} requests/s{seen}{slower}; {above}"


def _attained(share_inside: Estimate) -> str:
    return f"{share(share_inside.value)}, between {interval(share_inside, share).replace(' to ', ' and ')}"


def cost(capacity: Capacity) -> str:
    """What a million output tokens cost; nothing where no price was given."""
    price = capacity.cost_per_million_tokens
    return "" if price is None else f"{number(price)} a million output tokens"
