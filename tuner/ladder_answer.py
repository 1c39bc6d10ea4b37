"""The answer to one ladder as a script reads it, wherever its stages come from."""

from __future__ import annotations

from enum import StrEnum

from tuner.answer import CrossChecks, KneeFinding, LadderVerdict
from tuner.frozen import Record


class AnswerVerdict(StrEnum):
    """What is said of a ladder that stands for itself."""

    RESOLVED = "resolved"
    FENCED = "fenced"
    NOT_REACHED = "not_reached"
    ALREADY_SATURATED = "already_saturated"
    TOO_FEW_STAGES = "too_few_stages"
    SLO_INFEASIBLE = "slo_infeasible"
    """There is a knee, and no stage left of it is inside the limits that were given."""

    MEASURED = "measured"
    """Every rate that was asked for was measured; too few, or too low ones, to look for a knee."""

    NOT_MEASURED = "not_measured"
    """Some rate that was asked for has no valid stage."""


class KneeFigures(Record):
    """The knee as a script reads it."""

    load: float
    interval: tuple[float, float] | None
    signals: tuple[str, ...]
    cross_checks: CrossChecks


class LadderAnswer(Record):
    """Verdict, knee, warnings: the part that every answer to a ladder has."""

    verdict: AnswerVerdict
    knee: KneeFigures | None
    """None where the verdict is not `resolved`."""

    warnings: tuple[str, ...]


def verdict_of(finding: KneeFinding, *, is_feasible: bool) -> AnswerVerdict:
    """The finding's verdict as an answer's: a knee resolves the question, unless no stage meets the limits.

    Args:
        is_feasible: whether a stage left of the knee is inside the limits; True where none were given.
    """
    if finding.verdict is not LadderVerdict.KNEE:
        return AnswerVerdict(finding.verdict.value)
    return AnswerVerdict.RESOLVED if is_feasible else AnswerVerdict.SLO_INFEASIBLE


def knee_figures(finding: KneeFinding, verdict: AnswerVerdict, signals: tuple[str, ...]) -> KneeFigures | None:
    """The knee, where the verdict is that there is one."""
    if verdict is not AnswerVerdict.RESOLVED or finding.load is None:
        return None
    return KneeFigures(load=finding.load, interval=finding.interval, signals=signals, cross_checks=finding.cross_checks)
