"""What a terminal shows while a job runs: one live picture, and above it a line for every trial that ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tuner.analysis.standing import standing
from tuner.commands.watch import PURPOSE, clock_text, trial_text
from tuner.commands.words import estimate_text, milliseconds_text, preemptions_text
from tuner.engine_config import EngineConfig
from tuner.progress import Clock
from tuner.records import StageRecord, TrialRecord, TrialRole
from tuner.wording import config_text

NOTES_SHOWN = 3
STAGES_SHOWN = 12
"""Rows of all trials together where several run: the latest of each."""


@dataclass(slots=True)
class _Shown:
    """A trial in the picture."""

    head: str
    stages: list[StageRecord]
    has_ended: bool = False


class LiveWatcher:
    """Draws on stderr while entered; stdout stays free for the answer."""

    def __init__(self, title: str, *, simulated: bool = False) -> None:
        self._label = ", simulated" if simulated else ""
        self._title = title
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._trials: list[TrialRecord] = []
        self._shown: dict[int, _Shown] = {}
        self._notes: deque[str] = deque(maxlen=NOTES_SHOWN)
        self._clock: Clock | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def trial_began(self, number: int, role: TrialRole, config: EngineConfig, origin: str, clock: Clock) -> None:
        """The picture turns to this launch, and to those that run beside it."""
        self._shown = {other: shown for other, shown in self._shown.items() if not shown.has_ended}
        self._shown[number] = _Shown(f"{PURPOSE[role]} {number}: {config_text(config)}  [{origin}{self._label}]", [])
        self._draw(clock)

    def stage_ended(self, number: int, stage: StageRecord, clock: Clock) -> None:
        """A row more."""
        self._shown[number].stages.append(stage)
        self._draw(clock)

    def trial_ended(self, trial: TrialRecord, clock: Clock) -> None:
        """A line that stays, and the best so far anew."""
        self._trials.append(trial)
        if trial.number in self._shown:
            self._shown[trial.number].has_ended = True
        self._console.print(trial_text(trial), markup=False)
        self._draw(clock)

    def note(self, text: str) -> None:
        """One of the latest lines below the picture."""
        self._notes.append(text)
        self._draw(self._clock)

    def _draw(self, clock: Clock | None) -> None:
        self._clock = clock
        self._live.update(self.picture(), refresh=True)

    def picture(self) -> RenderableType:
        """The whole picture as it stands."""
        time = "" if self._clock is None else f"  {clock_text(self._clock)}"
        head = Text(f"{self._title}{time}", style="bold")
        notes = (Text(f"- {note}", style="dim") for note in self._notes)
        return Group(head, *self._running(), *self._standing(), *notes)

    def _running(self) -> Iterator[RenderableType]:
        if not self._shown:
            yield Text("starting")
        most = STAGES_SHOWN // len(self._shown) if len(self._shown) > 1 else None
        for shown in self._shown.values():
            yield Text(shown.head)
            yield self._table(shown.stages if most is None else shown.stages[-max(1, most) :])

    def _table(self, stages: Sequence[StageRecord]) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("stage", "load", "tok/s", "p95 TTFT", "p95 ITL", "preemptions", ""):
            table.add_column(name, justify="left" if name in ("stage", "") else "right")
        for stage in stages:
            table.add_row(
                stage.kind.value,
                str(stage.load),
                estimate_text(stage.output_throughput),
                milliseconds_text(stage.ttft_p95_ms),
                milliseconds_text(stage.itl_p95_ms),
                preemptions_text(stage),
                "" if stage.valid else f"invalid: {'; '.join(stage.invalid_reasons)}",
            )
        return table

    def _standing(self) -> list[Text]:
        now = standing(self._trials, None)
        failed = ", ".join(f"{kind.value} {count}" for kind, count in now.failures.items()) or "none"
        lines = [Text(f"measured {now.num_measured}, refused {now.num_refused}, failed: {failed}")]
        if now.best is not None:
            trial, stage = now.best
            speed = estimate_text(stage.output_throughput)
            lines.append(Text(f"best so far: {speed} tok/s at load {stage.load}, {config_text(trial.config)}"))
        return lines
