"""What the report says, section by section, as plain text and tables; the template only lays it out.

Nothing here is HTML: every string is escaped where it is put on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reports import evidence
from reports.tables import Cell, Table, cell
from reports.trial_table import trial_table
from tuner import wording
from tuner.answer import Baseline, OperatingPoint, Profile, Provenance, Recommendation, RunVerdict, Slo, TimeSplit
from tuner.engine_config import EngineConfig
from tuner.export.context import knee as knee_words
from tuner.export.runbook import SYMPTOMS, Rung, Trigger, rungs, triggers
from tuner.records import TrialRecord


class TimePart(NamedTuple):
    """One part of the study's wall time."""

    label: str
    text: str
    percent: float


class Gain(NamedTuple):
    """What production is worth beside the defaults, and whether noise could explain it."""

    text: str
    tone: str
    """`good`, `none` or `bad`; styles the sentence."""


class Page(NamedTuple):
    """The whole report but its charts."""

    headline: str
    verdict: str
    resolved: bool
    reason: str
    simulated: bool
    advice: str
    slo: str
    gain: Gain | None
    settings: Table | None
    evidence: tuple[str, ...]
    cuts: tuple[str, ...]
    protective_evidence: tuple[str, ...]
    why: tuple[str, ...]
    cross_checks: Table | None
    parameters: Table | None
    capacity: tuple[str, ...]
    symptoms: Table | None
    overload: Table | None
    burst: Table | None
    burst_words: str
    sureness: Table | None
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    triggers: tuple[Trigger, ...]
    rungs: tuple[Rung, ...]
    trials: Table
    trials_words: str
    time: tuple[TimePart, ...]
    wall: str
    provenance: Table


def page(recommendation: Recommendation, trials: Sequence[TrialRecord]) -> Page:
    """Everything the report says."""
    finding = recommendation.knee
    burst = recommendation.protective.burst if recommendation.protective else None
    return Page(
        headline=_headline(recommendation),
        verdict=recommendation.verdict.value,
        resolved=recommendation.verdict is RunVerdict.RESOLVED,
        reason=recommendation.reason,
        simulated=recommendation.provenance.simulated,
        advice=_ADVICE.get(recommendation.verdict, ""),
        slo=slo_words(recommendation.slo),
        gain=_gain(recommendation),
        settings=_settings(recommendation),
        evidence=recommendation.production.evidence if recommendation.production else (),
        cuts=recommendation.protective.cuts if recommendation.protective else (),
        protective_evidence=recommendation.protective.evidence if recommendation.protective else (),
        why=evidence.why(recommendation),
        cross_checks=evidence.cross_checks(finding),
        parameters=evidence.advice(recommendation.diagnosis),
        capacity=evidence.capacity_lines(recommendation),
        symptoms=_symptoms(recommendation),
        overload=evidence.overload(recommendation, trials),
        burst=evidence.burst_table(burst) if burst else None,
        burst_words=evidence.burst_words(burst) if burst else "",
        sureness=evidence.sureness(recommendation),
        left_out=evidence.left_out(trials),
        warnings=(*recommendation.warnings, *(finding.warnings if finding else ())),
        triggers=triggers(recommendation),
        rungs=rungs(recommendation),
        trials=trial_table(trials, recommendation),
        trials_words=f"{recommendation.num_trials} trials, {recommendation.num_failed} of them failed.",
        time=_time(recommendation.time),
        wall=wording.duration(recommendation.time.wall_s),
        provenance=_provenance(recommendation.provenance),
    )


def _symptoms(recommendation: Recommendation) -> Table | None:
    """What may be seen in operation, and what it means on this engine."""
    found = () if recommendation.diagnosis is None else recommendation.diagnosis.symptoms
    rows = [
        tuple(
            Cell(text.replace("`", "")) for text in (f"{SYMPTOMS[each.symptom]}: {each.seen}", each.means, each.first)
        )
        for each in found
    ]
    return Table(("Symptom", "Means here", "First thing to do"), tuple(rows)) if rows else None


_ADVICE = {
    RunVerdict.NOT_REACHED: "Raise the ladder's highest load and the fence, and tune again.",
    RunVerdict.ALREADY_SATURATED: "Tune with shorter requests, a smaller model or more hardware: one request at a time "
    "already takes all there is.",
    RunVerdict.TOO_FEW_STAGES: "Give the study more time, or see below which stages were left out and why.",
    RunVerdict.SLO_INFEASIBLE: "Loosen the SLO, shorten the workload's requests, or give the engine more hardware.",
    RunVerdict.NO_FEASIBLE_CONFIG: "See in the trial table why each setting failed: where another process holds the "
    "device, end it; where no setting can start, widen the search space.",
}


def _headline(recommendation: Recommendation) -> str:
    production, finding = recommendation.production, recommendation.knee
    match recommendation.verdict:
        case RunVerdict.RESOLVED if production is not None and finding is not None:
            load, found = (
                production.operating_point.load,
                knee_words(recommendation).replace(" concurrent requests", ""),
            )
            return f"Run production at up to {load} concurrent requests; the knee is at {found}"
        case RunVerdict.RESOLVED:
            return "Resolved"
        case RunVerdict.NOT_REACHED:
            return "No production config: the knee was not reached"
        case RunVerdict.ALREADY_SATURATED:
            return "No production config: the engine was saturated from the first load on"
        case RunVerdict.TOO_FEW_STAGES:
            return "No production config: too few valid stages to find a knee"
        case RunVerdict.SLO_INFEASIBLE:
            least = recommendation.least_violating_trial
            return "No production config: no setting meets the SLO" + (
                "" if least is None else f"; trial {least} comes closest"
            )
        case RunVerdict.NO_FEASIBLE_CONFIG:
            return "No production config: no setting could be measured"


