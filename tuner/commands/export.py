"""`kneetune export`: a run's profiles as files to deploy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from tuner.answer import Profile, Provenance
from tuner.engines import builtin
from tuner.engines.registry import adapter_of
from tuner.export.command_args import command_args
from tuner.export.context import ExportContext, ExportRefusedError
from tuner.export.engine_yaml import engine_yaml
from tuner.export.runbook import runbook
from tuner.export.vllm_yaml import caveat, vllm_args, vllm_env, vllm_yaml
from tuner.gpus import described_gpus
from tuner.inputs import InputError
from tuner.job import TuningJob
from tuner.store import RunStore

Format = Literal["engine", "vllm", "args", "env"]
ProfileChoice = Literal["production", "protective", "both"]

_WRITERS: dict[Format, Callable[[ExportContext], str]] = {
    "engine": engine_yaml,
    "vllm": vllm_yaml,
    "args": vllm_args,
    "env": vllm_env,
}
_ENDINGS: dict[Format, str] = {"engine": "engine.yaml", "vllm": "vllm.yaml", "args": "args.txt", "env": "env"}
"""What a file of that format is named after its profile."""


def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    profile: Annotated[ProfileChoice, typer.Option(help="Which profile.")] = "both",
    file_format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="`engine`: for `python -m engine serve --config`; `vllm`: for `vllm serve --config`; `args`: the line "
            "after `vllm serve`, or the whole command of an engine that a file defines; `env`: its variables. That of "
            "the run's engine if not given.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write into; RUN/export if not given.")] = None,
) -> None:
    """Write a run's production and protective configs, each a file that starts an engine, and the runbook."""
    store = RunStore.open(run)
    job, provenance = store.job(), store.recommendation().provenance
    chosen = file_format or formats_of(job)[0]
    said = warnings(provenance, here=described_gpus())
    if chosen == "args" and job.engine.definition is None and (not_on_vllm := caveat(provenance, job.model)):
        said.append(not_on_vllm)  # the file is one line for a shell and holds no words
    for warning in said:
        typer.echo(f"warning: {warning}", err=True)
    written = write_exports(store, (chosen,), out or store.path / "export", profile=profile)
    if not written:
        raise InputError(f"{run}: nothing to export: {store.recommendation().reason}")
    for path in written:
        typer.echo(str(path))


_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's own variable for the CPUs it computes on."""


def formats_of(job: TuningJob) -> tuple[Format, ...]:
    """What a run writes by itself: what its engine reads first, and for the built-in engine what vLLM does."""
    of: dict[str, tuple[Format, ...]] = {
        "builtin": ("engine", "vllm"),
        "vllm": ("vllm", "args", "env"),
        "command": ("args",),
    }
    return of[job.engine.name]


def warnings(provenance: Provenance, *, here: str | None) -> list[str]:
    """What about this machine is not as it was measured.

    Args:
        here: the GPUs of this machine, as a provenance names them; None where there are none to deploy to.
    """
    measured_on_a_gpu = not provenance.simulated and not provenance.device.startswith("cpu")
    if here is None or not measured_on_a_gpu or here == provenance.device:
        return []
    return [f"tuned on {provenance.device}, and this machine has {here}: tune on the card that is to serve"]


def write_exports(
    store: RunStore, formats: tuple[Format, ...], out: Path, *, profile: ProfileChoice = "both"
) -> list[Path]:
    """Write the profiles a run has, such as `production.vllm.yaml`, and `runbook.md`; returns what was written.

    Raises:
        InputError: if a profile was asked for by name and the run has none, or it must not leave the run.
    """
    recommendation = store.recommendation()
    profiles = [recommendation.production, recommendation.protective]
    chosen = [each for each in profiles if each is not None and profile in ("both", each.name)]
    if profile != "both" and not chosen:
        raise InputError(f"{store.path}: this run has no {profile} profile: {recommendation.reason}")
    if not chosen:
        return []
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for each in chosen:
        for name in formats:
            path = out / f"{each.name}.{_ENDINGS[name]}"
            path.write_text(_text(store, each, name), encoding="utf-8")
            written.append(path)
    path = out / "runbook.md"
    path.write_text(runbook(recommendation), encoding="utf-8")
    return [*written, path]


def _text(store: RunStore, profile: Profile, name: Format) -> str:
    job = store.job()
    context = ExportContext(
        profile=profile,
        recommendation=store.recommendation(),
        run=store.path.name,
        model=job.model,
        max_model_len=_max_model_len(store, profile),
        environment=_environment(store, profile),
        known_flags=store.flags(),
        device_memory_bytes=job.engine.device_memory,
        law=job.engine.law,
        cpu_omp_threads_bind=None if job.engine.cpus is None else builtin.cpus_flag(job.engine.cpus),
    )
    try:
        if job.engine.definition is not None:
            return command_args(context, _command(job, profile, name))
        return _WRITERS[name](context)
    except ExportRefusedError as error:
        raise InputError(str(error)) from None


DEPLOYED_PORT = 8000
"""What an exported command line listens on, until it is given another."""


def _command(job: TuningJob, profile: Profile, name: Format) -> list[str]:
    """What starts the profile on an engine that is data; it is no other engine's."""
    adapter = adapter_of(job.engine)
    if name != "args":
        raise InputError(f"the run measured {adapter.name}, a file for another engine would be a guess: --format args")
    served = Path(job.model).stem
    return adapter.command(job.model, profile.config, job.engine, port=DEPLOYED_PORT, served_model_name=served)


def _environment(store: RunStore, profile: Profile) -> dict[str, str]:
    """What the job set, and where the engine's threads were bound by it."""
    engine = store.job().engine
    bound = {} if engine.cpus is None else store.engine_environment(profile.trial)
    return {name: value for name, value in bound.items() if name == _BINDING} | dict(engine.environment)


def _max_model_len(store: RunStore, profile: Profile) -> int:
    """The length that was in force when the profile was measured."""
    numbers = {profile.trial, *profile.confirmed_by}
    for trial in store.trials():
        if trial.number in numbers and trial.outcome.outcome == "measured":
            return trial.outcome.facts.max_model_len
    raise InputError(f"{store.path}: the trials behind the {profile.name} profile are gone: restore its trials/ folder")
