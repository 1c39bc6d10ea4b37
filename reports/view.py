"""What the report says, section by section, as plain text and tables; the template only lays it out.

Nothing here is HTML: every string is escaped where it is put on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tuner.analysis.knee import find_knee, points_of
from tuner.export import wording
from tuner.export.context import knee as knee_words
from tuner.export.runbook import Rung, Trigger, rungs, triggers
from tuner.records import (
    Baseline,
    BurstEvidence,
    EngineConfig,
    Estimate,
    KneeFinding,
    Measured,
    OperatingPoint,
    Profile,
    Provenance,
    Recommendation,
    RunVerdict,
    Slo,
    StageKind,
    StageRecord,
    TimeSplit,
    TrialRecord,
    TrialRole,
)


class Cell(NamedTuple):
    """A figure, and below it in small print its interval or what else qualifies it."""

    text: str
    note: str = ""


class Table(NamedTuple):
    """Column heads and rows; the first cell of a row names it."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


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
    why: tuple[str, ...]
    cross_checks: Table | None
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
        slo=_slo(recommendation.slo),
        gain=_gain(recommendation),
        settings=_settings(recommendation),
        evidence=recommendation.production.evidence if recommendation.production else (),
        cuts=recommendation.protective.cuts if recommendation.protective else (),
        why=_why(recommendation),
        cross_checks=_cross_checks(finding),
        overload=_overload(recommendation, trials),
        burst=_burst(burst) if burst else None,
        burst_words=_burst_words(burst) if burst else "",
        sureness=_sureness(recommendation),
        left_out=_left_out(trials),
        warnings=(*recommendation.warnings, *(finding.warnings if finding else ())),
        triggers=triggers(recommendation),
        rungs=rungs(recommendation),
        trials=_trials(trials, recommendation),
        trials_words=f"{recommendation.num_trials} study trials, {recommendation.num_failed} of them failed.",
        time=_time(recommendation.time),
        wall=wording.duration(recommendation.time.wall_s),
        provenance=_provenance(recommendation.provenance),
    )


_ADVICE = {
    RunVerdict.NOT_REACHED: "Raise the ladder's highest load and the fence, and tune again.",
    RunVerdict.ALREADY_SATURATED: "Tune with shorter requests, a smaller model or more hardware: one request at a time "
    "already takes all there is.",
    RunVerdict.TOO_FEW_STAGES: "Give the study more time, or see below which stages were left out and why.",
    RunVerdict.SLO_INFEASIBLE: "Loosen the SLO, shorten the workload's requests, or give the engine more hardware.",
    RunVerdict.NO_FEASIBLE_CONFIG: "See in the trial table why each setting failed; widen the search space to settings "
    "that start.",
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


def _slo(slo: Slo | None) -> str:
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
    points = [_point_cells(of.operating_point) for _, of in columns]
    launches = [Cell(_launches(of.confirmed_by), f"first seen in trial {of.trial}") for _, of in columns]
    rows = [(Cell(name), *cells) for name, *cells in zip(_CONFIG_ROWS, *configs, strict=True)]
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
        Cell(f"{config.gpu_memory_utilization:g}"),
        Cell("the model's own" if config.max_model_len is None else str(config.max_model_len)),
        Cell(", ".join(switches)),
    ]


def _point_cells(point: OperatingPoint | None) -> list[Cell]:
    if point is None:
        return [Cell("not measured")] * len(_POINT_ROWS)
    return [
        Cell(f"{point.load} concurrent"),
        _cell(point.output_throughput, "tok/s"),
        _cell(point.ttft_p95_ms, "ms"),
        _cell(point.itl_p95_ms, "ms"),
        Cell(wording.count(point.num_preemptions)),
        Cell(wording.memory(point.peak_memory_bytes)),
        Cell(wording.memory(point.reserved_memory_bytes)),
        Cell(wording.share(point.kv_cache_usage_peak)),
    ]


def _cell(estimate: Estimate, unit: str) -> Cell:
    """A figure with its interval below it, both in the unit given."""
    return Cell(f"{wording.number(estimate.value)} {unit}", wording.interval(estimate, wording.number))


def _launches(numbers: Sequence[int]) -> str:
    return (
        f"trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}" if numbers else "no launch of its own"
    )


