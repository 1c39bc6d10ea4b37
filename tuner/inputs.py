"""What a user hands in: YAML to frozen values, with errors that name the key, the value and the way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, PlainSerializer, ValidationError
from pydantic_core import ErrorDetails

from tuner.yaml_file import YamlError, plain_data, read_plain_data

_Model = TypeVar("_Model", bound=BaseModel)

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+)(?:([KMGT])(?:iB)?)?")
_COUNT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kmgKMG]?)")
_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


MOST_SECONDS = 366 * 24 * 3600.0
MOST_BYTES = 2**60


class InputError(ValueError):
    """Something the user handed in cannot be used; the message says what, where and what would do."""


def parse_duration_s(text: object) -> float:
    """Read `500ms`, `30s`, `10m` or `1h` as seconds.

    Raises:
        ValueError: for a bare number (its unit would be a guess) or anything else.
    """
    match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is {_fault_of(text)}: write digits and a unit, such as 500ms, 30s, 10m or 1h")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > MOST_SECONDS:
        raise ValueError(f"{text!r} is longer than a year: write at most {MOST_SECONDS / 3600:g}h")
    return seconds


def _fault_of(text: object) -> str:
    """Why a value is no duration, in words that follow it."""
    written = text.strip().lower() if isinstance(text, str) else ""
    if written.startswith("-") and _DURATION.fullmatch(written[1:].strip()):
        return "below zero, and no time is"
    if re.fullmatch(r"[+-]?(inf|infinity|nan)(ms|s|m|h)?", written):
        return "not a finite time"
    if isinstance(text, int | float) or re.fullmatch(r"\d+(\.\d+)?", written):
        return "without a unit, and not a duration"
    return "not a duration"


def parse_size_bytes(text: object) -> int:
    """Read a number of bytes, plain or with a binary suffix: `256M` is 268,435,456.

    Raises:
        ValueError: for anything else.
    """
    text = str(text) if isinstance(text, int) and not isinstance(text, bool) else text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    size = 0 if match is None else int(match[1]) * _BINARY[match[2] or ""]
    if not 0 < size < MOST_BYTES:
        raise ValueError(f"{text!r} is not a size in bytes: write 268435456 or 256M")
    return size


def parse_token_count(text: object) -> int:
    """Read a number of tokens as vLLM does: `16k` is 16,000, `16K` is 16,384, `25.6k` is 25,600.

    Raises:
        ValueError: for anything else; a binary suffix takes no decimals, and what comes out is whole.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _COUNT.fullmatch(text) if isinstance(text, str) else None
    count = None if match is None else Decimal(match[1]) * _MULTIPLES[match[2]]
    if match is None or count is None or count != int(count) or ("." in match[1] and not match[2].islower()):
        raise ValueError(f"{text!r} is not a number of tokens: write 16384, 16k (16,000) or 16K (16,384)")
    return int(count)


DurationS = Annotated[float, BeforeValidator(parse_duration_s), PlainSerializer(lambda seconds: f"{seconds:g}s")]
"""Seconds, written with a unit."""

TokenCount = Annotated[int, BeforeValidator(parse_token_count)]
"""Tokens, written plain or with vLLM's suffixes."""

SizeBytes = Annotated[int, BeforeValidator(parse_size_bytes)]
"""Bytes, written plain or with a binary suffix."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Say which known word was probably meant, and list them all."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(names)}"


def validated(model: type[_Model], data: object, *, where: str) -> _Model:
    """Build `model` from plain data.

    Raises:
        InputError: one line for each fault, each with its place, its value and what would do.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [_fault(model, fault) for fault in error.errors()]
        raise InputError("\n".join(f"{where}: {line}" for line in lines)) from None


def read_yaml(path: Path) -> object:
    """Read a YAML file as plain data.

    Raises:
        InputError: if it is missing, unreadable or not YAML.
    """
    try:
        return read_plain_data(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; name a YAML file that this user may read") from None
    except YamlError as fault:
        raise InputError(f"{path}: {fault}") from None


def read_preset(kind: str, name: str) -> object:
    """Read one of the presets that ship under `search_spaces/` as plain data.

    Args:
        kind: the folder: `spaces`, `workloads` or `jobs`.

    Raises:
        InputError: for a name there is no preset of, naming the nearest.
    """
    folder = resources.files("search_spaces") / kind
    names = {item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")}
    if name not in names:
        raise InputError(f"there is no preset {name!r} in {kind}{nearest(name, names)}; a file's name ends in .yaml")
    return plain_data((folder / f"{name}.yaml").read_text(encoding="utf-8"))


def _fault(model: type[BaseModel], fault: ErrorDetails) -> str:
    place = ".".join(str(part) for part in fault["loc"])
    match fault["type"]:
        case "extra_forbidden":
            key = str(fault["loc"][-1])
            return f"unknown key {place!r}{nearest(key, _fields_at(model, fault['loc'][:-1]))}"
        case "missing":
            return f"{place!r} is missing: add it"
        case _:
            text, value = _rule(fault), fault["input"]
            # A whole group is no value to show, and a message may have named it.
            got = "" if isinstance(value, dict) or repr(value) in text else f" (got {_shown(value)})"
            return f"{place}: {text}{got}" if place else text


def _rule(fault: ErrorDetails) -> str:
    """What the value breaks, in words for whoever wrote it."""
    context = fault.get("ctx", {})
    match fault["type"]:
        case "model_type" | "dict_type":
            return "must be keys and values, or a preset's name where there are presets"
        case "too_short":
            return f"needs at least {context['min_length']}"
        case "string_too_short":
            return "must not be empty"
        case "invalid_key":
            return "keys are texts: put this one in quotes or take it out"
        case "union_tag_invalid":
            return f"{context['discriminator']} {context['tag']!r} is not one of {context['expected_tags']}"
        case _:
            return fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> set[str]:
    """Names of the fields that may stand at `path`, following nested models, unions and mappings."""
    candidates = [model]
    for part in path:
        below = [each for candidate in candidates for each in _below(candidate, part)]
        # The tag of a discriminated union, or an index, stands in the path without being a key.
        candidates = below or [each for each in candidates if part in _tags(each)] or candidates
    return {name for candidate in candidates for name in candidate.model_fields}


def _below(model: type[BaseModel], part: int | str) -> list[type[BaseModel]]:
    field = model.model_fields.get(str(part))
    return [] if field is None else _models_in(field.annotation)


def _tags(model: type[BaseModel]) -> set[object]:
    return {value for field in model.model_fields.values() for value in get_args(field.annotation)}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
