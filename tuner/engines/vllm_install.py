"""What the vLLM that a job names is: asked of its environment's own Python, once a job, before anything is launched."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.engine_config import TunedParameters
from tuner.engines import vllm_probe
from tuner.engines.vllm_config import device_of, parameters
from tuner.engines.vllm_log import root_cause
from tuner.inputs import InputError
from tuner.parameters import SearchedValues

ANSWER_S = 300.0
"""Longest the question may take: it costs vLLM's own imports, from a cold disk. Unit: seconds."""

_PYTHON = re.compile(r"(?:^|/)(?:python|pypy)[\d.]*$")
_SHEBANG = re.compile(r"#!\s*(?:/usr/bin/env\s+)?(\S+)")
_LONG_SHEBANG = re.compile(r"^'''exec' \"?(/[^\"\n]+?)\"? \"\$0\"", re.MULTILINE)
"""Where a path is too long for the first line, installers put it into the second, for the shell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of which vLLM."""

    command: tuple[str, ...]
    flags: frozenset[str]
    """All that a launch will use: each must be known."""

    arguments: tuple[str, ...]
    """Those that stay the same through the job: the rest is left to its own choice."""

    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What an installed vLLM said of itself."""

    version: str
    device: str
    defaults: SearchedValues
    """What it takes for the three that are always searched, where it is told only the question's arguments."""

    flags: frozenset[str]
    """All that its command line knows."""


def flags_of(arguments: Iterable[str]) -> frozenset[str]:
    """The flags among command-line arguments, as vLLM's parser knows them: `--a_b.c=1` is a key of `--a-b`."""
    names = (argument.partition("=")[0].partition(".")[0] for argument in arguments if argument.startswith("--"))
    return frozenset(name.replace("_", "-") for name in names)


@functools.lru_cache(maxsize=8)
def ask(question: Question) -> Told:
    """Ask the Python behind a command what vLLM it has, which flags that knows, and what it takes by itself.

    Raises:
        InputError: where the command or its Python is not found, vLLM does not import, does not know a flag, or refuses
            the arguments, naming which and the version.
    """
    environment = dict(question.environment)
    python = python_of(question.command[0], path=environment.get("PATH"))
    script = Path(vllm_probe.__file__).read_text(encoding="utf-8")
    try:
        answer = subprocess.run(
            [python, "-c", script, *question.arguments],
            env=environment,
            cwd=Path(python).parent,  # what stands where kneetune is run is not imported
            capture_output=True,
            check=False,
            timeout=ANSWER_S,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{question.command[0]}: vLLM did not say what it is within {ANSWER_S:g} s") from None
    said: dict[str, Any] = {}
    for line in answer.stdout.splitlines():
        said |= json.loads(line)
    return told(question, said, answer.stderr)


def told(question: Question, said: dict[str, Any], log: str) -> Told:
    """Judge what the probe said.

    Raises:
        InputError: as `ask` does.
    """
    command = question.command[0]
    if "flags" not in said:
        raise InputError(f"{command}: there is no vLLM that works: {root_cause(log) or 'it gave no reason'}")
    vllm = f"the vLLM {said['version']} of {command}"
    unknown = sorted(question.flags - set(said["flags"]))
    if unknown:
        raise InputError(
            f"{vllm} does not know {', '.join(unknown)}: leave out what this version does not have, or name another "
            "(engine.command)"
        )
    if "config" not in said:
        reason = said.get("error") or root_cause(log) or "it gave no reason"
        raise InputError(f"{vllm} refuses the job before any setting is tried: {reason}")
    in_force = parameters(said["config"])
    return Told(
        version=said["version"],
        device=device_of(said["config"]),
        defaults=SearchedValues.model_validate({name: in_force[name] for name in TunedParameters.model_fields}),
        flags=frozenset(said["flags"]),
    )


def python_of(command: str, *, path: str | None) -> str:
    """The Python that a command runs in: itself, or the one that its first line names.

    Raises:
        InputError: where there is no such command, or it is no script of a Python.
    """
    found = shutil.which(command, path=path)
    if found is None:
        raise InputError(f"{command}: there is no such command; name vLLM's own: engine.command: [/path/to/bin/vllm]")
    if _PYTHON.search(found):
        return found
    with Path(found).open("rb") as file:
        head = file.read(1024).decode(errors="replace")
    named = _LONG_SHEBANG.search(head) or _SHEBANG.match(head)
    python = None if named is None else shutil.which(named[1], path=path)
    if python is None or not _PYTHON.search(python):
        raise InputError(
            f"{found} is no script of a Python that could be asked which vLLM it has: name the script `vllm` of its "
            "environment, or that Python (engine.command: [/path/to/python, -m, vllm.entrypoints.cli.main])"
        )
    return python
