"""Three figures for three questions about memory: what is reserved, what is needed, what the device was charged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Self

from tuner.records import MemoryFigures

_INTERVAL_S = 1.0
_MAX_SHARE_OF_A_CORE = 0.01
"""Reading PSS makes the kernel walk every page of the process: 0.1 s and more for 10 GB. It rests accordingly, or it
would take from the engine what it looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Where the engine said at start that its memory goes. Bytes; None: it did not say."""

    requested_bytes: int | None = None
    weights_bytes: int | None = None
    activation_peak_bytes: int | None = None
    kv_cache_bytes: int | None = None


def memory_figures(
    engine: EngineMemory, *, kv_cache_usage_peak: float | None, device_peak_bytes: int | None
) -> MemoryFigures:
    """Put the three figures together; a figure with an unknown part is unknown.

    In use at the peak = weights + activation peak + most of the KV cache seen in use.
    """
    in_use: int | None = None
    if (
        engine.weights_bytes is not None
        and engine.activation_peak_bytes is not None
        and engine.kv_cache_bytes is not None
        and kv_cache_usage_peak is not None
    ):
        used_kv_bytes = round(kv_cache_usage_peak * engine.kv_cache_bytes)
        in_use = engine.weights_bytes + engine.activation_peak_bytes + used_kv_bytes
    return MemoryFigures(
        reserved_bytes=engine.requested_bytes, in_use_peak_bytes=in_use, device_peak_bytes=device_peak_bytes
    )


def process_tree_pss_bytes(root_pid: int) -> int | None:
    """What the operating system charges a process and its descendants with: pages shared by n count 1/n (PSS).

    None where a process of the tree may not be read or is gone: part of a tree would be a wrong figure.
    """
    import psutil  # of a server that is not ours to look at, nothing needs it

    try:
        root = psutil.Process(root_pid)
        return sum(process.memory_full_info().pss for process in [root, *root.children(recursive=True)])
    except psutil.Error:
        return None


class PssSampler:
    """Reads a process tree's PSS, in a thread, at most once a second while it is entered; keeps the peak."""

    def __init__(self, root_pid: int | None) -> None:
        self.peak_bytes: int | None = None
        self._root_pid = root_pid
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._root_pid is not None:
            self._task = asyncio.create_task(self._run(self._root_pid))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, root_pid: int) -> None:
        while True:
            started_s = perf_counter()
            seen = await asyncio.to_thread(process_tree_pss_bytes, root_pid)
            if seen is not None:
                self.peak_bytes = max(seen, self.peak_bytes or 0)
            await asyncio.sleep(max(_INTERVAL_S, (perf_counter() - started_s) / _MAX_SHARE_OF_A_CORE))
