"""A server that went away is named with its load and its last words; one that was merely slow is not."""

from __future__ import annotations

from tests.fakes.records import CHOSEN, stage
from tuner.analysis.benched import Asked, conclude
from tuner.analysis.outage import outage
from tuner.records import StageRecord

REFUSED = "no connection to 127.0.0.1:8000: Connect call failed"


def _stage(load: int, index: int, **seen: object) -> StageRecord:
    return stage(CHOSEN, load, index=index).model_copy(update=seen)


def _dead(load: int, index: int, *, completed: int = 0) -> StageRecord:
    """A stage in which requests began to fail, after `completed` that had ended well."""
    failed = {"num_completed": completed, "num_failed": 20, "ended_by": "failures", "first_error": REFUSED}
    return _stage(load, index, valid=False, invalid_reasons=("stopped early",), wall_s=4.0, **failed)


def test_a_killed_server_is_named_with_the_load_it_died_at() -> None:
    """Nobody gives a dead server more time: its log says why, and the load is the first clue."""
    stages = [_stage(1, 0, wall_s=10.0), _stage(2, 1, wall_s=10.0), _dead(4, 2, completed=30), _dead(4, 3)]
    found = outage(stages)
    assert found is not None
    assert (found.stage.index, found.after_s, found.where) == (2, 24.0, "load 4")
    because = conclude(stages, Asked()).because
    assert because[0] == found.sentence
    assert all(word in because[0] for word in ("load 4", "stage 3", "24 s", REFUSED))


def test_a_hung_engine_is_one_that_stopped_answering() -> None:
    """Health answers 200 while nothing runs: more time would not bring an answer either."""
    found = outage([_stage(1, 0), _stage(2, 1, ended_by="stalled", valid=False)])
    assert found is not None
    assert found.stage.load == 2


def test_failures_that_passed_are_no_outage() -> None:
    """A server that came back, or answers in part, or was not asked, is there."""
    assert outage([]) is None
    assert outage([_dead(1, 0), _stage(2, 1)]) is None
    assert outage([_stage(1, 0), _dead(2, 1, completed=40)]) is None
    assert outage([_stage(1, 0), _stage(2, 1, num_completed=0, num_failed=0, valid=False)]) is None
