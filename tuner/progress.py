"""What a job reports while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tuner.engine_config import EngineConfig
from tuner.records import StageRecord, TrialRecord, TrialRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Time so far and, as far as it can be told, to go."""

    elapsed_s: float
    left_s: float | None
    """None until a first trial has shown how long one takes."""


class Watcher(Protocol):
    """Somebody who looks on. Every call comes from the process that tunes, in order."""

    def trial_began(self, number: int, role: TrialRole, config: EngineConfig, origin: str, clock: Clock) -> None:
        """An engine is about to be launched."""

    def stage_ended(self, number: int, stage: StageRecord, clock: Clock) -> None:
        """A stage was measured."""

    def trial_ended(self, trial: TrialRecord, clock: Clock) -> None:
        """A trial is over and on disk; also called for a setting refused without a launch."""

    def note(self, text: str) -> None:
        """Something a person should know: a retry, a choice, an early end."""
