"""Our load generator beside its peers, as instruments: `python benchmarks/load_generator.py`.

A server that answers by a known schedule and logs when it truly sent each chunk (`stub/stub.c`, one core) meets one
client at a time (another core). What a client reports is held against that log: errors of TTFT and ITL, requests really
in flight, CPU a chunk, the rate at which its mean ITL is 1 % wrong, and what it makes of streams that end badly.

Peers are installed under `--cache` when first asked for. All of it takes 90 minutes, ours alone 15; `--quick` a fifth
of that. On a machine that has other work, `--realtime` (as root) runs server and client before it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import psutil
from checkpoints import save_tokenizer
from load_table import markdown, passes, relative_error
from load_tools import AiPerf, GuideLlm, Load, Ours, Reported, Spread, Tool, Vllm, load_of, started
from truth import Mode, Schedule, build, read_truth, stub

from tuner.provenance import hardware

STREAMS = (1, 64, 512)
CEILING_STREAMS = (20, 50, 100, 200, 300, 400, 600, 800, 1000)
ODD: tuple[Mode, ...] = ("plain", "error", "cut", "empty", "role", "packed", "busy")
ODD_EVERY = 4
ODD_STREAMS = 8
PLAIN = Schedule()
FAST = Schedule(itl_ms=20.0, tokens=200)
_SAMPLE_S = 0.5
_LIMIT_S = 300.0
"""A client that takes longer than this is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One client, once, under one load."""

    tool: str
    part: str
    arrivals: str
    streams: int
    mode: str
    round: int
    reported: Reported | None
    """None: it ended without a result."""

    ttft_ms: Spread
    itl_ms: Spread
    """What is true, over the same requests."""

    num_ended: int
    num_ended_badly: int
    mean_in_flight: float
    """Over the middle half of the run, by the server."""

    chunks_per_s: float
    offered_chunks_per_s: float
    cpu_us_per_chunk: float | None
    waited_share: float | None
    """How much of the run the client waited for its core because others had it: above some percent, do not trust it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything that was measured, and on what."""

    created: str
    machine: str
    versions: dict[str, str]
    left_out: dict[str, str]
    """Tools that could not be run, and why."""

    load_average: tuple[float, float]
    """The machine's, over a minute, at the start and the end of the run."""

    cells: tuple[Cell, ...]


def main() -> int:
    """Measure, print a Markdown table, write JSON where asked."""
    options = _options()
    result = measure(options)
    print(markdown(result))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Our load generator beside its peers, held against a known server.")
    add = parser.add_argument
    add("--tools", nargs="+", metavar="NAME", default=["ours", "vllm", "guidellm", "aiperf"], help="(default: all)")
    add("--parts", nargs="+", default=["closed", "poisson", "ceiling", "odd"], help="(default: %(default)s)")
    add("--streams", nargs="+", type=int, default=list(STREAMS), help="for closed and poisson (default: %(default)s)")
    add("--rounds", type=int, default=3, help="repetitions of closed and poisson (default: %(default)s)")
    add("--requests-per-stream", type=float, default=10.0, help="(default: %(default)s)")
    add("--quick", action="store_true", help="one round of 4 requests a stream, fewer rates")
    add(
        "--cache",
        type=Path,
        default=Path(".cache/load_generator"),
        help="programs and environments (default: %(default)s)",
    )
    add("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"), help="(default: %(default)s)")
    add("--realtime", action="store_true", help="server and client under SCHED_FIFO: before all other work; root only")
    add("--json", type=Path, metavar="FILE", help="write every cell")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests_per_stream = 1, 4.0
    return options


def measure(options: argparse.Namespace) -> Result:
    """All tools through all parts, interleaved within a round, so that what the machine does meets all of them."""
    cache = options.cache.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    save_tokenizer(cache / "tokenizer")
    program = build(cache)
    tools, versions, left_out = _tools(options, cache)
    before = os.getloadavg()[0]
    cells = []
    for cell in _cells(options, tools, _Bench(program, cache / "runs", realtime=options.realtime)):
        _progress(cell)
        cells.append(cell)
    return Result(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=hardware(),
        versions=versions,
        left_out=left_out,
        load_average=(before, os.getloadavg()[0]),
        cells=tuple(cells),
    )


