"""A profile as a config file for `vllm serve --config FILE`.

Every key whose default moves with the card, the release or the entry point is written out, and a feature that is off
is written as its `no-` flag (vLLM ignores `enable-…: false`).
"""

from __future__ import annotations

from tuner.export.context import ExportContext, check_exportable, config_keys, document


def vllm_yaml(context: ExportContext) -> str:
    """The YAML text; its keys are vLLM's flags without the leading dashes.

    Raises:
        ExportRefusedError: for production without a `resolved` verdict.
    """
    check_exportable(context)
    config = context.profile.config
    keys = {
        **config_keys(context),
        "tensor-parallel-size": config.tensor_parallel_size,
        "pipeline-parallel-size": config.pipeline_parallel_size,
    }
    return document(context, keys=keys, start="vllm serve --config FILE", caveat=_caveat(context))


def _caveat(context: ExportContext) -> str:
    engine = context.recommendation.provenance.engine
    if engine == "vllm":
        return ""
    name = "the built-in engine" if engine == "builtin" else engine
    lines = [
        f"measured on {name}, not on vLLM: the parameters mean the same there, the figures do not carry over.",
        "Tune or re-measure on vLLM and its hardware before you rely on them.",
    ]
    if context.model == "embedded":
        lines.append("`embedded` is the built-in engine's own model: name the folder or hub id vLLM is to load.")
    return "\n".join(lines)
