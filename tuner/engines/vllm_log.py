"""What vLLM's log says: how far a start has come, where its memory goes, and why it ended. Pure, on text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tuner.engines.device_return import NotFree
from tuner.engines.memory_failures import log_lines, memory_failure
from tuner.measure.memory import EngineMemory
from tuner.records import Failed, FailureKind

_GIB = r"(-?[\d.]+)"
_PREFIX = re.compile(
    r"^(?:\([^()]*pid=\d+\) )?(?:(?:ERROR|WARNING|INFO|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
)
"""Which process wrote a line, and how grave it is: `(EngineCore pid=9) ERROR 12-01 10:00:00 [core.py:99] `."""

# How far a start has come, in the order in which a start passes them.
_PROGRESS = (
    (re.compile(r"Starting to load model"), "loads the model"),
    (re.compile(r"Loading weights took|Model loading took"), "has its weights"),
    (re.compile(r"Warming up model|Compiling a graph|Start compiling|Using cache directory"), "compiles"),
    (re.compile(r"KV cache size: "), "has its KV cache"),
    (re.compile(r"Capturing CUDA graph"), "captures graphs"),
    (re.compile(r"Starting vLLM (?:API )?server|Started server process"), "starts its HTTP server"),
)

_CPU_SHARE = re.compile(
    rf"Auto set \({_GIB}/{_GIB}\) GiB for KV cache on node \d+, with {_GIB} GiB requested memory for the worker"
)
_CPU_EXPLICIT = re.compile(rf"Explicitly set \({_GIB}/{_GIB}\) GiB for KV cache")
_GPU_KV = re.compile(rf"Available KV cache memory: {_GIB} GiB")
_WEIGHTS = re.compile(rf"Model loading took {_GIB} GiB")

_NOT_FREE = re.compile(
    rf"(?:Free|Available) memory on (?:device|node) .*\({_GIB}/{_GIB} GiB\) on startup is less than desired "
    rf"(?P<device>[GC])PU memory utilization \([\d.]+, {_GIB} GiB\)"
)
_NO_ROOM_FOR_KV = re.compile(rf"on kv cache allocation is less than requested memory for kv \({_GIB}(?:/{_GIB})? GiB\)")
_TOO_SLOW = re.compile(r"Timed out waiting for (?:new )?engine core processes to start")
_PORT = re.compile(r"\[Errno (?:98|48)\]|[Aa]ddress already in use")
_OTHERS_MOVED = re.compile(r"Error in memory profiling\. Initial free memory")
_ARGUMENTS = re.compile(r"^vllm(?: serve)?: error: (.+)|^api_server\.py: error: (.+)")
_VALIDATION = re.compile(r"validation error(?:s)? for \w+$")
_CONFIG_FRAME = re.compile(r'File ".*vllm/(?:engine/arg_utils|entrypoints/launchers/cli_args)\.py"')
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b(?:: .+)?$")
_GENERIC = re.compile(
    r"Engine core initialization failed|Failed core proc|EngineDeadError|EngineCore encountered an issue"
    r"|WorkerProc initialization failed|CancelledError|KeyboardInterrupt|SystemExit|Executor failed"
    r"|died unexpectedly|cancelled|^RuntimeError: Worker failed with error"
)
_DIED = (re.compile(r" proc \S+ died unexpectedly"), re.compile(r"EngineDeadError"))
"""Which process died, and its echo in those that are left."""


def progress(line: str) -> str | None:
    """How far the start has come by this line, in a few words for people; None where it says nothing of it."""
    return next((words for pattern, words in _PROGRESS if pattern.search(line)), None)


def memory_of(log: str) -> EngineMemory:
    """Where the memory went, as far as the log says; what it does not say is unknown.

    Figures have the two digits after the point that vLLM writes: what it rounds to nothing is unknown too. Of several
    workers the least KV memory counts, as for vLLM itself.
    """
    share = _CPU_SHARE.search(log)
    explicit = _CPU_EXPLICIT.search(log)
    on_gpu = [_bytes(found) for found in _GPU_KV.findall(log)]
    weights = [_bytes(found) for found in _WEIGHTS.findall(log)]
    kv_bytes = min(on_gpu, default=None)
    if share is not None or explicit is not None:
        kv_bytes = _bytes((share or explicit)[1])  # type: ignore[index]
    return EngineMemory(
        requested_bytes=None if share is None else _bytes(share[3]),
        weights_bytes=max(weights, default=0) or None,
        kv_cache_bytes=kv_bytes or None,
    )


def memory_total(log: str) -> int | None:
    """The memory that the share is a share of, where the log says it: on a CPU."""
    found = _CPU_SHARE.search(log) or _CPU_EXPLICIT.search(log)
    return None if found is None else _bytes(found[2])


def not_free(detail: str) -> NotFree | None:
    """What a start was short of, where it found less memory free than its share; None where that was not the reason."""
    found = _NOT_FREE.search(detail)
    return None if found is None else NotFree(requested_bytes=_bytes(found[4]))


def decisive(log: str, *, was_ready: bool, exit_code: int | None) -> Failed | None:
    """Why the vLLM that wrote `log` ended, with the line that says so; None where no line does.

    The last line of a log is nearly never the reason: the processes around the one that failed report its end after it.
    """
    lines = [_PREFIX.sub("", line).strip() for line in log_lines(log)]
    return (
        _without_memory(lines, log, was_ready=was_ready)
        or _wrong_arguments(lines, exit_code)
        or _outside(lines)
        or _by_exception(lines, was_ready=was_ready)
    )


def _without_memory(lines: list[str], log: str, *, was_ready: bool) -> Failed | None:
    for line in lines:
        found = _NO_ROOM_FOR_KV.search(line)
        if found is not None:
            kind = FailureKind.NO_KV_MEMORY if float(found[1]) <= 0 else FailureKind.OOM_STARTUP
            return Failed(kind=kind, detail=_unwrapped(line))
    failed = memory_failure(log, was_ready=was_ready)
    return failed and failed.model_copy(update={"detail": _unwrapped(_PREFIX.sub("", failed.detail))})


def _wrong_arguments(lines: list[str], exit_code: int | None) -> Failed | None:
    """What the parser of the command line refuses, or a rule of the config."""
    for line in lines:
        found = _ARGUMENTS.search(line)
        if found is not None and exit_code in (2, None):
            return Failed(kind=FailureKind.INVALID_CONFIG, detail=found[1] or found[2])
    for index, line in enumerate(lines):
        if _VALIDATION.search(line):
            said = next(
                (text for text in lines[index + 1 :] if text.startswith(("Value error, ", "Input should"))), line
            )
            return Failed(kind=FailureKind.INVALID_CONFIG, detail=_validated(lines, index, said))
    return None


def _validated(lines: list[str], index: int, said: str) -> str:
    """A broken rule in pydantic's words: without its appendix, with the field's name where that stands apart."""
    text = said.partition(" [type=")[0].removeprefix("Value error, ")
    if said.startswith("Input should") and index + 1 < len(lines):
        return f"{lines[index + 1]}: {text}"
    return text


def _outside(lines: list[str]) -> Failed | None:
    """What is no fault of a value: others', or of the time that a start was given."""
    for line in lines:
        if _PORT.search(line) or _OTHERS_MOVED.search(line):
            return Failed(kind=FailureKind.INFRASTRUCTURE, detail=_unwrapped(line))
        if _TOO_SLOW.search(line):
            return Failed(kind=FailureKind.START_TIMEOUT, detail=line)
    return None


def _by_exception(lines: list[str], *, was_ready: bool) -> Failed | None:
    """The first exception that is not another one's echo: while the config is made it is the config's fault."""
    in_config = False
    for line in lines:
        in_config = in_config or bool(_CONFIG_FRAME.search(line))
        if _EXCEPTION.search(line) and not _GENERIC.search(line):
            kind = FailureKind.INVALID_CONFIG if in_config and not was_ready else FailureKind.CRASHED
            return Failed(kind=kind, detail=line)
    died = next((line for pattern in _DIED for line in lines if pattern.search(line)), None)
    return None if died is None else Failed(kind=FailureKind.CRASHED, detail=died)


def _unwrapped(line: str) -> str:
    """A reason without what Python and pydantic put around it."""
    return line.partition(" [type=")[0].removeprefix("ValueError: ").removeprefix("Value error, ")


def _bytes(gib: str) -> int:
    return round(float(gib) * 2**30)


def root_cause(log: str) -> str | None:
    """The line that tells most of why a process ended that never became a server, such as a failed import."""
    failed = decisive(log, was_ready=False, exit_code=None)
    lines: Iterator[str] = (line for line in reversed(list(log_lines(log))) if line)
    return failed.detail if failed is not None else next(lines, None)
