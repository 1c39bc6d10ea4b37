"""On a terminal a person sees at a glance how a study stands."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.fakes.records import resolved_run
from tuner.commands.live import LiveWatcher
from tuner.progress import Clock


def test_the_picture_shows_trial_stages_best_failures_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Settings, throughput, p95s, the best so far, failures by kind, and when it will be over."""
    watcher, clock = LiveWatcher("a run"), Clock(elapsed_s=61.0, left_s=125.0)
    trials = resolved_run().trials
    with watcher:
        for trial in trials:
            watcher.trial_began(trial.number, trial.role, trial.config, trial.origin, clock)
            if trial.outcome.outcome == "measured":
                for stage in trial.outcome.stages:
                    watcher.stage_ended(trial.number, stage, clock)
            watcher.trial_ended(trial, clock)
        watcher.note("something happened")
    console = Console(width=160, record=True)
    console.print(watcher.picture())
    picture = console.export_text()
    assert "a run  (1:01, about 2:05 left)" in picture
    assert "best so far: " in picture
    assert "p95 ITL" in picture
    assert "something happened" in picture
    ended = trials[-1].number
    assert f" {ended}: max_num_seqs=" in picture
    failed = next(trial.outcome for trial in trials if trial.outcome.outcome == "failed" and trial.launched)
    assert f"{failed.kind.value} " in picture
    lines = capsys.readouterr().err
    assert all(f" {trial.number}: max_num_seqs=" in lines for trial in trials)


def test_trials_side_by_side_are_shown_side_by_side() -> None:
    """With four cards at work a person sees four trials, each with its latest stages, and none that has ended."""
    watcher, clock = LiveWatcher("a run"), Clock(elapsed_s=61.0, left_s=None)
    first, second, third = [trial for trial in resolved_run().trials if trial.outcome.outcome == "measured"][:3]
    assert first.outcome.outcome == second.outcome.outcome == "measured"
    with watcher:
        for trial in (first, second):
            watcher.trial_began(trial.number, trial.role, trial.config, trial.origin, clock)
        for one, other in zip(first.outcome.stages, second.outcome.stages, strict=False):
            watcher.stage_ended(first.number, one, clock)
            watcher.stage_ended(second.number, other, clock)
        watcher.trial_ended(first, clock)
        watcher.trial_began(third.number, third.role, third.config, third.origin, clock)
    console = Console(width=160, record=True)
    console.print(watcher.picture())
    picture = console.export_text()
    assert f"trial {second.number}: " in picture
    assert f"trial {third.number}: " in picture
    assert f"trial {first.number}: " not in picture
    assert f"{second.outcome.stages[-1].load} " in picture
