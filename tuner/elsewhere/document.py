"""JSON that others wrote: values by key, with errors that name the file, the key and what would do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from tuner.inputs import InputError


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Whether a JSON value has keys."""
    return isinstance(value, dict)


@dataclass(frozen=True, slots=True)
class Document:
    """An object of a JSON file and the place it stands at."""

    where: str
    data: Mapping[str, object]

    def at(self, key: str) -> Document:
        """The object below `key`.

        Raises:
            InputError: if there is none.
        """
        value = self.data.get(key)
        if not is_object(value):
            raise InputError(f"{self.where}: {key!r} is missing, or not an object")
        return Document(f"{self.where}: {key}", value)

    def objects(self, key: str) -> list[Document]:
        """The list of objects below `key`, each knowing its number from 0.

        Raises:
            InputError: if there is no such list.
        """
        value = self.data.get(key)
        if not isinstance(value, list):
            raise InputError(f"{self.where}: {key!r} is missing, or not a list")
        found = [Document(f"{self.where}: {key}[{i}]", item) for i, item in enumerate(value) if is_object(item)]
        if len(found) != len(value):
            raise InputError(f"{self.where}: {key!r} holds something that is not an object")
        return found

    def text(self, key: str) -> str | None:
        """A text, or None."""
        value = self.data.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str, *, otherwise: str = "") -> float:
        """A number that must be there; NaN and infinities pass.

        Args:
            otherwise: what would do, for the error.

        Raises:
            InputError: if it is not.
        """
        value = self.maybe(key)
        if value is None:
            raise InputError(f"{self.where}: {key!r} is missing{otherwise and f': {otherwise}'}")
        return value

    def maybe(self, key: str) -> float | None:
        """A number where there is one; None, or not a finite one, is unknown.

        Raises:
            InputError: if something else stands there.
        """
        value = self.data.get(key)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self.where}: {key} is {value!r}, not a number")
        return float(value)

    def count(self, key: str) -> int | None:
        """A count where there is one."""
        value = self.maybe(key)
        return None if value is None else round(value)


def read_json(path: Path) -> list[object]:
    """Everything in a JSON or JSON-lines file: one value, or one a line.

    Raises:
        InputError: if it cannot be read as either.
    """
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if not text.strip():
        raise InputError(f"{path}: empty")
    try:
        return [json.loads(text)]
    except (json.JSONDecodeError, RecursionError) as error:
        fault = error
    values = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            values += [json.loads(line)] if line.strip() else []
        except (json.JSONDecodeError, RecursionError):
            where = f"line {number} is no JSON value of its own either" if values else fault
            raise InputError(f"{path}: neither JSON nor JSON lines: {where}") from None
    return values
