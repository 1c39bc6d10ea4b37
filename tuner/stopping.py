"""Ctrl-C: once, the stage that runs is finished and kept; twice, at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

_T = TypeVar("_T")


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
            signal.raise_signal(signal.SIGTERM)
            return
        self.requested = True
        self._tell("stopping after this stage; Ctrl-C once more stops at once")


def run_until_told(runner: asyncio.Runner, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run it to its end; where SIGTERM is to raise `KeyboardInterrupt`, it is cancelled first and cleans up.

    asyncio does the same with SIGINT. An exception out of a signal handler comes up wherever the program happens to
    be; in a callback of a transport uvloop reports it and goes on, and the stop would be lost.

    Raises:
        KeyboardInterrupt: at SIGTERM, once the coroutine has ended.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        return runner.run(coroutine)
    is_told = False

    async def watched() -> _T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(coroutine)

        def end(_number: int, _frame: FrameType | None) -> None:
            nonlocal is_told
            is_told = True
            loop.call_soon_threadsafe(task.cancel)

        signal.signal(signal.SIGTERM, end)
        return await task

    try:
        result = runner.run(watched())
    except BaseException as error:  # whatever it ended with: the stop comes first
        if is_told:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if is_told:
        raise KeyboardInterrupt
    return result
