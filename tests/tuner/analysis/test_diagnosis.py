"""What saturates is read off the stages around the bend, or not claimed."""

from __future__ import annotations

import pytest

from tests.fakes import records
from tests.tuner.analysis.curves import climbed
from tuner.analysis.diagnosis import binding
from tuner.answer import KneeFinding, LadderVerdict

LADDER = climbed()
KNEE = KneeFinding(verdict=LadderVerdict.KNEE, load=20.0)


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({}, "compute"),
        ({"num_preemptions": 3}, "kv_blocks"),
        ({"kv_cache_usage_peak": 0.99}, "kv_blocks"),
        ({"mean_running": 12.0, "mean_waiting": 12.0}, "token_budget"),
        ({"kv_cache_usage_peak": None}, None),
        ({"num_preemptions": None}, None),
        ({"mean_waiting": None}, None),
    ],
)
def test_each_bottleneck_shows_past_the_bend(change: dict[str, float | None], answer: str | None) -> None:
    """The stage past the knee tells KV blocks, token budget and compute apart; unknown figures tell nothing."""
    ladder = [stage.model_copy(update=change) if stage.load == 24 else stage for stage in LADDER]

    assert binding(ladder, KNEE, records.CHOSEN) == answer


def test_verdicts_without_a_bend() -> None:
    """A fence is named as our own limit; an unfinished ladder has no bottleneck yet."""
    assert binding(LADDER, KneeFinding(verdict=LadderVerdict.FENCED), records.CHOSEN) == "fence"
    assert binding(LADDER, KneeFinding(verdict=LadderVerdict.NOT_REACHED), records.CHOSEN) is None
    assert binding(LADDER, KneeFinding(verdict=LadderVerdict.ALREADY_SATURATED), records.CHOSEN) == "compute"
    assert binding([], KNEE, records.CHOSEN) is None
