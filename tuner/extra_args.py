"""Flags a job hands to the engine's command line as they are."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_FLAG = re.compile(r"--?[A-Za-z]")
_OURS = ("model", "config", "host", "port", "served-model-name")
_SECRETS = ("api-key", "hf-token")
_SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-q": "quantization",
    "-sc": "speculative_config",
}
"""vLLM's short names of parameters."""


def flags(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the values after it; `--flag=value` is split. A number below zero is a value."""
    found: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if _FLAG.match(argument):
            name, is_split, value = argument.partition("=")
            found.append((name, [value] if is_split else []))
        elif found:
            found[-1][1].append(argument)
    return found


def check(arguments: Sequence[str], *, parameters: Collection[str]) -> None:
    """Refuse what is set elsewhere: the engine would take the last of the two, and the record would name the other.

    Args:
        parameters: names of the engine parameters, with underscores.

    Raises:
        ValueError: for a value without its flag, a parameter, a flag the launch itself needs, or a secret.
    """
    if arguments and not _FLAG.match(arguments[0]):
        raise ValueError(f"{arguments[0]!r} comes first and is no flag: write the flag before its value")
    for flag, _ in flags(arguments):
        name = flag.lstrip("-").replace("_", "-").removeprefix("no-")
        meant = _SHORT.get(flag) or _begun_by(name, [each.replace("_", "-") for each in parameters])
        if meant is not None:
            raise ValueError(f"{flag} is a parameter: write {meant.replace('-', '_')} instead, so that it is on record")
        if _begun_by(name, _OURS) is not None:
            raise ValueError(f"{flag} is set by the launch itself: leave it out")
        if _begun_by(name, _SECRETS) is not None:
            raise ValueError(f"{flag} brings a secret, and a run keeps its arguments: set its environment variable")


def _begun_by(name: str, names: Collection[str]) -> str | None:
    """Which name an argument parser may take it for: the same, or one that begins so."""
    return name if name in names else next((each for each in names if len(name) > 1 and each.startswith(name)), None)
