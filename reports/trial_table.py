"""The trial table: every launch, what came of it, where it could be run."""

from __future__ import annotations

from collections.abc import Sequence

from reports.tables import Cell, Table
from tuner import wording
from tuner.analysis.fence import ladder_knee
from tuner.analysis.graph_grid import stages_to_stand_on
from tuner.analysis.slo import operating_point
from tuner.answer import KneeFinding, Recommendation, Slo
from tuner.records import Measured, StageRecord, TrialRecord, TrialRole


def trial_table(trials: Sequence[TrialRecord], recommendation: Recommendation) -> Table:
    """A row a launch, the study's and the confirming ones."""
    head = (
        "Trial",
        "Sequences / budget / share",
        "Outcome",
        "Knee",
        "Operating point",
        "Preemptions",
        "Memory in use / reserved",
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
    return ladder_knee(trial.outcome.stages, fence=trial.config.fence)


def _trial_row(trial: TrialRecord, slo: Slo | None, finding: KneeFinding | None) -> tuple[Cell, ...]:
    config = trial.config
    others = ", ".join(f"{name} {value}" for name, value in wording.further(config).items())
    role = "" if trial.role is TrialRole.STUDY else ", re-measured"
    head = (
        Cell(str(trial.number), f"{trial.origin}{role}"),
        Cell(
            f"{config.max_num_seqs} / {config.max_num_batched_tokens} / {wording.memory_share(config)}",
            others,
        ),
    )
    wall = Cell(wording.duration(trial.wall_s))
    if not isinstance(trial.outcome, Measured):
        nothing = Cell("–")
        return (
            *head,
            Cell(f"failed: {trial.outcome.kind}", trial.outcome.detail),
            nothing,
            nothing,
            nothing,
            nothing,
            wall,
        )
    stages = trial.outcome.stages
    num_invalid = sum(not stage.valid for stage in stages)
    outcome = Cell(
        finding.verdict.value if finding else "measured",
        f"{len(stages)} stages" + (f", {num_invalid} invalid" if num_invalid else ""),
    )
    memory = _memory_cell(stages)
    return (
        *head,
        outcome,
        _knee_cell(finding),
        _best_cell(stages_to_stand_on(trial.outcome), finding, slo),
        _preemption_cell(stages),
        memory,
        wall,
    )


def _knee_cell(finding: KneeFinding | None) -> Cell:
    if finding is None or finding.load is None:
        return Cell("–")
    interval = finding.interval
    note = "" if interval is None else f"{wording.number(interval[0])} to {wording.number(interval[1])}"
    return Cell(wording.number(finding.load), note)


def _best_cell(stages: Sequence[StageRecord], finding: KneeFinding | None, slo: Slo | None) -> Cell:
    """The operating point: where this trial could be run."""
    best = None if finding is None or slo is None else operating_point(stages, finding, slo)
    if best is None:
        return Cell("none" if finding else "–")
    ttft, itl = wording.latency(best.ttft_p95_ms.value), wording.latency(best.itl_p95_ms.value)
    return Cell(f"{best.load}: {wording.throughput(best.output_throughput.value)}", f"p95 TTFT {ttft}, p95 ITL {itl}")


def _preemption_cell(stages: Sequence[StageRecord]) -> Cell:
    """The sum over all stages; one stage that is unknown makes the sum unknown."""
    if stages and "num_preemptions" in stages[0].not_applicable:
        return Cell(wording.NOT_APPLICABLE)
    counts = [stage.num_preemptions for stage in stages]
    known = [count for count in counts if count is not None]
    return Cell(wording.count(sum(known) if len(known) == len(counts) else None))


def _memory_cell(stages: Sequence[StageRecord]) -> Cell:
    """The peak over all stages, and what the share takes whatever the load."""
    peaks = [stage.memory.in_use_peak_bytes for stage in stages]
    known = [peak for peak in peaks if peak is not None]
    reserved = next((stage.memory.reserved_bytes for stage in stages), None)
    return Cell(
        f"{wording.memory(max(known) if known and len(known) == len(peaks) else None)} / {wording.memory(reserved)}"
    )
