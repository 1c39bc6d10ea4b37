"""Ctrl-C: once, the stage that runs is finished and kept; twice, at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class StopOnInterrupt:
    """While entered, the first SIGINT is only remembered; a second one, or a SIGTERM, raises `KeyboardInterrupt`."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Watch for it.

        Args:
            tell: says to the user what the first one brings.
        """
        self.requested = False
        self._tell = tell

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt), signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), self._before, strict=True):
            signal.signal(number, handler)

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._tell("stopping after this stage; Ctrl-C once more stops at once")
