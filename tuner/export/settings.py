"""A profile's engine parameters as they leave the run: every one that is set, by its flag, in plain values."""

from __future__ import annotations

from tuner.engine_config import EngineConfig, Setting
from tuner.export.context import ExportContext, ExportRefusedError

REQUIRED = (
    *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_model_len"),
    *("enable_chunked_prefill", "enable_prefix_caching", "dtype", "tensor_parallel_size"),
)
"""Parameters whose defaults move with the card, the release or the entry point: no file leaves without them."""

_ABSENT: dict[str, Setting] = {
    "enable_chunked_prefill": True,
    "kv_cache_dtype": "auto",
    "long_prefill_token_threshold": 0,
    "watermark": 0.0,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
}
"""What an engine does that has no such flag (any more)."""


def settings(context: ExportContext) -> dict[str, Setting]:
    """Every parameter that is set, by name; a length left to the model is the one that was in force."""
    config = context.profile.config
    found: dict[str, Setting] = config.model_dump(exclude={"extra_args"}, exclude_none=True)
    ordered = ["max_model_len" if name == "extra_args" else name for name in EngineConfig.model_fields]
    found.setdefault("max_model_len", context.max_model_len)
    missing = [name for name in REQUIRED if name not in found]
    if missing:
        raise ExportRefusedError(
            f"the {context.profile.name} profile does not say {', '.join(missing)}, whose default moves with the card "
            "and the release: tune again, or give it a value in engine.fixed"
        )
    return {name: found[name] for name in dict.fromkeys(ordered) if name in found}


def flag(name: str, *, on: bool | None) -> dict[str, bool]:
    """A yes/no flag in its explicit form: on, off and unset give three different results.

    `name: false` is read as "no flag" by a loader that knows no negative form, which leaves a default of on in force.
    """
    if on is None:
        return {}
    return {name: True} if on else {f"no-{name}": True}


def keys(values: dict[str, Setting]) -> dict[str, Setting]:
    """The settings under their flags' names, without the leading dashes."""
    return {key: given for name, value in values.items() for key, given in _key(name.replace("_", "-"), value).items()}


def _key(name: str, value: Setting) -> dict[str, Setting]:
    return dict(flag(name, on=value)) if isinstance(value, bool) else {name: value}


def known_to_the_target(values: dict[str, Setting], context: ExportContext) -> dict[str, Setting]:
    """The settings without those that the target version has no flag for and does anyway.

    Raises:
        ExportRefusedError: for one that it has no flag for and does not do, naming flag and version.
    """
    if context.known_flags is None:
        return values
    kept = {}
    for name, value in values.items():
        (key,) = keys({name: value})
        if f"--{key}" in context.known_flags:
            kept[name] = value
        elif _ABSENT.get(name) != value:
            raise _unknown(f"--{key}", context)
    return kept


def check_extra_args(names: list[str], context: ExportContext) -> None:
    """Refuse a verbatim flag that the target version does not have.

    Raises:
        ExportRefusedError: naming flag and version.
    """
    for name in names:
        flag_name = name.partition(".")[0].replace("_", "-")  # `--a.b 1` is a key of the JSON that `--a` takes
        if context.known_flags is not None and flag_name not in context.known_flags:
            raise _unknown(name, context)


def _unknown(flag_name: str, context: ExportContext) -> ExportRefusedError:
    version = context.recommendation.provenance.engine_version
    return ExportRefusedError(
        f"vLLM {version} has no {flag_name}: it would exit at once, and without it another value is in force. Tune on "
        "the version the file is for"
    )