_BINDING = {
    "kv_blocks": "What saturates there: KV blocks.",
    "token_budget": "What saturates there: the token budget of a step.",
    "compute": "What saturates there: compute. A larger batch takes proportionally longer steps.",
    "fence": "What stops it there is the fence, our own limit, and not the engine.",
}


def _why(recommendation: Recommendation) -> tuple[str, ...]:
    finding = recommendation.knee
    if finding is None:
        return ()
    lines = []
    if finding.load is not None:
        lines.append(f"Knee at {knee_words(recommendation)}, on the ladder of trial {recommendation.knee_trial}.")
        binding = "What saturates there is unknown." if finding.binding is None else finding.binding
        lines.append(_BINDING.get(binding, binding))
    if finding.cautious_load is not None:
        cautious = wording.number(finding.cautious_load)
        lines.append(f"The cautious knee (most throughput per latency, r = 1) is at {cautious}.")
    lines += [f"{signal[:1].upper()}{signal[1:]}" for signal in finding.signals]
    if finding.dips:
        lines.append(f"Local dips, not taken for the knee, at {', '.join(map(wording.number, finding.dips))}.")
    return tuple(lines)


def _cross_checks(finding: KneeFinding | None) -> Table | None:
    if finding is None:
        return None
    checks = finding.cross_checks
    answers = (
        ("Asymptotes cross (Little)", checks.asymptote_crossing),
        ("Universal Scalability Law", checks.usl),
        ("Kneedle", checks.kneedle),
        ("Last doubling that buys 10 %", checks.ten_percent_per_doubling),
    )
    rows = tuple((Cell(name), Cell("no answer" if at is None else wording.number(at))) for name, at in answers)
    return Table(("Other rules, shown but never deciding", "Load"), rows)


def _overload(recommendation: Recommendation, trials: Sequence[TrialRecord]) -> Table | None:
    rows = []
    for trial in trials:
        if not isinstance(trial.outcome, Measured):
            continue
        for stage in trial.outcome.stages:
            if stage.kind is StageKind.OVERLOAD and trial.number == recommendation.knee_trial:
                rows.append(_stage_row(f"Twice the fence of {trial.config.max_num_seqs} (trial {trial.number})", stage))
            if stage.kind is StageKind.DOUBLE and trial.role is TrialRole.CONFIRM_PRODUCTION:
                rows.append(_stage_row(f"Production at twice its load (trial {trial.number})", stage))
    head = ("", "Load", "Output throughput", "p95 TTFT", "p95 ITL", "Preemptions", "Failed", "Refused (503)")
    return Table(head, tuple(rows)) if rows else None


def _stage_row(name: str, stage: StageRecord) -> tuple[Cell, ...]:
    return (
        Cell(name, "" if stage.valid else f"invalid: {'; '.join(stage.invalid_reasons)}"),
        Cell(str(stage.load)),
        _cell(stage.output_throughput, "tok/s"),
        _cell(stage.ttft_p95_ms, "ms"),
        _cell(stage.itl_p95_ms, "ms"),
        Cell(wording.count(stage.num_preemptions)),
        Cell(str(stage.num_failed)),
        Cell(str(stage.num_rejected)),
    )


def _burst(burst: BurstEvidence) -> Table:
    rows = (
        (Cell("Load"), Cell(f"{burst.load} concurrent")),
        (Cell("p95 TTFT of admitted requests"), _cell(burst.ttft_p95_ms, "ms")),
        (Cell("p95 ITL"), _cell(burst.itl_p95_ms, "ms")),
        (Cell("Goodput"), Cell(f"{wording.number(burst.goodput_rps)} requests/s inside the SLO")),
        (Cell("Preemptions"), Cell(wording.count(burst.num_preemptions))),
        (
            Cell("Completed, failed, refused (503)"),
            Cell(f"{burst.num_completed}, {burst.num_failed}, {burst.num_rejected}"),
        ),
        (Cell("KV cache in use at the peak"), Cell(wording.share(burst.kv_cache_usage_peak))),
    )
    return Table(("Protective under the burst", ""), rows)


def _burst_words(burst: BurstEvidence) -> str:
    if burst.passed:
        return "Protective passed: no rule of the burst was broken."
    return f"Protective did not pass: {'; '.join(burst.reasons) or 'no reason was recorded'}."


