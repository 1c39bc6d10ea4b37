"""Users who think are no requests: a fence holds back what runs at once, and only that."""

from __future__ import annotations

import pytest

from tests.fakes.records import CHOSEN, stage
from tuner.measure.past_fence import is_past_fence
from tuner.records import StageKind, StageRecord


def _stage(load: int, **seen: object) -> StageRecord:
    return stage(CHOSEN, load).model_copy(update=seen)


def test_users_who_do_not_think_are_requests() -> None:
    """Each of them has one in flight all the time."""
    assert is_past_fence(_stage(9), 8)
    assert not is_past_fence(_stage(8), 8)


@pytest.mark.parametrize(
    ("seen", "past"),
    [
        ({"mean_in_flight": 5.0, "mean_running": 5.0, "mean_waiting": 0.0}, False),
        ({"mean_in_flight": 30.0, "mean_running": 7.9, "mean_waiting": 22.0}, True),
        ({"mean_in_flight": 7.5, "mean_running": 7.3, "mean_waiting": 0.2}, False),
        ({"mean_in_flight": 30.0, "mean_running": 4.0, "mean_waiting": 26.0}, False),
        ({"mean_in_flight": 7.5, "mean_running": None, "mean_waiting": None}, False),
        ({"mean_in_flight": 8.5, "mean_running": None, "mean_waiting": None}, True),
    ],
)
def test_a_hundred_who_think_may_all_fit_within_a_fence_of_eight(
    seen: dict[str, object],
    past: object,
) -> None:
    """A ladder that calls them fenced where nothing waits sends its user to raise a limit that holds nobody back."""
    assert is_past_fence(_stage(100, thinks=True, **seen), 8) is past


def test_a_rate_is_no_number_of_users() -> None:
    """400 requests a second may be three in flight."""
    rate = stage(CHOSEN, 400).model_copy(update={"kind": StageKind.RATE, "loop": "open"})
    assert not is_past_fence(rate, 8)
