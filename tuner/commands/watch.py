"""What a person sees while a job runs: a line a stage, with the time left."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import typer

from tuner.commands.words import duration_text, estimate_text, milliseconds_text, preemptions_text
from tuner.engine_config import EngineConfig
from tuner.progress import Clock
from tuner.records import StageRecord, TrialRecord, TrialRole
from tuner.wording import config_text

PURPOSE = {
    TrialRole.STUDY: "trial",
    TrialRole.CONFIRM_PRODUCTION: "confirm production, launch",
    TrialRole.CONFIRM_BASELINE: "confirm defaults, launch",
    TrialRole.CONFIRM_PROTECTIVE: "confirm protective, launch",
    TrialRole.SAFE_RATE: "safe rate of production, launch",
}


class PlainWatcher:
    """Writes plain lines to stderr; stdout stays free for the answer."""

    def __init__(self, *, simulated: bool = False) -> None:
        self._label = ", simulated" if simulated else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def trial_began(self, number: int, role: TrialRole, config: EngineConfig, origin: str, clock: Clock) -> None:
        """A head line for the launch."""
        self._line("")
        self._line(f"{PURPOSE[role]} {number}: {config_text(config)}  [{origin}{self._label}]  {clock_text(clock)}")

    def stage_ended(self, number: int, stage: StageRecord, clock: Clock) -> None:
        """One line: trial, load, throughput, latencies, preemptions."""
        self._line(f"  {number:>3} {stage_text(stage, clock)}")

    def trial_ended(self, trial: TrialRecord, clock: Clock) -> None:  # noqa: ARG002
        """A failed trial says why; a measured one has said it all in its stages."""
        if trial.outcome.outcome == "failed":
            self._line(f"  {trial.number:>3} {trial.outcome.kind.value}: {trial.outcome.detail}")

    def note(self, text: str) -> None:
        """A line of its own."""
        self._line(f"- {text}")

    def _line(self, text: str) -> None:
        typer.echo(text, err=True)


def stage_text(stage: StageRecord, clock: Clock) -> str:
    """A stage that ended, in one line: load, throughput, latencies, preemptions."""
    valid = "" if stage.valid else f"  INVALID: {'; '.join(stage.invalid_reasons)}"
    load = f"{stage.load:.3g}/s" if stage.loop == "open" else f"{stage.load}"
    sent = "" if stage.sent_rps is None else f"  sent {stage.sent_rps:.3g}/s"
    return (
        f"{stage.kind.value:<9} load {load:>4}  {estimate_text(stage.output_throughput):>14} tok/s"
        f"  p95 TTFT {milliseconds_text(stage.ttft_p95_ms):>9}  p95 ITL {milliseconds_text(stage.itl_p95_ms):>9}"
        f"  preemptions {preemptions_text(stage)}"
        f"{sent}  {clock_text(clock)}{valid}"
    )


def trial_text(trial: TrialRecord) -> str:
    """A trial that ended, in one line."""
    head = f"{PURPOSE[trial.role]} {trial.number}: {config_text(trial.config)}"
    if trial.outcome.outcome == "failed":
        return f"{head}: {trial.outcome.kind.value}: {trial.outcome.detail}"
    valid = [stage for stage in trial.outcome.stages if stage.valid]
    most = max(valid, key=lambda stage: stage.output_throughput.value, default=None)
    best = "none valid" if most is None else f"most {estimate_text(most.output_throughput)} tok/s at load {most.load}"
    return f"{head}: {len(trial.outcome.stages)} stages, {best}"


def clock_text(clock: Clock) -> str:
    """Time so far, and as far as it is known what is left."""
    left = "" if clock.left_s is None else f", about {duration_text(clock.left_s)} left"
    return f"({duration_text(clock.elapsed_s)}{left})"
