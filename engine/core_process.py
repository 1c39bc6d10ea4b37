"""The parent's handle on a core's process: start, send, receive, stop."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from typing import cast

from engine.channel import Channel, channel_pair
from engine.config import EngineConfig
from engine.core import CoreFailed, FromCore, Ready, ToCore, core_main
from engine.limits import oom_kills

_JOIN_S = 2.0


class CoreProcess:
    """A core in a process of its own. Neither side's sending waits for the other (`engine.channel`)."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: str,
        cpus: tuple[int, ...] | None = None,
    ) -> None:
        """Start the core. Call it from the main thread: on Linux the core dies with the thread that started it.

        Args:
            executor: `module:factory` of what computes.
            cpus: those it may compute on; None leaves them alone.
        """
        context = multiprocessing.get_context("spawn")
        self._is_ready = False
        self._oom_kills_before = oom_kills()
        own_end, core_end = channel_pair()
        self._channel = Channel(own_end)
        self._process = context.Process(
            target=core_main,
            args=(core_end, config, executor, cpus, os.getpid()),
            name="engine-core",
            daemon=True,
        )
        with core_end:
            self._process.start()

    @property
    def pid(self) -> int:
        """The core's process id."""
        return cast("int", self._process.pid)

    def fileno(self) -> int:
        """The descriptor that becomes readable when `receive` has something to say."""
        return self._channel.fileno()

    @property
    def has_backlog(self) -> bool:
        """Whether messages are kept back until the descriptor is writable; then `flush` them."""
        return self._channel.has_backlog

    def send(self, message: ToCore) -> None:
        """Hand a message to the core, in order, without waiting. A dead core is noticed by `receive`."""
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def flush(self) -> None:
        """Send of what was kept back as much as the core's socket takes."""
        with contextlib.suppress(OSError):
            self._channel.flush()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until `receive` has something to say, or the time is up: False."""
        try:
            return self._channel.wait(timeout_s)
        except OSError:
            return True

    def receive(self) -> list[FromCore]:
        """What the core has said since; several steps' reports at once where there was no time to read them.

        A core that is gone reads as `CoreFailed`.
        """
        try:
            messages = cast("list[FromCore]", self._channel.receive())
        except (EOFError, OSError):
            return [self._silent_end()]
        self._is_ready = self._is_ready or any(isinstance(message, Ready) for message in messages)
        return messages

    def stop(self) -> None:
        """End the core now and wait until it is gone. It holds nothing that outlives it."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._channel.close()

    def _silent_end(self) -> CoreFailed:
        self._process.join(_JOIN_S)
        return silent_end(
            self._process.exitcode,
            is_ready=self._is_ready,
            oom_kills_before=self._oom_kills_before,
            oom_kills_after=oom_kills(),
        )


def silent_end(
    exit_code: int | None, *, is_ready: bool, oom_kills_before: int | None, oom_kills_after: int | None
) -> CoreFailed:
    """What is known of a core that ended without a word.

    Lack of memory is a fact only where the kernel has counted a kill for it in this process's control group since the
    core was started; a SIGKILL alone may have come from anyone.

    Args:
        exit_code: as `multiprocessing` has it, -N for signal N; None if the core closed its channel and still runs.
    """
    if exit_code is None or exit_code >= 0:
        return CoreFailed("crashed", f"the core process ended without a word, exit code {exit_code}")
    ended = f"the core process was killed by signal {-exit_code}"
    if exit_code != -signal.SIGKILL:
        return CoreFailed("crashed", ended)
    if oom_kills_before is not None and oom_kills_after is not None and oom_kills_after > oom_kills_before:
        return CoreFailed("oom_runtime" if is_ready else "oom_startup", f"{ended} for lack of memory")
    return CoreFailed("crashed", f"{ended}, probably for memory")
