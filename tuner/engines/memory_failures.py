"""Lack of memory as an engine's log tells it. Pure, on text, so that every adapter reads the same lines alike."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tuner.records import Failed, FailureKind

_LONGEST_LINE = 1000

# The decisive lines, in vLLM's words (of V1: `gpu_model_runner.py`, `worker/utils.py`, `cpu_worker.py`,
# `kv_cache_utils.py`; the older form of the third in V0's `worker.py`). A more telling one stands after the bare error
# that it explains, so it is sought first.
_DECISIVE = (
    (
        FailureKind.OOM_SAMPLER_WARMUP,
        re.compile(r"out of memory occurred when warming up (?:sampler|pooler)"),
    ),
    (
        FailureKind.NO_KV_MEMORY,
        re.compile(
            r"No available memory for the cache blocks"
            r"|larger than the available KV cache memory"
            r"|larger than the maximum number of tokens that can be stored in KV cache"
        ),
    ),
    (
        FailureKind.OOM_STARTUP,
        re.compile(r"on startup is less than desired [GC]PU memory utilization"),
    ),
)
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP|XPU|NPU)(?: error:)? out of memory|DefaultCPUAllocator: can't allocate memory"
    r"|(?:^|\] )MemoryError\b|'std::bad_alloc'"
)
_CAPTURE_BEGINS = re.compile(r"Capturing CUDA graph|Capturing the model for CUDA graphs")
_CAPTURE_ENDS = re.compile(r"Graph capturing finished")
_NOT_TEXT = re.compile(r"\x1b\[[0-9;]*m")


def memory_failure(log: str, *, was_ready: bool) -> Failed | None:
    """Which lack of memory ended the engine that wrote `log`, with the line that says so; None if no line does.

    A bare out-of-memory error belongs to the phase it was written in: serving, where the engine had answered; the
    capture of graphs, where that had begun and not ended; else the start.

    Args:
        log: what the engine wrote, progress bars and colours included. Only of an engine that has ended: a running one
            may have survived such an error.
        was_ready: whether it had answered before.
    """
    lines = list(log_lines(log))
    for kind, pattern in _DECISIVE:
        for line in lines:
            if pattern.search(line):
                return Failed(kind=kind, detail=line)
    is_capturing = False
    for line in lines:
        if _OUT_OF_MEMORY.search(line):
            return Failed(kind=_phase(is_capturing=is_capturing, was_ready=was_ready), detail=line)
        is_capturing = (is_capturing or bool(_CAPTURE_BEGINS.search(line))) and not _CAPTURE_ENDS.search(line)
    return None


def _phase(*, is_capturing: bool, was_ready: bool) -> FailureKind:
    if was_ready:
        return FailureKind.OOM_RUNTIME
    return FailureKind.OOM_GRAPH_CAPTURE if is_capturing else FailureKind.OOM_STARTUP


def log_lines(log: str) -> Iterator[str]:
    """The lines a person sees; a progress bar redraws its own with a carriage return."""
    for line in log.replace("\r", "\n").split("\n"):
        yield _NOT_TEXT.sub("", line).strip()[:_LONGEST_LINE]
