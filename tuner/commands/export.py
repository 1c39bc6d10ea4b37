"""`kneetune export`: a run's profiles as files to deploy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from tuner.answer import Profile
from tuner.engines import builtin
from tuner.export.context import ExportContext, ExportRefusedError
from tuner.export.engine_yaml import engine_yaml
from tuner.export.runbook import runbook
from tuner.export.vllm_yaml import vllm_yaml
from tuner.inputs import InputError
from tuner.store import RunStore

Format = Literal["engine", "vllm"]
ProfileChoice = Literal["production", "protective", "both"]

_WRITERS: dict[Format, Callable[[ExportContext], str]] = {"engine": engine_yaml, "vllm": vllm_yaml}
EVERY_FORMAT: tuple[Format, ...] = ("engine", "vllm")


def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    profile: Annotated[ProfileChoice, typer.Option(help="Which profile.")] = "both",
    file_format: Annotated[
        Format, typer.Option("--format", help="For `python -m engine serve` or for `vllm serve`.")
    ] = "engine",
    out: Annotated[Path | None, typer.Option(help="Directory to write into; RUN/export if not given.")] = None,
) -> None:
    """Write a run's production and protective configs, each a file that starts an engine, and the runbook."""
    store = RunStore.open(run)
    written = write_exports(store, (file_format,), out or store.path / "export", profile=profile)
    if not written:
        raise InputError(f"{run}: nothing to export: {store.recommendation().reason}")
    for path in written:
        typer.echo(str(path))


def write_exports(
    store: RunStore, formats: tuple[Format, ...], out: Path, *, profile: ProfileChoice = "both"
) -> list[Path]:
    """Write the profiles a run has, as `PROFILE.FORMAT.yaml`, and `runbook.md`; returns what was written.

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
            path = out / f"{each.name}.{name}.yaml"
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
        device_memory_bytes=job.engine.device_memory,
        law=job.engine.law,
        cpu_omp_threads_bind=None if job.engine.cpus is None else builtin.cpus_flag(job.engine.cpus),
    )
    try:
        return _WRITERS[name](context)
    except ExportRefusedError as error:
        raise InputError(str(error)) from None


def _max_model_len(store: RunStore, profile: Profile) -> int:
    """The length that was in force when the profile was measured."""
    numbers = {profile.trial, *profile.confirmed_by}
    for trial in store.trials():
        if trial.number in numbers and trial.outcome.outcome == "measured":
            return trial.outcome.facts.max_model_len
    raise InputError(f"{store.path}: the trials behind the {profile.name} profile are gone: restore its trials/ folder")
