"""A conversation with a core's process, one message at a time."""

from __future__ import annotations

from collections import deque

import psutil

from engine.config import EngineConfig
from engine.core import FromCore, StepReport, ToCore
from engine.core_process import CoreProcess

PATIENCE_S = 20
"""Nobody waits longer for another process."""


class Talk:
    """Starts a core and hears what it says, in order."""

    def __init__(self, config: EngineConfig, *, executor: str) -> None:
        self.core = CoreProcess(config, executor=executor)
        self.process = psutil.Process(self.core.pid)
        self._heard: deque[FromCore] = deque()

    def send(self, message: ToCore) -> None:
        """Say something."""
        self.core.send(message)

    def hear(self) -> FromCore:
        """The core's next word."""
        while not self._heard:
            assert self.core.wait(PATIENCE_S), "the core says nothing"
            self._heard.extend(self.core.receive())
        return self._heard.popleft()

    def report(self) -> StepReport:
        """The next word, which must be a report."""
        word = self.hear()
        assert isinstance(word, StepReport), word
        return word
