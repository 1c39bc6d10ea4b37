"""The sections that say why one should believe the answer: the knee, overload, burst, intervals, what was left out."""

from __future__ import annotations

from collections.abc import Sequence

from reports.tables import Cell, Table, cell
from tuner import wording
from tuner.answer import BurstEvidence, Diagnosis, KneeFinding, Recommendation
from tuner.export.context import knee as knee_words
from tuner.records import Measured, StageKind, StageRecord, TrialRecord, TrialRole

_BINDING = {
    "unknown": "What saturates there is unknown.",
    "kv_blocks": "What saturates there: KV blocks.",
    "token_budget": "What saturates there: the token budget of a step.",
    "compute": "What saturates there: compute. A larger batch takes proportionally longer steps.",
    "memory_bandwidth": "What saturates there: memory bandwidth. A step mostly reads weights, keys and values.",
    "server_cpu": "What saturates there: the server's CPU, between the steps.",
    "client": "What stops it there is the load generator, and not the engine.",
    "fence": "What stops it there is the fence, our own limit, and not the engine.",
}


def why(recommendation: Recommendation) -> tuple[str, ...]:
    """Where the knee is and what bends the curve there."""
    finding = recommendation.knee
    if finding is None:
        return ()
    found = f"Knee at {knee_words(recommendation)}, on the ladder of trial {recommendation.knee_trial}."
    because = () if recommendation.diagnosis is None else recommendation.diagnosis.evidence
    return (*([found] if finding.load is not None else []), *finding_lines(finding, because))


def finding_lines(finding: KneeFinding, because: Sequence[str]) -> tuple[str, ...]:
    """What bends a ladder's curve, why that is known, and what was seen on it."""
    lines = []
    if finding.load is not None:
        binding = finding.binding or "unknown"
        lines.append(_BINDING.get(binding, f"What saturates there: {binding}."))
    if finding.cautious_load is not None:
        cautious = wording.number(finding.cautious_load)
        lines.append(f"The cautious knee (most throughput per latency, r = 1) is at {cautious}.")
    lines += [f"{sentence[:1].upper()}{sentence[1:]}." for sentence in because]
    lines += [f"{signal[:1].upper()}{signal[1:]}" for signal in finding.signals]
    if finding.dips:
        lines.append(f"Local dips, not taken for the knee, at {', '.join(map(wording.number, finding.dips))}.")
    return tuple(lines)


_EFFECTS = {"can_help": "can help", "cannot_help": "cannot help", "would_hurt": "would hurt", "unknown": "unknown"}


def advice(diagnosis: Diagnosis | None) -> Table | None:
    """Which parameters can still help, and why."""
    if diagnosis is None or not diagnosis.advice:
        return None
    rows = tuple(
        (Cell(f"{each.parameter} {each.change}"), Cell(_EFFECTS[each.effect]), Cell(each.why))
        for each in diagnosis.advice
    )
    return Table(("Parameter", "Effect", "Because"), rows)


def capacity_lines(recommendation: Recommendation) -> tuple[str, ...]:
    """The safe rate, what one replica holds, and what an expected load takes."""
    capacity, rate_rps = recommendation.capacity, recommendation.safe_rate_rps
    safe = (
        () if rate_rps is None else (f"Safe rate of Poisson arrivals, by production: {wording.safe_rate(rate_rps)}.",)
    )
    if capacity is None:
        return safe
    held = wording.held(capacity)
    lines = [f"One replica: {held}.", capacity.reason, wording.cost(capacity)]
    return (*safe, *(line for line in lines if line))


def cross_checks(finding: KneeFinding | None) -> Table | None:
    """What other rules say."""
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


_WHO = {TrialRole.CONFIRM_PRODUCTION: "Production", TrialRole.CONFIRM_BASELINE: "The defaults"}


def overload(recommendation: Recommendation, trials: Sequence[TrialRecord]) -> Table | None:
    """What load past the fence did: to the knee's trial, to production and to the defaults."""
    rows = []
    shown = {recommendation.knee_trial, recommendation.baseline.trial if recommendation.baseline else None}
    for trial in trials:
        if not isinstance(trial.outcome, Measured):
            continue
        for stage in trial.outcome.stages:
            if stage.kind is StageKind.OVERLOAD and trial.number in shown:
                whose = "the fence" if trial.number == recommendation.knee_trial else "the defaults' fence"
                rows.append(_stage_row(f"Past {whose} of {trial.config.fence} (trial {trial.number})", stage))
            if stage.kind is StageKind.DOUBLE:
                rows.append(_stage_row(f"{_WHO[trial.role]} at twice production's load (trial {trial.number})", stage))
    head = ("", "Load", "Output throughput", "p95 TTFT", "p95 ITL", "Preemptions", "Failed", "Refused (503)")
    return Table(head, tuple(rows)) if rows else None


def _stage_row(name: str, stage: StageRecord) -> tuple[Cell, ...]:
    return (
        Cell(name, "" if stage.valid else f"invalid: {'; '.join(stage.invalid_reasons)}"),
        Cell(wording.load(stage)),
        cell(stage.output_throughput, "tok/s"),
        cell(stage.ttft_p95_ms, "ms"),
        cell(stage.itl_p95_ms, "ms"),
        Cell(wording.preemptions(stage)),
        Cell(str(stage.num_failed)),
        Cell(str(stage.num_rejected)),
    )


def burst_table(burst: BurstEvidence) -> Table:
    """What the burst did to protective."""
    rows = (
        (Cell("Load"), Cell(f"{burst.load} concurrent")),
        (Cell("p95 TTFT of admitted requests"), cell(burst.ttft_p95_ms, "ms")),
        (Cell("p95 ITL"), cell(burst.itl_p95_ms, "ms")),
        (Cell("Goodput"), Cell(f"{wording.number(burst.goodput_rps)} requests/s inside the SLO")),
        (Cell("Preemptions"), Cell(wording.preemptions(burst))),
        (
            Cell("Completed, failed, refused (503)"),
            Cell(f"{burst.num_completed}, {burst.num_failed}, {burst.num_rejected}"),
        ),
        (Cell("KV cache in use at the peak"), Cell(wording.kv_use(burst))),
    )
    return Table(("Protective under the burst", ""), rows)


def burst_words(burst: BurstEvidence) -> str:
    """Whether protective held, in a sentence."""
    if burst.passed:
        return "Protective passed: no rule of the burst was broken."
    return f"Protective did not pass: {'; '.join(burst.reasons) or 'no reason was recorded'}."


def sureness(recommendation: Recommendation) -> Table | None:
    """Production's figures with their intervals."""
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


def left_out(trials: Sequence[TrialRecord]) -> tuple[str, ...]:
    """Every invalid stage and its reasons."""
    return tuple(
        f"Trial {trial.number}, load {wording.load(stage)}: "
        f"{'; '.join(stage.invalid_reasons) or 'no reason was recorded'}"
        for trial in trials
        if isinstance(trial.outcome, Measured)
        for stage in trial.outcome.stages
        if not stage.valid
    )