def _sureness(recommendation: Recommendation) -> Table | None:
    production = recommendation.production
    if production is None:
        return None
    point = production.operating_point
    named = (
        ("Output throughput, tok/s", point.output_throughput),
        ("p95 TTFT, ms", point.ttft_p95_ms),
        ("p95 ITL, ms", point.itl_p95_ms),
    )
    rows = tuple(
        (
            Cell(name),
            Cell(wording.number(e.value)),
            Cell(wording.interval(e, wording.number)),
            Cell(wording.count(e.num_samples)),
        )
        for name, e in named
    )
    return Table(("Production's figures", "Value", "95 % interval", "Samples"), rows)


def _left_out(trials: Sequence[TrialRecord]) -> tuple[str, ...]:
    return tuple(
        f"Trial {trial.number}, load {stage.load}: {'; '.join(stage.invalid_reasons) or 'no reason was recorded'}"
        for trial in trials
        if isinstance(trial.outcome, Measured)
        for stage in trial.outcome.stages
        if not stage.valid
    )


def _trials(trials: Sequence[TrialRecord], recommendation: Recommendation) -> Table:
    head = (
        "Trial",
        "Sequences / budget / share",
        "Outcome",
        "Knee",
        "Best stage inside the SLO",
        "Preemptions",
        "Wall",
    )
    rows = [_trial_row(trial, recommendation.slo, _finding(trial, recommendation)) for trial in trials]
    return Table(head, tuple(rows))


def _finding(trial: TrialRecord, recommendation: Recommendation) -> KneeFinding | None:
    """What the trial's own ladder says; the answer's finding where it is the answer's ladder."""
    if trial.number == recommendation.knee_trial:
        return recommendation.knee
    if trial.role is not TrialRole.STUDY or not isinstance(trial.outcome, Measured):
        return None
    return find_knee(points_of(trial.outcome.stages))


def _trial_row(trial: TrialRecord, slo: Slo | None, finding: KneeFinding | None) -> tuple[Cell, ...]:
    config = trial.config
    length = "" if config.max_model_len is None else f"max_model_len {config.max_model_len}"
    role = "" if trial.role is TrialRole.STUDY else ", re-measured"
    head = (
        Cell(str(trial.number), f"{trial.origin}{role}"),
        Cell(
            f"{config.max_num_seqs} / {config.max_num_batched_tokens} / {config.gpu_memory_utilization:g}",
            length,
        ),
    )
    wall = Cell(wording.duration(trial.wall_s))
    if not isinstance(trial.outcome, Measured):
        nothing = Cell("–")
        return (*head, Cell(f"failed: {trial.outcome.kind}", trial.outcome.detail), nothing, nothing, nothing, wall)
    stages = trial.outcome.stages
    num_invalid = sum(not stage.valid for stage in stages)
    outcome = Cell(
        finding.verdict.value if finding else "measured",
        f"{len(stages)} stages" + (f", {num_invalid} invalid" if num_invalid else ""),
    )
    return (*head, outcome, _knee_cell(finding), _best_cell(stages, slo), _preemption_cell(stages), wall)


def _knee_cell(finding: KneeFinding | None) -> Cell:
    if finding is None or finding.load is None:
        return Cell("–")
    interval = finding.interval
    note = "" if interval is None else f"{wording.number(interval[0])} to {wording.number(interval[1])}"
    return Cell(wording.number(finding.load), note)


def _best_cell(stages: Sequence[StageRecord], slo: Slo | None) -> Cell:
    """The valid, unfenced stage of most throughput that meets the SLO: where this trial could be run."""
    inside = [stage for stage in stages if stage.valid and not stage.fenced and slo is not None and _meets(stage, slo)]
    if not inside:
        return Cell("none")
    best = max(inside, key=lambda stage: stage.output_throughput.value)
    ttft, itl = wording.latency(best.ttft_p95_ms.value), wording.latency(best.itl_p95_ms.value)
    return Cell(f"{best.load}: {wording.throughput(best.output_throughput.value)}", f"p95 TTFT {ttft}, p95 ITL {itl}")


def _meets(stage: StageRecord, slo: Slo) -> bool:
    return stage.ttft_p95_ms.value <= slo.ttft_p95_ms and stage.itl_p95_ms.value <= slo.itl_p95_ms


def _preemption_cell(stages: Sequence[StageRecord]) -> Cell:
    """The sum over all stages; one stage that is unknown makes the sum unknown."""
    counts = [stage.num_preemptions for stage in stages]
    known = [count for count in counts if count is not None]
    return Cell(wording.count(sum(known) if len(known) == len(counts) else None))


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
