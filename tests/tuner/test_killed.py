"""A study outlives the death of its driver, its worker and its engine: real processes, killed at random moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tuner.kill_study import left_alive, run_and_kill
from tuner.records import FailureKind, TrialRole
from tuner.store import RunStore

SETTINGS = {
    *((8, budget, share) for budget in (256, 512) for share in (0.6, 0.8)),
    (128, 2048, 0.92),
    (4, 256, 0.7),
}
"""The grid, the engine's defaults and the cautious start."""


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_study_killed_three_times_measures_what_it_was_asked_to_and_leaves_nothing(tmp_path: Path) -> None:
    """After a bad night the same settings are measured, no number is missing, no engine holds the device."""
    outcome = run_and_kill(tmp_path, num_kills=3, seed=5, longest_wait_s=8.0)
    store = RunStore.open(tmp_path / "runs" / "killed")
    trials = store.trials()
    assert outcome.exit_code in (0, 1)
    assert sum(outcome.num_kills.values()) > 0
    assert store.has_answer()
    assert [trial.number for trial in trials] == list(range(len(trials)))
    measured = {
        (trial.config.max_num_seqs, trial.config.max_num_batched_tokens, trial.config.gpu_memory_utilization)
        for trial in trials
        if trial.role is TrialRole.STUDY and trial.outcome.outcome == "measured"
    }
    assert measured == SETTINGS
    failed = [trial.outcome.kind for trial in trials if trial.outcome.outcome == "failed"]
    assert set(failed) <= {FailureKind.INFRASTRUCTURE, FailureKind.CRASHED}
    assert len(failed) <= sum(outcome.num_kills.values())
    assert left_alive(store) == []