def _tools(options: argparse.Namespace, cache: Path) -> tuple[list[Tool], dict[str, str], dict[str, str]]:
    tokenizer = cache / "tokenizer"
    known: dict[str, Tool] = {
        "ours": Ours(),
        "vllm": Vllm(options.vllm_python.absolute(), tokenizer),
        "guidellm": GuideLlm(cache, tokenizer),
        "aiperf": AiPerf(cache, tokenizer),
    }
    tools, versions, left_out = [], {}, {}
    for name in options.tools:
        tool = known[name]
        try:
            versions[tool.name] = tool.prepare()
            tools.append(tool)
        except (OSError, subprocess.CalledProcessError) as error:
            left_out[tool.name] = str(error)
    return tools, versions, left_out


def _cells(options: argparse.Namespace, tools: Sequence[Tool], bench: _Bench) -> Iterator[Cell]:
    rounds = options.requests_per_stream
    for number in range(options.rounds):
        for arrivals in ("closed", "poisson"):
            for streams in options.streams if arrivals in options.parts else ():
                for tool in tools:
                    yield bench.run(tool, arrivals, PLAIN, load_of(PLAIN, arrivals, streams, rounds=rounds), number)
    if "odd" in options.parts:
        for mode in ODD:
            schedule = replace(PLAIN, mode=mode, odd_every=1 if mode in ("packed", "plain") else ODD_EVERY)
            for tool in tools:
                yield bench.run(tool, "odd", schedule, load_of(schedule, "closed", ODD_STREAMS, rounds=4), 0)
    if "ceiling" in options.parts:
        for tool in tools:
            yield from _ceiling(tool, bench, CEILING_STREAMS[::3] if options.quick else CEILING_STREAMS)


def _ceiling(tool: Tool, bench: _Bench, steps: Sequence[int]) -> Iterator[Cell]:
    """Rising chunk rates until the mean inter-token latency is wrong; a fault once may be the machine's, so twice."""
    for streams in steps:
        wrong = []
        for number in range(2):
            cell = bench.run(tool, "ceiling", FAST, load_of(FAST, "closed", streams, rounds=3), number)
            yield cell
            wrong.append(not passes(cell))
            if not wrong[-1]:
                break
        if all(wrong):
            return


class _Bench:
    """Runs one client against one server, each on its core."""

    def __init__(self, program: Path, runs: Path, *, realtime: bool) -> None:
        self._program = program
        self._realtime = realtime
        self._runs = runs
        allowed = sorted(os.sched_getaffinity(0))
        # The last two: the first one has the machine's other work and its interrupts more often than not.
        self._stub_cpu, self._client_cpu = (allowed[-2], allowed[-1]) if len(allowed) > 1 else (None, None)

    def run(self, tool: Tool, part: str, schedule: Schedule, load: Load, number: int) -> Cell:
        """One cell; a client that fails is one without a report."""
        folder = self._runs / f"{tool.name.replace(' ', '-')}-{part}-{schedule.mode}-{load.streams}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with stub(self._program, schedule, log=folder / "truth.bin", cpu=self._stub_cpu) as server:
            process = started(tool, load, server.url, folder / "out", cpu=self._client_cpu)
            for pid in (server.pid, process.pid) if self._realtime else ():
                # Before it has children: they inherit it.
                os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(1))
            with cpu_meter(process.pid) as meter:
                _wait(process)
        try:
            reported = tool.read(folder / "out")
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{tool.name}: no result ({error!r}); see {folder / 'out' / 'output.txt'}", file=sys.stderr)
            reported = None
        truth = read_truth(folder / "truth.bin", window_s=reported.window_s if reported else None)
        used = meter.between(truth.began_s, truth.last_s)
        return Cell(
            tool=tool.name,
            part=part,
            arrivals=load.arrivals,
            streams=load.streams,
            mode=schedule.mode,
            round=number,
            reported=reported,
            ttft_ms=_spread(truth.ttft_ms),
            itl_ms=_spread(truth.itl_ms),
            num_ended=truth.num_ended,
            num_ended_badly=truth.num_ended_badly,
            mean_in_flight=truth.mean_in_flight_in_the_middle,
            chunks_per_s=truth.chunks_per_s,
            offered_chunks_per_s=load.streams * load.output_tokens / load.request_s,
            cpu_us_per_chunk=None if used is None or not truth.num_chunks else 1e6 * used.cpu_s / truth.num_chunks,
            waited_share=None if used is None else used.waited_s / used.wall_s,
        )


