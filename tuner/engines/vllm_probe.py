"""Run by the Python that has vLLM: which flags this version knows, and what it makes of a command line.

`python -c SCRIPT --model M …` writes JSON objects, a line each, to stdout: `{"version": …, "flags": […]}`, then
`{"config": …}` as `/server_info` shows it, with whatever is left unset at the default that a server on this machine
would take, or `{"error": …}`. No weights are read and nothing is started: it costs vLLM's own imports.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

_PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Where the parser of `vllm serve` is made, newest first."""


def _module(*names: str) -> Any:
    """The first of the names that this version has."""
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return importlib.import_module(names[-1])


def _refuse(message: str) -> None:
    raise ValueError(message)


def main(arguments: list[str]) -> None:
    """Answer on the real stdout; whatever vLLM prints meanwhile goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    import pydantic
    import vllm
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    parser = _module("vllm.utils.argparse_utils", "vllm.utils").FlexibleArgumentParser()
    parser = _module(*_PARSERS).make_arg_parser(parser)
    flags = sorted(flag for action in parser._actions for flag in action.option_strings)  # noqa: SLF001
    answer(version=vllm.__version__, flags=flags)
    parser.error = _refuse
    try:
        known, _ = parser.parse_known_args(arguments)
        config = AsyncEngineArgs.from_cli_args(known).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the answer)
        answer(error=f"{type(error).__name__}: {error}")
        return
    answer(config=pydantic.TypeAdapter(VllmConfig).dump_python(config, mode="json", fallback=str))


if __name__ == "__main__":
    main(sys.argv[1:])
