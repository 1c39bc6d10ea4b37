"""The built-in engine served for the length of a benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """This tree, whatever is installed."""
    others = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *([others] if others else [])])}


@contextmanager
def served(model: str, *arguments: str) -> Iterator[str]:
    """Serve a model on a port of its own; yields the URL once it answers. What it says goes to standard error.

    Args:
        model: `embedded` or a folder.
        arguments: further ones of `python -m engine serve`.

    Raises:
        RuntimeError: with the last it said, where it does not come up.
    """
    command = [sys.executable, "-m", "engine", "serve", model, "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None  # noqa: S101 - a pipe was asked for
        # A pipe that nobody empties stops what writes into it.
        rest = threading.Thread(target=sys.stderr.writelines, args=(process.stderr,))
        try:
            url = _url(process.stderr)
            rest.start()
            yield url
        finally:
            process.terminate()
            if rest.ident is not None:
                rest.join()


def _url(said: Iterable[str]) -> str:
    """Where it answers, as soon as it says so."""
    line = "nothing"
    for line in said:
        if line.startswith('{"event": "ready"'):
            ready = json.loads(line)
            return f"http://{ready['host']}:{ready['port']}"
        sys.stderr.write(line)
    raise RuntimeError(f"the engine did not start; the last it said: {line.strip()}")