def slo_words(slo: Slo | None) -> str:
    """The limits, and where they come from."""
    if slo is None:
        return "No SLO: none was given, and there was no unloaded engine to derive one from."
    source = "derived from the unloaded engine, none was given" if slo.derived else "as given"
    limits = f"p95 TTFT at most {wording.latency(slo.ttft_p95_ms)}, p95 ITL at most {wording.latency(slo.itl_p95_ms)}"
    return f"SLO: {limits} ({source})."


def _gain(recommendation: Recommendation) -> Gain | None:
    if recommendation.production is None:
        return None
    ratio = recommendation.baseline.throughput_gain if recommendation.baseline else None
    where = f"at {recommendation.production.operating_point.load} concurrent requests, re-measured"
    if ratio is None:
        return Gain("Production was not measured against the defaults, so its gain is unknown.", "none")
    if ratio.low is not None and ratio.low > 1:
        return Gain(f"{wording.gain(ratio)}, {where}.", "good")
    if ratio.high is not None and ratio.high < 1:
        return Gain(f"{wording.gain(ratio)}, {where}. What production gives instead is a measured fence.", "bad")
    return Gain(f"{wording.gain(ratio)}, {where}. What production gives is a safe operating point with proof.", "none")


def _settings(recommendation: Recommendation) -> Table | None:
    columns: list[tuple[str, Profile | Baseline]] = []
    if recommendation.production:
        columns.append(("Production", recommendation.production))
    if recommendation.protective:
        columns.append(("Protective", recommendation.protective))
    if recommendation.baseline:
        columns.append(("Defaults", recommendation.baseline))
    if not columns:
        return None
    configs = [_config_cells(of.config) for _, of in columns]
    further = [wording.further(of.config) for _, of in columns]
    others = sorted({name for values in further for name in values} - _SHOWN_ANYHOW)
    points = [_point_cells(of.operating_point) for _, of in columns]
    launches = [Cell(_launches(of.confirmed_by), f"first seen in trial {of.trial}") for _, of in columns]
    rows = [(Cell(name), *cells) for name, *cells in zip(_CONFIG_ROWS, *configs, strict=True)]
    rows += [(Cell(name), *(Cell(values.get(name, "the default")) for values in further)) for name in others]
    rows += [(Cell(name), *cells) for name, *cells in zip(_POINT_ROWS, *points, strict=True)]
    rows.append((Cell("Re-measured by"), *launches))
    return Table(("", *(name for name, _ in columns)), tuple(rows))


_CONFIG_ROWS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "max_model_len",
    "Chunked prefill, prefix caching",
)
_SHOWN_ANYHOW = {"max_model_len", "enable_chunked_prefill", "enable_prefix_caching"}
_POINT_ROWS = (
    "Measured at",
    "Output throughput",
    "p95 TTFT",
    "p95 ITL",
    "Preemptions",
    "Peak memory in use",
    "Memory reserved",
    "KV cache in use at the peak",
)


def _config_cells(config: EngineConfig) -> list[Cell]:
    switches = ["on" if on else "off" for on in (config.enable_chunked_prefill, config.enable_prefix_caching)]
    return [
        Cell(str(config.max_num_seqs)),
        Cell(str(config.max_num_batched_tokens)),
        Cell(wording.memory_share(config)),
        Cell("the model's own" if config.max_model_len is None else str(config.max_model_len)),
        Cell(", ".join(switches)),
    ]


def _point_cells(point: OperatingPoint | None) -> list[Cell]:
    if point is None:
        return [Cell("not measured")] * len(_POINT_ROWS)
    return [
        Cell(f"{point.load} concurrent"),
        cell(point.output_throughput, "tok/s"),
        cell(point.ttft_p95_ms, "ms"),
        cell(point.itl_p95_ms, "ms"),
        Cell(wording.preemptions(point)),
        Cell(wording.memory(point.peak_memory_bytes)),
        Cell(wording.memory(point.reserved_memory_bytes)),
        Cell(wording.kv_use(point)),
    ]


def _launches(numbers: Sequence[int]) -> str:
    return (
        f"trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}" if numbers else "no launch of its own"
    )


def _time(time: TimeSplit) -> tuple[TimePart, ...]:
    parts = (
        ("Engine starts", time.start_s),
        ("Load under measurement", time.measure_s),
        ("Overhead, waits included", time.overhead_s),
    )
    percents = [100 * seconds / time.wall_s if time.wall_s > 0 else 0.0 for _, seconds in parts]
    return tuple(
        TimePart(label, f"{wording.duration(seconds)} ({percent:.1f} %)", percent)
        for (label, seconds), percent in zip(parts, percents, strict=True)
    )


def _provenance(provenance: Provenance) -> Table:
    rows = (
        ("Engine", f"{provenance.engine} {provenance.engine_version or 'of unknown version'}"),
        ("Model", f"{provenance.model} ({provenance.model_hash})"),
        ("Workload", f"{provenance.workload} ({provenance.workload_hash})"),
        ("Hardware", f"{provenance.device}: {provenance.hardware}"),
        ("kneetune", provenance.kneetune_version),
        ("Python and packages", _packages(provenance)),
        ("Seed", str(provenance.seed)),
        ("Created", provenance.created),
    )
    return Table(("", ""), tuple((Cell(name), Cell(value)) for name, value in rows))


def _packages(provenance: Provenance) -> str:
    packages = [f"{name} {version}" for name, version in sorted(provenance.packages.items())]
    return ", ".join([f"Python {provenance.python}", *packages])
