"""A YAML file of keys and values, as people write settings."""

from __future__ import annotations

from pathlib import Path

import yaml

from engine.config import ConfigError


def read_mapping(path: Path, name: str) -> dict[object, object]:
    """Read a file's keys and values; an empty file has none.

    Args:
        name: what the file is, which begins the message of an error.

    Raises:
        ConfigError: for a file that cannot be read, anything but keys and values, and a key that stands twice, of which
            YAML would take the last.
    """
    try:
        loader = _NoKeyTwice(path.read_text(encoding="utf-8"))
        loaded = loader.get_single_data()
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no text, no such date
        raise ConfigError(f"{name} cannot be read: {error}") from error
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
