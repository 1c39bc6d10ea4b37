"""A profile as a config file for the built-in engine: `python -m engine serve --config FILE`."""

from __future__ import annotations

from tuner.export.context import ExportContext, ExportRefusedError, check_exportable, config_keys, document


def engine_yaml(context: ExportContext) -> str:
    """The YAML text; its keys are the engine's flags without the leading dashes.

    Raises:
        ExportRefusedError: for production without a `resolved` verdict, and for more than one device.
    """
    check_exportable(context)
    num_devices = context.profile.config.tensor_parallel_size
    if num_devices != 1:
        raise ExportRefusedError(
            f"the built-in engine runs on one device, tensor_parallel_size={num_devices}: export for vLLM"
        )
    keys = config_keys(context)
    if context.device_memory_bytes is not None:
        keys["device-memory"] = context.device_memory_bytes
    if context.law is not None:
        keys |= {"executor": "simulated", "law": context.law}
    if context.cpu_omp_threads_bind is not None:
        keys["cpu-omp-threads-bind"] = context.cpu_omp_threads_bind
    foreign = context.recommendation.provenance.engine == "vllm"
    caveat = "measured on vLLM, not on the built-in engine: verify it before you rely on it." if foreign else ""
    return document(context, keys=keys, start="python -m engine serve --config FILE", caveat=caveat)
