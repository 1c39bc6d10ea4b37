"""A profile for `vllm serve`: a config file, one line of arguments, and the variables that belong to them.

A feature that is off is written as its `no-` flag: a loader that turns true into a bare flag and drops false would
leave it on.
"""

from __future__ import annotations

import shlex

from tuner.answer import Provenance
from tuner.engine_config import Setting
from tuner.export.context import ExportContext, ExportRefusedError, check_exportable, document, header
from tuner.export.settings import check_extra_args, keys, known_to_the_target, settings
from tuner.extra_args import flags


def vllm_yaml(context: ExportContext) -> str:
    """The YAML text for `vllm serve --config FILE`; its keys are vLLM's flags without the leading dashes.

    Raises:
        ExportRefusedError: for production without a `resolved` verdict, a flag that the measured version does not have,
            and further arguments that no file can hold.
    """
    told: dict[str, Setting | list[str]] = {"model": context.model, **_keys(context)}
    for name, values in flags(context.profile.config.extra_args):
        key = name.removeprefix("--")
        if key == name or key in told:
            raise ExportRefusedError(
                f"extra_args: {name} can stand in no config file, it is short or stands twice: export --format args"
            )
        told[key] = values if len(values) > 1 else values[0] if values else True
    return document(
        context,
        keys=told,
        start="vllm serve --config FILE",
        caveat=caveat(context.recommendation.provenance, context.model),
    )


def vllm_args(context: ExportContext) -> str:
    """The same as one line for a shell: what follows `vllm serve`.

    Raises:
        ExportRefusedError: as `vllm_yaml` does, but for what a file cannot hold.
    """
    line = [context.model]
    for key, value in _keys(context).items():
        line += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    return shlex.join([*line, *context.profile.config.extra_args]) + "\n"


def vllm_env(context: ExportContext) -> str:
    """The variables the engine was measured with, a line each, as `docker run --env-file` takes them.

    Raises:
        ExportRefusedError: as `vllm_yaml` does, for an engine that has none, and for a value of several lines.
    """
    check_exportable(context)
    engine = context.recommendation.provenance.engine
    if engine != "vllm":
        raise ExportRefusedError(
            f"the run measured {engine}, which has none of vLLM's variables, and without settings vLLM would start on "
            "its defaults: export --format vllm or args"
        )
    for name, value in context.environment.items():
        if not value.isprintable():
            raise ExportRefusedError(f"{name} holds a line break, which no line of an env file can: leave it out")
    start = "docker run --env-file FILE IMAGE, with the arguments of --format args"
    lines = "".join(f"{name}={value}\n" for name, value in sorted(context.environment.items()))
    return header(context, start=start, caveat=caveat(context.recommendation.provenance, context.model)) + lines


def _keys(context: ExportContext) -> dict[str, Setting]:
    check_exportable(context)
    check_extra_args([name for name, _ in flags(context.profile.config.extra_args)], context)
    served = {} if context.served_model_name is None else {"served-model-name": context.served_model_name}
    return {**served, **keys(known_to_the_target(settings(context), context))}


def caveat(provenance: Provenance, model: str) -> str:
    """What of the figures does not carry over to vLLM; empty where they were measured on it."""
    engine = provenance.engine
    if engine == "vllm":
        return ""
    name = "the built-in engine" if engine == "builtin" else engine
    lines = [
        f"measured on {name}, not on vLLM: the parameters mean the same there, the figures do not carry over.",
        "Tune or re-measure on vLLM and its hardware before you rely on them.",
    ]
    if model == "embedded":
        lines.append("`embedded` is the built-in engine's own model: name the folder or hub id vLLM is to load.")
    return "\n".join(lines)
