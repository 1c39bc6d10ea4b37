"""A server that answers by a known schedule (`stub/stub.c`), and its log: the truth that a client is held against."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from tuner.load.connection import Endpoint

SOURCE = Path(__file__).parent / "stub" / "stub.c"
MODEL = "stub"

Mode = Literal["plain", "error", "role", "empty", "packed", "cut", "busy"]
Floats = npt.NDArray[np.float64]

_ENTRY = np.dtype([("request", "<u4"), ("event", "<u2"), ("tokens", "<u2"), ("at_s", "<f8")])
_RECEIVED, _SENT_TOKENS, _ENDED, _ENDED_BADLY, _LEFT, _OPENED, _CLOSED = 0, 2, 3, 4, 5, 6, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How the server answers."""

    ttft_ms: float = 200.0
    itl_ms: float = 50.0
    tokens: int | None = 40
    """Tokens of every answer; None: as many as were asked for."""

    mode: Mode = "plain"
    odd_every: int = 1
    """Every so many-th request is answered by `mode`, the others plainly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the server did, of requests that it answered to the end. Times in ms."""

    num_ended: int
    num_ended_badly: int
    num_left: int
    """Requests whose client went away."""

    ttft_ms: Floats
    """From the whole request read to the first chunk with a token handed to the socket, a request."""

    itl_ms: Floats
    """Between tokens: a chunk of k tokens is k equal parts of the gap before it."""

    mean_in_flight: float
    """Between the first request and the last end, requests received and not ended."""

    mean_in_flight_in_the_middle: float
    """The same over the middle half of that time."""

    peak_in_flight: int
    peak_sockets: int
    num_chunks: int
    began_s: float
    """When the first request was received, by `perf_counter`."""

    last_s: float
    """When the last one ended."""

    @property
    def chunks_per_s(self) -> float:
        """Chunks with tokens, over all that time."""
        return self.num_chunks / (self.last_s - self.began_s)


def build(cache: Path) -> Path:
    """Compile the stub where that has not been done for this source; returns the program."""
    program = cache / "stub"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-O2", "-o", str(program), str(SOURCE)], check=True)  # noqa: S607 - the system's compiler
    return program


@dataclass(frozen=True, slots=True)
class RunningStub:
    """A stub that listens."""

    endpoint: Endpoint
    pid: int

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.endpoint.host}:{self.endpoint.port}"


@contextmanager
def stub(program: Path, schedule: Schedule, *, log: Path, cpu: int | None) -> Iterator[RunningStub]:
    """A stub with a socket on a free port; its log is whole when the context is left.

    Args:
        cpu: the only core it may use; None: any.
    """
    command = [str(program), "--log", str(log), "--mode", schedule.mode, "--odd-every", str(schedule.odd_every)]
    command += ["--ttft-us", str(1e3 * schedule.ttft_ms), "--itl-us", str(1e3 * schedule.itl_ms), "--model", MODEL]
    command += [] if schedule.tokens is None else ["--tokens", str(schedule.tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if cpu is not None:
                os.sched_setaffinity(process.pid, {cpu})
            assert process.stdout is not None  # noqa: S101 - opened as a pipe
            yield RunningStub(Endpoint("127.0.0.1", int(process.stdout.readline())), process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def read_truth(log: Path, *, window_s: tuple[float, float] | None = None) -> Truth:
    """Work the log out.

    Args:
        window_s: from when to when, counted from the first request received: only requests that ended inside count,
            and only gaps that did. None: all.
    """
    entries = np.fromfile(log, dtype=_ENTRY)
    sockets = entries[np.isin(entries["event"], (_OPENED, _CLOSED))]
    entries = entries[entries["event"] < _OPENED]
    received = _times_by_request(entries, _RECEIVED)
    ended = _times_by_request(entries, _ENDED)
    flights, levels = _in_flight(entries)
    began_s, last_s = (float(flights[0]), float(flights[-1])) if len(flights) else (np.nan, np.nan)
    low, high = (-np.inf, np.inf) if window_s is None else (began_s + window_s[0], began_s + window_s[1])
    chunks = entries[entries["event"] == _SENT_TOKENS]
    num_chunks = len(chunks)
    chunks = chunks[np.isnan(_times_by_request(entries, _ENDED_BADLY)[chunks["request"]])]
    chunks = chunks[np.argsort(chunks["request"], kind="stable")]
    is_first = np.diff(chunks["request"].astype(np.int64), prepend=-1) != 0
    gaps_s = np.diff(chunks["at_s"], prepend=np.nan)
    inside = ~is_first & (chunks["at_s"] >= low) & (chunks["at_s"] < high)
    parts = chunks["tokens"][inside]
    first = chunks[is_first]
    first = first[(ended[first["request"]] >= low) & (ended[first["request"]] < high)]
    return Truth(
        num_ended=int((~np.isnan(ended)).sum()),
        num_ended_badly=int((entries["event"] == _ENDED_BADLY).sum()),
        num_left=int((entries["event"] == _LEFT).sum()),
        ttft_ms=1e3 * (first["at_s"] - received[first["request"]]),
        itl_ms=1e3 * np.repeat(gaps_s[inside] / parts, parts),
        mean_in_flight=_mean_level(flights, levels, 0.0, 1.0),
        mean_in_flight_in_the_middle=_mean_level(flights, levels, 0.25, 0.75),
        peak_in_flight=int(levels.max(initial=0)),
        peak_sockets=int(np.cumsum(np.where(sockets["event"] == _OPENED, 1, -1)).max(initial=0)),
        num_chunks=num_chunks,
        began_s=began_s,
        last_s=last_s,
    )


def _times_by_request(entries: npt.NDArray[np.void], event: int) -> Floats:
    times = np.full(int(entries["request"].max(initial=0)) + 1, np.nan)
    own = entries[entries["event"] == event]
    times[own["request"]] = own["at_s"]
    return times


def _in_flight(entries: npt.NDArray[np.void]) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Times at which the number of requests in flight changed, and the number from then on."""
    steps = entries[np.isin(entries["event"], (_RECEIVED, _ENDED, _ENDED_BADLY, _LEFT))]
    return steps["at_s"].astype(np.float64), np.cumsum(np.where(steps["event"] == _RECEIVED, 1, -1))


def _mean_level(times: Floats, levels: npt.NDArray[np.int64], start: float, end: float) -> float:
    """Time average over a part of the whole time, given by its shares."""
    if len(times) < 2:
        return float("nan")
    span_s = times[-1] - times[0]
    low, high = times[0] + start * span_s, times[0] + end * span_s
    lengths = np.clip(times[1:], low, high) - np.clip(times[:-1], low, high)
    return float((lengths * levels[:-1]).sum() / (high - low))
