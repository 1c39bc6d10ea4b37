"""Other work on the machine is said beside the figures it may have spoilt, and nothing is said of a quiet one."""

from __future__ import annotations

import pytest

from tests.fakes import records
from tuner.analysis.other_work import is_disturbed, other_work_warning
from tuner.records import Failed, FailureKind, Measured, StageRecord, TrialRecord


def _stage(other: float | None, idle: float | None) -> StageRecord:
    made = records.stage(records.CHOSEN, 8, index=0)
    return made.model_copy(update={"other_cpu_cores": other, "idle_cpu_cores": idle})


def _trial(number: int, *stages: StageRecord) -> TrialRecord:
    return records.trial(number, records.CHOSEN, outcome=Measured(facts=records.facts(records.CHOSEN), stages=stages))


@pytest.mark.parametrize(
    ("other", "idle", "is_one"),
    [
        (0.9, 0.1, True),
        (0.3, 0.4, True),
        (0.05, 0.0, False),  # services of a quiet machine
        (10.0, 50.0, False),  # a job beside it on 64 cores
        (40.0, 20.0, True),
        (None, None, False),
    ],
)
def test_others_count_where_they_took_what_was_wanted(other: float | None, idle: float | None, is_one: bool) -> None:  # noqa: FBT001 - a case
    """A warning at every run is read by nobody; none at all sells a neighbour's work as a gain."""
    assert is_disturbed(_stage(other, idle)) is is_one


def test_the_launches_that_met_it_are_named() -> None:
    """Whoever reads that a gain may be off must find which launch made it so."""
    quiet, busy = _stage(0.02, 0.5), _stage(0.8, 0.05)
    failed = records.trial(9, records.CHOSEN, outcome=Failed(kind=FailureKind.CRASHED, detail="signal 11"))
    assert other_work_warning([_trial(3, quiet), failed]) is None
    one = other_work_warning([_trial(3, quiet), _trial(4, quiet, busy), failed])
    assert one is not None
    assert "up to 0.8 cores of this machine in trial 4:" in one
    assert "in trials 4, 5:" in str(other_work_warning([_trial(4, busy), _trial(5, busy)]))
    assert other_work_warning([_trial(4, busy.model_copy(update={"valid": False}))]) is None
