"""The built-in engine served for the length of a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def served_embedded(*arguments: str) -> Iterator[str]:
    """Serve the embedded model on a port of its own; yields the URL once it answers.

    Args:
        arguments: further ones of `python -m engine serve`.
    """
    command = [sys.executable, "-m", "engine", "serve", "embedded", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None  # noqa: S101 - a pipe was asked for
        ready = next(json.loads(line) for line in process.stderr if line.startswith('{"event": "ready"'))
        yield f"http://{ready['host']}:{ready['port']}"
    finally:
        process.terminate()
        process.communicate()
