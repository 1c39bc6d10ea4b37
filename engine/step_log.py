"""A line a step, as JSON, for whoever models the engine: what it computed and how long that took."""

from __future__ import annotations

import json
import logging
from io import FileIO
from pathlib import Path

from engine.core import StepReport

logger = logging.getLogger(__name__)

COLUMNS = (
    "at_s: when the step was planned, seconds since boot; engine: rank of the core; execute_s: seconds in the model; "
    "prefill_tokens: prompt tokens computed, recomputed outputs too; decodes: requests that computed their last token; "
    "context_tokens: tokens whose keys and values were read; tokens: new tokens drawn; running, waiting: requests "
    "after the step; kv_usage: share of the KV blocks in use, 0 to 1; preemptions: since the start; simulated: true "
    "where a law stood in for a device"
)
"""What a line holds, with units: the command line's help says it."""

_BUFFER_BYTES = 2**16


class StepLog:
    """Appends to a file from the server's process, never from a core's; a disk that fills up ends the log, not more.

    Lines are kept in memory and written together, at the latest when a core has nothing left to do.
    """

    def __init__(self, path: Path, *, simulated: bool) -> None:
        """Open the file.

        Args:
            simulated: whether `execute_s` comes from a law.

        Raises:
            OSError: if it cannot be written.
        """
        self._path = path
        self._label = {"simulated": True} if simulated else {}
        self._kept = bytearray()
        self._file: FileIO | None = path.open("ab", buffering=0)

    def write(self, rank: int, report: StepReport) -> None:
        """Add a step; one that computed nothing is left out."""
        if self._file is None:
            return
        if report.num_step_tokens:
            self._kept += _line(rank, report, self._label)
        is_idle = not (report.num_running or report.num_waiting)
        if is_idle or len(self._kept) >= _BUFFER_BYTES:
            self._flush(self._file)

    def close(self) -> None:
        """Write what is still in memory."""
        if self._file is not None:
            self._flush(self._file)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self, file: FileIO) -> None:
        try:
            while self._kept:
                del self._kept[: file.write(self._kept)]
        except OSError as error:
            logger.warning("the step log %s ends here: %s; the engine goes on", self._path, error.strerror)
            self._kept.clear()
            self._file = None
            file.close()


def _line(rank: int, report: StepReport, label: dict[str, bool]) -> bytes:
    values = {
        "at_s": round(report.scheduled_at_s, 6),
        "engine": rank,
        "execute_s": round(report.execute_s, 6),
        "prefill_tokens": report.num_prefill_tokens,
        "decodes": report.num_decodes,
        "context_tokens": report.num_context_tokens,
        "tokens": len(report.token_ids),
        "running": report.num_running,
        "waiting": report.num_waiting,
        "kv_usage": round(report.kv_cache_usage, 6),
        "preemptions": report.num_preemptions,
    }
    return json.dumps(values | label, separators=(",", ":")).encode() + b"\n"