def _spread(values: Any) -> Spread:
    if len(values) == 0:
        return Spread()
    return Spread(
        mean=float(np.mean(values)), p95=float(np.quantile(values, 0.95)), p99=float(np.quantile(values, 0.99))
    )


def _wait(process: subprocess.Popen[Any]) -> None:
    """Until it ends or its time is up; then it and what it started are ended."""
    try:
        process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Used:
    """CPU over a stretch of time."""

    wall_s: float
    cpu_s: float
    waited_s: float
    """Ready to run, and not running."""


class CpuMeter:
    """CPU time of a process and its descendants, looked at seldom and cheaply: it shares the machine with them."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: list[tuple[float, float, float]] = []

    def sample(self) -> None:
        """Look once; what has just ended is missing."""
        try:
            used = [_schedule_times_s(task) for task in _tasks(self._pid)]
        except OSError:
            return
        self._seen.append((perf_counter(), sum(cpu_s for cpu_s, _ in used), sum(waited_s for _, waited_s in used)))

    def between(self, start_s: float, end_s: float) -> Used | None:
        """What was used from then to then, by the nearest looks; None where there are too few."""
        inside = [look for look in self._seen if start_s <= look[0] <= end_s]
        if len(inside) < 2:
            return None
        first, last = inside[0], inside[-1]
        scale = (end_s - start_s) / (last[0] - first[0])
        return Used(end_s - start_s, scale * (last[1] - first[1]), scale * max(0.0, last[2] - first[2]))


def _tasks(pid: int) -> Iterator[Path]:
    """The /proc folders of all threads of a process and its descendants."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield task
        for child in (task / "children").read_text().split():
            yield from _tasks(int(child))


def _schedule_times_s(task: Path) -> tuple[float, float]:
    """Time on a CPU, and time spent waiting for one."""
    on_cpu_ns, waited_ns, _ = (task / "schedstat").read_text().split()
    return 1e-9 * int(on_cpu_ns), 1e-9 * int(waited_ns)


@contextmanager
def cpu_meter(pid: int) -> Iterator[CpuMeter]:
    """A meter that runs in a thread while it is entered."""
    meter, ended = CpuMeter(pid), threading.Event()

    def look() -> None:
        while not ended.is_set():
            meter.sample()
            sleep(_SAMPLE_S)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        ended.set()
        thread.join()


def _progress(cell: Cell) -> None:
    reported = cell.reported
    said = (
        "no result"
        if reported is None
        else (
            f"TTFT {_percent(relative_error(reported.ttft_ms.mean, cell.ttft_ms.mean))}, "
            f"ITL {_percent(relative_error(reported.itl_ms.mean, cell.itl_ms.mean))}, "
            f"p99 {_percent(relative_error(reported.itl_ms.p99, cell.itl_ms.p99))}"
        )
    )
    cpu = "?" if cell.cpu_us_per_chunk is None else f"{cell.cpu_us_per_chunk:.0f}"
    print(
        f"{cell.tool:17} {cell.part:8} {cell.mode:7} {cell.streams:5}: {said}; {cell.mean_in_flight:.0f} in flight, "
        f"{cell.chunks_per_s:.0f} chunks/s, {cpu} us a chunk, waited {cell.waited_share or 0:.0%}",
        file=sys.stderr,
        flush=True,
    )


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:+.1%}"


if __name__ == "__main__":
    raise SystemExit(main())
