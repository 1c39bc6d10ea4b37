"""What a person sees while a bench measures: a line a stage, and how far the one that runs has come."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

import typer

from tuner.commands.watch import stage_text
from tuner.commands.words import duration_text
from tuner.measure.spec import StageSpec
from tuner.progress import Clock
from tuner.records import StageRecord

TICK_S = 1.0
"""On a terminal, where a line is written over. Unit: seconds."""

LINE_S = 30.0
"""Elsewhere, where each is a line more. Unit: seconds."""

_ERASE = "\r\x1b[K"


class BenchProgress:
    """Writes to stderr while entered; stdout stays free for the answer."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._ticker: _Ticker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def note(self, text: str) -> None:
        """A line of its own."""
        self._line(f"- {text}")

    def stage_began(self, spec: StageSpec) -> None:
        """From now on it is told how long the stage runs, and how long it may."""
        self._stop()
        load = f"{spec.load:.3g}/s" if spec.workload.loop == "open" else f"{spec.load}"
        self._ticker = _Ticker(
            f"{spec.kind.value:<9} load {load:>4}", spec.max_warm_up_s + spec.max_s, on_terminal=self._on_terminal
        )

    def stage_ended(self, stage: StageRecord, clock: Clock) -> None:
        """A line a stage, with the time left if the ladder goes to its end."""
        self._stop()
        self._line(f"  {stage_text(stage, clock)}")

    def _line(self, text: str) -> None:
        typer.echo(f"{_ERASE if self._on_terminal else ''}{text}", err=True)

    def _stop(self) -> None:
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None


class _Ticker:
    """Tells from a thread of its own how far a stage is: a few microseconds a tick, which no stage notices."""

    def __init__(self, name: str, most_s: float, *, on_terminal: bool) -> None:
        self._name = name
        self._most_s = most_s
        self._on_terminal = on_terminal
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell no more."""
        self._over.set()
        self._thread.join()
        if self._on_terminal:
            typer.echo(_ERASE, nl=False, err=True)

    def _tell(self) -> None:
        begun_s = time.perf_counter()
        while not self._over.wait(TICK_S if self._on_terminal else LINE_S):
            elapsed = duration_text(time.perf_counter() - begun_s)
            text = f"  {self._name}  {elapsed} of at most {duration_text(self._most_s)}"
            typer.echo(f"{_ERASE if self._on_terminal else ''}{text}", nl=not self._on_terminal, err=True)
