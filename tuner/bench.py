"""One ladder on a server that is already running: checked by a request, climbed, answered. Starts and stops nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Protocol

import uvloop

from tuner import wording
from tuner.analysis.benched import Asked, Benched, FenceSource, ceiling_rps, conclude
from tuner.analysis.outage import outage
from tuner.analysis.rates import RateSearch
from tuner.answer import LadderVerdict
from tuner.bench_answer import BenchAnswer
from tuner.bench_options import BenchOptions
from tuner.climb import POISSON, RATE_REQUESTS, Climb, climb, stage_spec
from tuner.elsewhere.stage import Axis
from tuner.engine_config import EngineConfig
from tuner.engines.running import Server, discover, reset_prefix_cache
from tuner.first_request import check_first_request
from tuner.inputs import InputError
from tuner.ladder import FixedSteps, Ladder, LadderStep, Plan, most_stages, next_step
from tuner.ladder_answer import AnswerVerdict, knee_figures, verdict_of
from tuner.load.arrivals import Constant
from tuner.load.connection import Endpoint
from tuner.load.workload import Workload, WorkloadError
from tuner.measure.spec import StageSpec, Target
from tuner.progress import Clock
from tuner.records import StageKind, StageRecord
from tuner.stopping import run_until_told
from tuner.store import kept_stages, write_whole

FIRST_LADDER = 0
"""A bench is one climb."""

SHORTEST_REQUEST_S = 1e-3
"""No request counts as shorter: stages are not to shrink to nothing."""


class BenchWatcher(Protocol):
    """Somebody who looks on."""

    def note(self, text: str) -> None:
        """Something a person should know."""

    def stage_began(self, spec: StageSpec) -> None:
        """A stage is about to be measured."""

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

    A `KeyboardInterrupt` in a stage gives that stage up; the answer comes from all that were kept before.

    Raises:
        InputError: where the server cannot be measured so; no stage has been measured then.
    """
    begun_s = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = run_until_told(runner, discover(endpoint, model=options.model))
        target = _target(server, options.workload)
        options = options.on(target.max_model_len)
        first_s = run_until_told(
            runner, check_first_request(target, options.workload, seed=options.seed, tell=watcher.note)
        )
        not_reset = run_until_told(runner, reset_prefix_cache(endpoint))
    prefix_cache = "reset" if not_reset is None else f"not reset: {not_reset}"
    for text in _opening(server, options, prefix_cache):
        watcher.note(text)
    task = _task(server, options, max_model_len=target.max_model_len, first_request_s=first_s)
    watcher.note(_expected(task))
    stages: list[StageRecord] = []
    interrupted = False
    try:
        for stage in _measured(task, target, options, directory, watcher, goes_on=lambda: not stop_requested()):
            stages.append(stage)
            watcher.stage_ended(stage, _clock(begun_s, task.plan, stages))
    except KeyboardInterrupt:
        # Not what was seen here: a stage may have been kept and not yet handed over.
        interrupted, stages = True, kept_stages(directory)
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
        length = workload.longest_request_tokens()
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


def _expected(task: Climb) -> str:
    """How long it will take at the most, and why, before it begins."""
    sooner = "a stage ends as soon as it knows enough"
    if not isinstance(task.plan, FixedSteps):
        longest = wording.duration(_most_s(stage_spec(task, LadderStep(kind=StageKind.LADDER, load=1), [])))
        return (
            f"up to {most_stages(task.plan)} stages, at most {longest} each while the server is as fast as now; "
            f"{sooner}, and the ladder once the knee is behind"
        )
    specs = [stage_spec(task, step, []) for step in task.plan.steps]
    stages = "1 stage" if len(specs) == 1 else f"{len(specs)} stages"
    total = f"{stages}, at most {wording.duration(sum(map(_most_s, specs)))} in all; {sooner}"
    if task.plan.steps[0].kind is not StageKind.RATE or specs[0].has_an_end:
        return total
    needed = RATE_REQUESTS * task.measure.min_requests
    return f"{total}, at a rate not before {needed} requests, which its p95s need, came"


def _most_s(spec: StageSpec) -> float:
    return spec.max_warm_up_s + spec.max_s


