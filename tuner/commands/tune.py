"""`kneetune tune`: search, choose, confirm, export, report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from tuner.answer import RunVerdict
from tuner.commands.export import formats_of, write_exports
from tuner.commands.live import LiveWatcher
from tuner.commands.plan import place_here, print_plan
from tuner.commands.report import write_run_report
from tuner.commands.show import print_answer
from tuner.commands.watch import PlainWatcher
from tuner.engines.device_holders import in_the_way
from tuner.engines.leftovers import end_leftovers, nothing_left_alive
from tuner.engines.registry import adapter_of
from tuner.inputs import InputError
from tuner.job import TuningJob, load_job
from tuner.placement import Placement
from tuner.provenance import provenance
from tuner.resume import resumed_job
from tuner.stopping import StopOnInterrupt
from tuner.store import RunStore

EMBEDDED_JOB = "embedded"
"""The preset a job starts from when the model that ships with us is named and no job."""

DEFAULT_JOB = "default"
"""The preset a job starts from when another model is named and no job."""


def tune(
    job: Annotated[str | None, typer.Argument(help="A job file, or a preset's name.", metavar="[JOB.yaml]")] = None,
    model: Annotated[str | None, typer.Option(help="`embedded`, a local Hugging Face folder, or a hub id.")] = None,
    engine: Annotated[str | None, typer.Option(help="`builtin` or `vllm`; a job can define any other.")] = None,
    workload: Annotated[str | None, typer.Option(help="A workload preset, such as `chat-short`.")] = None,
    slo_ttft_p95: Annotated[str | None, typer.Option(help="Limit on p95 time to first token, such as 500ms.")] = None,
    slo_itl_p95: Annotated[str | None, typer.Option(help="Limit on p95 inter-token latency, such as 50ms.")] = None,
    budget: Annotated[str | None, typer.Option(help="Wall time for the whole job, such as 30m.")] = None,
    trials: Annotated[int | None, typer.Option(help="Settings to measure.")] = None,
    parallel_trials: Annotated[
        int | None, typer.Option(help="Most trials at once, each on GPUs of its own; else as many as fit.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seeds the sampler and every prompt.")] = None,
    name: Annotated[str | None, typer.Option(help="The run's name: its directory under --runs.")] = None,
    runs: Annotated[Path, typer.Option(help="Where run directories are made.")] = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and start nothing.")] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with a run that was cut off; --budget and --trials may give it more.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON, progress on stderr.")] = False,
) -> None:
    """Launch an engine for every setting, climb a load ladder, return two configs to deploy.

    JOB is a YAML file or the name of a preset; options replace what it says. With --model it may be left out: it is
    `embedded` for that model and `default` for any other. Ctrl-C finishes the stage and stops; --resume goes on from
    there.
    """
    if resume is not None:
        given = _given(job=job, model=model, engine=engine, workload=workload, seed=seed, name=name)
        given |= _given(parallel_trials=parallel_trials)
        given |= _given(slo_ttft_p95=slo_ttft_p95, slo_itl_p95=slo_itl_p95, dry_run=dry_run or None)
        raise typer.Exit(_exit_code(_resume(resume, _given(time=budget, trials=trials), given, as_json=json)))
    if job is None and model is None:
        raise InputError(
            "nothing is named to tune: give a JOB or a --model; `kneetune tune embedded` tries the model that ships "
            "with us, which takes some seven minutes"
        )
    slo = {"ttft_p95": slo_ttft_p95, "itl_p95": slo_itl_p95}
    overrides = _given(
        name=name,
        model=model,
        engine=_given(name=engine),
        workload=workload,
        slo=_given(**slo),
        budget=_given(time=budget, trials=trials),
        parallel_trials=parallel_trials,
        seed=seed,
    )
    start_from = EMBEDDED_JOB if model == "embedded" else DEFAULT_JOB
    tuning_job = load_job(job or start_from, overrides)
    placement = place_here(tuning_job)
    if dry_run:
        print_plan(tuning_job, placement, as_json=json)
        return
    _refuse_busy_device(tuning_job)
    store = RunStore.create(runs, tuning_job, provenance(tuning_job))
    with store.locked():
        raise typer.Exit(_exit_code(_run(tuning_job, store, placement, as_json=json)))


def _resume(path: Path, budget: dict[str, object], given: dict[str, object], *, as_json: bool) -> RunVerdict:
    """Go on with the run at `path`, with the job it has."""
    if given:
        named = ", ".join("JOB" if key == "job" else f"--{key.replace('_', '-')}" for key in given)
        raise InputError(
            f"--resume goes on with the job of {path}: leave out {named}; --budget and --trials may change"
        )
    store = RunStore.open(path)
    with store.locked():
        job = resumed_job(store, budget=budget)
        placement = place_here(job)
        store.write_job(job)
        end_leftovers(store)
        _refuse_busy_device(job)
        return _run(job, store, placement, as_json=as_json)


def _refuse_busy_device(job: TuningJob) -> None:
    busy = in_the_way(job.engine)
    if busy is not None:
        raise InputError(f"{job.name}: {busy}")


def _run(job: TuningJob, store: RunStore, placement: Placement, *, as_json: bool) -> RunVerdict:
    # These import ray and optuna, which --help and --dry-run need not wait for.
    from tuner.launches import StopRequestedError
    from tuner.tuning import run_tuning
    from tuner.workers import Workers

    typer.echo(f"{job.name}: {job.model} on {job.engine.described}, into {store.path}", err=True)
    simulated = job.engine.law is not None
    title = f"{job.name} on {job.engine.described}, into {store.path}"
    watcher = LiveWatcher(title, simulated=simulated) if sys.stderr.isatty() else PlainWatcher(simulated=simulated)
    flags = adapter_of(job.engine).installed(job).flags
    if flags is not None:
        store.write_flags(flags)
    try:
        with watcher, StopOnInterrupt(watcher.note) as stop, nothing_left_alive(store), Workers(placement) as workers:
            for warning in placement.warnings:
                watcher.note(warning)
            recommendation = run_tuning(
                job, store, store.provenance(), workers, watcher, stop_requested=lambda: stop.requested
            )
    except (KeyboardInterrupt, StopRequestedError):
        go_on = shlex.join(["kneetune", "tune", "--resume", str(store.path)])
        typer.echo(f"interrupted: the engine is stopped, what was measured is kept. Go on with: {go_on}", err=True)
        raise typer.Exit(130) from None
    except OSError as error:
        raise InputError(
            f"{store.path}: {error.strerror or error}; the trials that ended are kept there: make room, "
            f"then go on with {shlex.join(['kneetune', 'tune', '--resume', str(store.path)])}"
        ) from error
    write_exports(store, formats_of(job), store.path / "export")
    write_run_report(store)
    print_answer(recommendation, store.path, as_json=as_json)
    return recommendation.verdict


def _exit_code(verdict: RunVerdict) -> int:
    return 0 if verdict is RunVerdict.RESOLVED else 1


def _given(**values: object) -> dict[str, object]:
    """What was given: options left alone (None) and groups of none but those are dropped."""
    return {key: value for key, value in values.items() if value is not None and value != {}}
