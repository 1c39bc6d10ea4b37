"""What an export needs to know, when it is refused, and the header every exported config carries."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from tuner import wording
from tuner.answer import Profile, Recommendation, RunVerdict
from tuner.engine_config import Setting


class ExportRefusedError(ValueError):
    """A config that must not leave the run; the message says the rule, the values and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportContext:
    """One profile on its way into a config file."""

    profile: Profile
    recommendation: Recommendation
    run: str
    """The run's name, for the header."""

    model: str
    """What the engine is to load: a folder, a hub id, or `embedded`."""

    max_model_len: int
    """The length the measured engine had in force; used where the config leaves it to the model. Unit: tokens."""

    device_memory_bytes: int | None = None
    """The device the share is a share of, where the built-in engine was given one. Unit: bytes."""

    law: str | None = None
    """The law of the simulated device the figures come from; None where the device was real."""

    cpu_omp_threads_bind: str | None = None
    """The CPUs the measured engine computed on, where the job named their number."""

    served_model_name: str | None = None
    """The name clients use; None leaves it to the engine."""


def check_exportable(context: ExportContext) -> None:
    """Refuse what no measurement backs.

    Raises:
        ExportRefusedError: for a production profile of a run whose verdict is not `resolved`.
    """
    verdict = context.recommendation.verdict
    if context.profile.name == "production" and verdict is not RunVerdict.RESOLVED:
        raise ExportRefusedError(
            f"a production file needs the verdict `resolved`, this run's is `{verdict}` "
            f"({context.recommendation.reason}): tune again with what the reason names, or export protective"
        )


def flag(name: str, *, on: bool | None) -> dict[str, bool]:
    """A yes/no flag in its explicit form: on, off and unset give three different results.

    `name: false` is read as "no flag" by vLLM's loader, which leaves a default of on in force.
    """
    if on is None:
        return {}
    return {name: True} if on else {f"no-{name}": True}


ELSEWHERE = ("tensor_parallel_size", "pipeline_parallel_size", "extra_args")
"""What each format writes in its own way."""


def config_keys(context: ExportContext) -> dict[str, Setting]:
    """The keys both engines know, under their flags' names, for every parameter that is set; sizes are plain."""
    config = context.profile.config
    settings = config.model_dump(exclude={*ELSEWHERE, "max_model_len"}, exclude_none=True)
    length = context.max_model_len if config.max_model_len is None else config.max_model_len
    served = {} if context.served_model_name is None else {"served-model-name": context.served_model_name}
    return {
        "model": context.model,
        **served,
        "max-model-len": length,
        **{
            key: value for name, given in settings.items() for key, value in _key(name.replace("_", "-"), given).items()
        },
    }


def _key(name: str, value: Setting) -> dict[str, Setting]:
    return dict(flag(name, on=value)) if isinstance(value, bool) else {name: value}


def document(context: ExportContext, *, keys: dict[str, Setting], start: str, caveat: str) -> str:
    """Header and keys as one YAML text.

    Args:
        start: the command that starts an engine from the file.
        caveat: on what the figures were measured, as far as it differs from where the file is meant to run; or "".
    """
    lines = [line for text in _header(context, start=start, caveat=caveat) for line in text.splitlines()]
    comment = "".join(f"# {_printable(line)}\n" for line in lines)
    return f"{comment}\n{yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)}"


def _printable(line: str) -> str:
    """Without the control characters that no YAML may hold, comments included."""
    return "".join(character if character.isprintable() else " " for character in line)


def _header(context: ExportContext, *, start: str, caveat: str) -> list[str]:
    recommendation, point = context.recommendation, context.profile.operating_point
    provenance = recommendation.provenance
    engine = " ".join(part for part in (provenance.engine, provenance.engine_version) if part)
    throughput = wording.estimated(point.output_throughput, wording.throughput)
    ttft = wording.estimated(point.ttft_p95_ms, wording.latency)
    itl = wording.estimated(point.itl_p95_ms, wording.latency)
    lines = [
        f"{context.profile.name} profile of the run {context.run}, verdict {recommendation.verdict}",
        f"Reason: {recommendation.reason}",
        f"Knee: {knee(recommendation)}",
        f"Operating point: {point.load} concurrent requests, {throughput},",
        f"  p95 TTFT {ttft}, p95 ITL {itl}, preemptions {wording.count(point.num_preemptions)}",
        f"Measured with the engine {engine} on {provenance.device}, {provenance.hardware},",
        f"  workload {provenance.workload} ({provenance.workload_hash})",
    ]
    if caveat:
        lines.append(f"NOTE: {caveat}")
    if provenance.simulated:
        lines.append("NOTE: simulated: step times came from a model, not from a device.")
    burst = context.profile.burst
    if burst is not None and not burst.passed:
        lines.append(f"NOTE: it did not pass its burst: {'; '.join(burst.reasons)}")
    return [*lines, f"Created {provenance.created}", f"Start: {start}"]


def knee(recommendation: Recommendation) -> str:
    """The knee with its interval, or that there is none."""
    finding = recommendation.knee
    if finding is None or finding.load is None:
        return "none found"
    if finding.interval is None:
        return f"{wording.number(finding.load)} concurrent requests, interval unknown"
    low, high = finding.interval
    return f"{wording.number(finding.load)} concurrent requests ({wording.number(low)} to {wording.number(high)})"