def _measured(
    task: Climb,
    target: Target,
    options: BenchOptions,
    directory: Path,
    watcher: BenchWatcher,
    *,
    goes_on: Callable[[], bool],
) -> Iterator[StageRecord]:
    """The ladder, and after it the safe rate where it was asked for."""
    stages: list[StageRecord] = []

    def climbed(task: Climb) -> Iterator[StageRecord]:
        def begins(so_far: Sequence[StageRecord]) -> bool:
            if not goes_on() or outage(so_far) is not None:
                return False
            step = next_step(task.plan, so_far)
            if step is not None:
                watcher.stage_began(stage_spec(task, step, so_far))
            return True

        for stage in climb(task, target, kept=tuple(stages), directory=directory, goes_on=begins):
            stages.append(stage)
            yield stage

    yield from climbed(task)
    slo, ceiling = conclude(stages, _asked(options, task.fence)).slo, ceiling_rps(stages)
    if options.arrivals is not None and not options.rates and slo is not None and ceiling is not None:
        yield from climbed(replace(task, plan=RateSearch(slo=slo, ceiling_rps=ceiling)))


def _plan(server: Server, options: BenchOptions) -> Plan:
    slo = options.slo
    if options.rates:
        steps = tuple(LadderStep(kind=StageKind.RATE, load=rate) for rate in options.rates)
        return FixedSteps(steps=steps, slo=slo)
    if options.loads:
        steps = tuple(LadderStep(kind=StageKind.LADDER, load=load) for load in sorted(set(options.loads)))
        return FixedSteps(steps=steps, slo=slo)
    thinks = options.workload.thinks
    return Ladder(max_num_seqs=_fence(server, options), max_load=options.max_load, thinks=thinks, slo=slo)


def _task(server: Server, options: BenchOptions, *, max_model_len: int, first_request_s: float) -> Climb:
    return Climb(
        plan=_plan(server, options),
        workload=options.workload,
        burst=options.workload,
        measure=options.measure,
        arrivals=Constant(kind="constant") if options.arrivals == "constant" else POISSON,
        entropy=(options.seed, FIRST_LADDER),
        fence=_fence(server, options),
        max_model_len=max_model_len,
        caches_prefixes=server.facts.config is None or server.facts.config.enable_prefix_caching,
        rate_rps=1 / max(first_request_s, SHORTEST_REQUEST_S),
    )


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
    source: FenceSource = "given" if options.fence is not None else "told"
    asked = _asked(options, _fence(server, options), source, server.facts.config)
    found = conclude(stages, asked)
    verdict = _verdict(options, found)
    return BenchAnswer(
        verdict=verdict,
        knee=knee_figures(found.finding, verdict, found.finding.signals),
        finding=found.finding,
        because=found.because,
        warnings=(*_simulated(server), *_interrupted(len(stages), interrupted=interrupted), *found.warnings),
        slo=found.slo,
        operating_point=found.operating_point,
        safe_rate_rps=found.safe_rate_rps,
        axis=Axis.REQUEST_RATE if options.rates else Axis.CONCURRENCY,
        fence=found.fence,
        fence_source=found.fence_source,
        server=server.facts,
        workload=options.workload,
        workload_hash=options.workload.hash,
        seed=options.seed,
        prefix_cache=prefix_cache,
        interrupted=interrupted,
        asked=options.rates or options.loads,
        command=options.command,
        stages=found.stages,
        wall_s=wall_s,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        kneetune_version=metadata.version("kneetune"),
    )


def _verdict(options: BenchOptions, found: Benched) -> AnswerVerdict:
    """Rates that were asked for are an answer once each was measured, with a knee or without."""
    if options.rates and found.finding.verdict is not LadderVerdict.KNEE:
        measured = {stage.load for stage in found.stages if stage.valid}
        return AnswerVerdict.MEASURED if measured >= set(options.rates) else AnswerVerdict.NOT_MEASURED
    is_given = found.slo is not None and not found.slo.derived
    is_feasible = not is_given or (found.operating_point, found.safe_rate_rps) != (None, None)
    return verdict_of(found.finding, is_feasible=is_feasible)


def _asked(
    options: BenchOptions,
    fence: int | None,
    source: FenceSource = "told",
    config: EngineConfig | None = None,
) -> Asked:
    ttft, itl = options.slo_ttft_p95, options.slo_itl_p95
    return Asked(
        slo_ttft_p95_ms=None if ttft is None else 1000 * ttft,
        slo_itl_p95_ms=None if itl is None else 1000 * itl,
        fence=fence,
        fence_source=None if fence is None else source,
        config=config,
        seed=options.seed,
    )


def _simulated(server: Server) -> list[str]:
    return ["simulated: step times came from a law, not from a device"] if server.facts.simulated else []


def _interrupted(num_stages: int, *, interrupted: bool) -> list[str]:
    return [f"interrupted after {num_stages} stages: the ladder was not climbed to its end"] if interrupted else []


def write_answer(directory: Path, answer: BenchAnswer) -> None:
    """Write `bench.json`."""
    write_whole(directory / "bench.json", answer.model_dump_json(indent=1))
