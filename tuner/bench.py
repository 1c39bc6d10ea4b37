"""One ladder on a server that is already running: checked by a request, climbed, answered. Starts and stops nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Protocol

import uvloop
from pydantic import Field, field_validator

from tuner.analysis.benched import Asked, FenceSource, conclude
from tuner.bench_answer import BenchAnswer
from tuner.climb import Climb, climb
from tuner.engines.running import Server, discover, reset_prefix_cache
from tuner.first_request import check_first_request
from tuner.inputs import DurationS, InputError
from tuner.job import MeasureSpec
from tuner.ladder import FixedSteps, Ladder, LadderStep, Plan, most_stages
from tuner.ladder_answer import knee_figures, verdict_of
from tuner.load.connection import Endpoint
from tuner.load.workload import Workload, WorkloadError
from tuner.measure.spec import Target
from tuner.progress import Clock
from tuner.records import Record, StageKind, StageRecord
from tuner.store import write_whole

FIRST_LADDER = 0
"""A bench is one climb."""

SHORTEST_REQUEST_S = 1e-3
"""No request counts as shorter: stages are not to shrink to nothing."""


class BenchOptions(Record):
    """What to measure a running server with."""

    model: str | None = None
    workload: Workload
    max_load: int = Field(default=1024, ge=2, le=65_536)
    loads: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = ()
    """Measure just these; none climbs until the knee is behind."""

    slo_ttft_p95: DurationS | None = None
    slo_itl_p95: DurationS | None = None
    measure: MeasureSpec
    fence: int | None = Field(default=None, ge=1)
    seed: int = Field(ge=0)

    @field_validator("slo_ttft_p95", "slo_itl_p95")
    @classmethod
    def _positive(cls, seconds: float | None) -> float | None:
        if seconds is not None and seconds <= 0:
            raise ValueError("a limit must be above zero")
        return seconds


class BenchWatcher(Protocol):
    """Somebody who looks on."""

    def note(self, text: str) -> None:
        """Something a person should know."""

    def stage_ended(self, stage: StageRecord, clock: Clock) -> None:
        """A stage was measured."""


def run_bench(
    endpoint: Endpoint,
    options: BenchOptions,
    directory: Path,
    watcher: BenchWatcher,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> BenchAnswer:
    """Measure the server at `endpoint`; stages are kept in `directory` as they end.

    A `KeyboardInterrupt` in a stage gives that stage up; the answer comes from those before.

    Raises:
        InputError: where the server cannot be measured so; no stage has been measured then.
    """
    begun_s = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = runner.run(discover(endpoint, model=options.model))
        target = _target(server, options.workload)
        first_s = runner.run(check_first_request(target, options.workload, seed=options.seed, tell=watcher.note))
        not_reset = runner.run(reset_prefix_cache(endpoint))
    prefix_cache = "reset" if not_reset is None else f"not reset: {not_reset}"
    for text in _opening(server, options, prefix_cache):
        watcher.note(text)
    task = _task(server, options, first_request_s=first_s)
    stages: list[StageRecord] = []
    interrupted = False
    try:
        for stage in climb(
            task, target, kept=(), directory=directory, goes_on=lambda so_far: not stop_requested() and answers(so_far)
        ):
            stages.append(stage)
            watcher.stage_ended(stage, _clock(begun_s, task.plan, stages))
    except KeyboardInterrupt:
        interrupted = True
    except WorkloadError as error:
        raise InputError(str(error)) from None
    return _answer(
        server,
        options,
        stages,
        prefix_cache,
        interrupted=interrupted or stop_requested(),
        wall_s=time.perf_counter() - begun_s,
    )


def _target(server: Server, workload: Workload) -> Target:
    length = server.facts.max_model_len
    if length is None:
        # The server does not tell, so the first request shows whether the workload fits.
        length = workload.longest_request_tokens
    try:
        workload.check_fits(length)
    except WorkloadError as error:
        raise InputError(str(error)) from None
    return Target(endpoint=server.endpoint, model=server.facts.model, max_model_len=length, memory=server.memory)


def _opening(server: Server, options: BenchOptions, prefix_cache: str) -> list[str]:
    facts, fence = server.facts, _fence(server, options)
    version = "" if facts.version is None else f" {facts.version}"
    lines = [f"{facts.url}: {facts.model} on {facts.engine}{version}; fence {'not told' if fence is None else fence}"]
    lines.append(f"workload {options.workload.name}, seed {options.seed}, prefix cache {prefix_cache}")
    if not facts.has_metrics:
        lines.append("it has no /metrics of vLLM's kind: preemptions, KV use, running and waiting requests not known")
    if facts.num_in_flight:
        lines.append(
            f"it serves others too: {facts.num_in_flight} requests were there before ours; figures will suffer"
        )
    return lines


def _fence(server: Server, options: BenchOptions) -> int | None:
    return options.fence if options.fence is not None else server.facts.fence


def _plan(server: Server, options: BenchOptions) -> Plan:
    if options.loads:
        steps = tuple(LadderStep(kind=StageKind.LADDER, load=load) for load in sorted(set(options.loads)))
        return FixedSteps(steps=steps)
    return Ladder(max_num_seqs=_fence(server, options), max_load=options.max_load)


def _task(server: Server, options: BenchOptions, *, first_request_s: float) -> Climb:
    return Climb(
        plan=_plan(server, options),
        workload=options.workload,
        burst=options.workload,
        measure=options.measure,
        entropy=(options.seed, FIRST_LADDER),
        fence=_fence(server, options),
        rate_rps=1 / max(first_request_s, SHORTEST_REQUEST_S),
    )


def answers(stages: Sequence[StageRecord]) -> bool:
    """Whether the server still answers, as far as the last stage shows."""
    return not stages or stages[-1].num_completed > 0 or stages[-1].num_failed == 0


def _clock(begun_s: float, plan: Plan, stages: Sequence[StageRecord]) -> Clock:
    elapsed_s = time.perf_counter() - begun_s
    return Clock(elapsed_s=elapsed_s, left_s=max(0, most_stages(plan) - len(stages)) * elapsed_s / len(stages))


def _answer(
    server: Server,
    options: BenchOptions,
    stages: Sequence[StageRecord],
    prefix_cache: str,
    *,
    interrupted: bool,
    wall_s: float,
) -> BenchAnswer:
    ttft, itl = options.slo_ttft_p95, options.slo_itl_p95
    fence = _fence(server, options)
    source: FenceSource = "given" if options.fence is not None else "told"
    asked = Asked(
        slo_ttft_p95_ms=None if ttft is None else 1000 * ttft,
        slo_itl_p95_ms=None if itl is None else 1000 * itl,
        fence=fence,
        fence_source=None if fence is None else source,
        config=server.facts.config,
        seed=options.seed,
    )
    found = conclude(stages, asked)
    is_given = found.slo is not None and not found.slo.derived
    verdict = verdict_of(found.finding, is_feasible=found.operating_point is not None or not is_given)
    return BenchAnswer(
        verdict=verdict,
        knee=knee_figures(found.finding, verdict, found.finding.signals),
        finding=found.finding,
        because=found.because,
        warnings=(*_simulated(server), *_interrupted(len(stages), interrupted=interrupted), *found.warnings),
        slo=found.slo,
        operating_point=found.operating_point,
        fence=found.fence,
        fence_source=found.fence_source,
        server=server.facts,
        workload=options.workload,
        workload_hash=options.workload.hash,
        seed=options.seed,
        prefix_cache=prefix_cache,
        interrupted=interrupted,
        stages=found.stages,
        wall_s=wall_s,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        kneetune_version=metadata.version("kneetune"),
    )


def _simulated(server: Server) -> list[str]:
    return ["simulated: step times came from a law, not from a device"] if server.facts.simulated else []


def _interrupted(num_stages: int, *, interrupted: bool) -> list[str]:
    return [f"interrupted after {num_stages} stages: the ladder was not climbed to its end"] if interrupted else []


def write_answer(directory: Path, answer: BenchAnswer) -> None:
    """Write `bench.json`."""
    write_whole(directory / "bench.json", answer.model_dump_json(indent=1))
