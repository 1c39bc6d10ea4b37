"""YAML as people write it: plain data, and errors that name the line and what to mend there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_SHOWN = 60
"""Characters of a faulty value that an error shows."""


class YamlError(ValueError):
    """A text that is not YAML as we take it; the message says where, and what would do."""


def plain_data(text: str) -> object:
    """The text as mappings, lists, texts and numbers.

    Raises:
        YamlError: for anything that is not YAML, a value that is not of the type it claims, or a key that stands twice,
            of which YAML would take the last.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise YamlError(f"not YAML{place}: {error.problem or error.context}; mend it there") from None
    except yaml.YAMLError as error:  # a character that no text may hold
        raise YamlError(f"not YAML: {' '.join(str(error).split())}; save it as plain text") from None
    except RecursionError:
        raise YamlError("not YAML that can be read: lists and mappings are nested too deeply; flatten them") from None


def read_plain_data(path: Path) -> object:
    """A file's data.

    Raises:
        OSError: if it cannot be read.
        YamlError: as `plain_data`, and for a file that is not UTF-8.
    """
    try:
        return plain_data(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise YamlError(f"not text: byte {error.start} is not UTF-8; save the file as UTF-8") from None


class _Loader(yaml.SafeLoader):
    """Knows YAML's own types only."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Keys and values, before any is made into an object."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - PyYAML's own
        """A node's value; PyYAML lets the errors of its own parsing through for a value that is not what it claims."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):
            kind = node.tag.rpartition(":")[2]
            problem = f"{_shown(node.value)} is not a {kind} that can be read"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
