"""A YAML file of keys and values, as people write settings."""

from __future__ import annotations

from pathlib import Path

import yaml

from engine.config import ConfigError

_SHOWN = 60
"""Characters of a faulty value that an error shows."""


def read_mapping(path: Path, name: str) -> dict[object, object]:
    """Read a file's keys and values; an empty file has none.

    Args:
        name: what the file is, which begins the message of an error.

    Raises:
        ConfigError: for a file that cannot be read, anything but keys and values, and a key that stands twice, of which
            YAML would take the last.
    """
    try:
        loaded = _NoKeyTwice(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}: {path}; name a YAML file") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"{name} cannot be read{place}: {error.problem or error.context}; mend it there") from error
    except RecursionError as error:
        raise ConfigError(f"{name} cannot be read: lists and mappings are nested too deeply; flatten them") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}; save it as plain UTF-8 text") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{name} must hold keys and values, not a {type(loaded).__name__}")
    return loaded


class _NoKeyTwice(yaml.SafeLoader):
    """Knows YAML's own types only."""

    def compose_mapping_node(self, anchor: dict[object, yaml.Node]) -> yaml.MappingNode:
        """Keys and values, before any is made into an object."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:  # noqa: FBT001, FBT002 - PyYAML's own
        """A node's value; PyYAML lets the errors of its own parsing through for a value that is not what it claims."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):
            problem = f"{str(node.value)[:_SHOWN]!r} is not a {node.tag.rpartition(':')[2]} that can be read"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None
