"""The built-in engine served for the length of a benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """This tree, whatever is installed."""
    others = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *([others] if others else [])])}


@contextmanager
def served(model: str, *arguments: str) -> Iterator[str]:
    """Serve a model on a port of its own; yields the URL once it answers.

    Args:
        model: `embedded` or a folder.
        arguments: further ones of `python -m engine serve`.
    """
    command = [sys.executable, "-m", "engine", "serve", model, "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stderr is not None  # noqa: S101 - a pipe was asked for
        ready = next(json.loads(line) for line in process.stderr if line.startswith('{"event": "ready"'))
        yield f"http://{ready['host']}:{ready['port']}"
    finally:
        process.terminate()
        process.communicate()
