"""What an export needs to know, when it is refused, and the header every exported config carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that belong to the measured engine, secrets left out."""

    known_flags: frozenset[str] | None = None
    """The flags of the vLLM that was measured; None where they were not recorded."""

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


def document(context: ExportContext, *, keys: Mapping[str, Setting | list[str]], start: str, caveat: str) -> str:
    """Header and keys as one YAML text.

    Args:
        start: the command that starts an engine from the file.
        caveat: on what the figures were measured, as far as it differs from where the file is meant to run; or "".
    """
    body = yaml.safe_dump(dict(keys), sort_keys=False, allow_unicode=True, width=10_000)
    return f"{header(context, start=start, caveat=caveat)}\n{body}"


def _printable(line: str) -> str:
    """Without the control characters that no YAML may hold, comments included."""
    return "".join(character if character.isprintable() else " " for character in line)


def header(context: ExportContext, *, start: str, caveat: str) -> str:
    """What backs the values, as comment lines; arguments as `document` has them."""
    lines = [line for text in _header(context, start=start, caveat=caveat) for line in text.splitlines()]
    return "".join(f"# {_printable(line)}\n" for line in lines)


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
        f"  p95 TTFT {ttft}, p95 ITL {itl}, preemptions {wording.preemptions(point)}",
        f"Measured with the engine {engine} on {provenance.device}, {provenance.hardware},",
        f"  workload {provenance.workload} ({provenance.workload_hash})",
        f"  model {provenance.model} ({provenance.model_hash}), kneetune {provenance.kneetune_version}",
    ]
    if context.profile.config.data_parallel_size > 1:
        lines.append(f"Runs at once: {wording.total_concurrency(context.profile.config)}")
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
