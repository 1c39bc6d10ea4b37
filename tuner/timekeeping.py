"""Where a job's time went, from its trials' records, several of which may have run at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.answer import TimeSplit
from tuner.records import TrialRecord, TrialRole


def end_s(trials: Sequence[TrialRecord]) -> float:
    """When the last of `trials` ended, since the job began. Unit: seconds."""
    return max((end for _, end in _spans(trials)), default=0.0)


def busy_s(trials: Sequence[TrialRecord]) -> float:
    """For how long at least one trial ran. Unit: seconds."""
    total = reached = 0.0
    for begun, end in sorted(_spans(trials)):
        total += max(0.0, end - max(begun, reached))
        reached = max(reached, end)
    return total


def time_split(trials: Sequence[TrialRecord], *, wall_s: float) -> TimeSplit:
    """Where `wall_s` went. While trials run side by side, each counts for its part of that time."""
    trial_s = sum(trial.wall_s for trial in trials)
    part = busy_s(trials) / trial_s if trial_s > 0 else 1.0
    start_s = part * sum(trial.start_s for trial in trials)
    measure_s = part * sum(trial.measure_s for trial in trials)
    return TimeSplit(
        wall_s=wall_s, start_s=start_s, measure_s=measure_s, overhead_s=max(0.0, wall_s - start_s - measure_s)
    )


def device_s(trials: Sequence[TrialRecord]) -> float:
    """Time of all devices together that the launches took. Unit: device-seconds."""
    return sum(trial.wall_s * trial.config.num_devices for trial in trials)


def mean_launch_s(trials: Sequence[TrialRecord], role: TrialRole) -> float | None:
    """Mean wall time of the launches of that role; None before the first."""
    walls = [trial.wall_s for trial in trials if trial.role is role and trial.launched]
    return sum(walls) / len(walls) if walls else None


def mean_stage_s(trials: Sequence[TrialRecord]) -> float | None:
    """Mean wall time of the stages below the fence; None before the first."""
    walls = [
        stage.wall_s
        for trial in trials
        if trial.outcome.outcome == "measured"
        for stage in trial.outcome.stages
        if not stage.fenced
    ]
    return sum(walls) / len(walls) if walls else None


def _spans(trials: Sequence[TrialRecord]) -> Iterator[tuple[float, float]]:
    """When each began and ended, since the job did; one of which it is not known began when the one before ended."""
    end = 0.0
    for trial in trials:
        begun = end if trial.begun_s is None else trial.begun_s
        end = begun + trial.wall_s
        yield begun, end
