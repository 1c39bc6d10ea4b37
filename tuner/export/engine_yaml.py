"""A profile as a config file for the built-in engine: `python -m engine serve --config FILE`."""

from __future__ import annotations

from tuner.engines.builtin import BUILTIN
from tuner.export.context import ExportContext, ExportRefusedError, check_exportable, document
from tuner.export.settings import keys, settings

_ONE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
"""Sizes the engine has no other of, and needs no flag for."""


def engine_yaml(context: ExportContext) -> str:
    """The YAML text; its keys are the engine's flags without the leading dashes.

    Raises:
        ExportRefusedError: for production without a `resolved` verdict, and for what the engine cannot be told.
    """
    check_exportable(context)
    config, values = context.profile.config, settings(context)
    for name, value in values.items():
        if name not in BUILTIN.settable and _ONE.get(name) != value:
            raise ExportRefusedError(f"the built-in engine cannot be told {name}={value}: export for vLLM")
    if config.extra_args:
        raise ExportRefusedError("extra_args are flags of a command line, not keys of a file: leave them out")
    served = {} if context.served_model_name is None else {"served-model-name": context.served_model_name}
    told = {"model": context.model, **served, **keys({name: values[name] for name in values if name not in _ONE})}
    if context.device_memory_bytes is not None:
        told["device-memory"] = context.device_memory_bytes
    if context.law is not None:
        told |= {"executor": "simulated", "law": context.law}
    if context.cpu_omp_threads_bind is not None:
        told["cpu-omp-threads-bind"] = context.cpu_omp_threads_bind
    foreign = context.recommendation.provenance.engine == "vllm"
    caveat = "measured on vLLM, not on the built-in engine: verify it before you rely on it." if foreign else ""
    return document(context, keys=told, start="python -m engine serve --config FILE", caveat=caveat)
