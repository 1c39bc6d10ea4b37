"""Run by the Python that has vLLM: what its own parser makes of command lines. Starts no engine.

A JSON list of argument lists on stdin; a JSON object of engine arguments for each, a line each, on stdout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys


def main() -> None:
    """Answer on the real stdout; what vLLM prints meanwhile goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    for line in json.load(sys.stdin):
        told = parser.parse_args(line)
        told.model = told.model_tag if getattr(told, "model_tag", None) else told.model
        arguments = AsyncEngineArgs.from_cli_args(told)
        values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
        json.dump(values, answers, default=str)
        answers.write("\n")


if __name__ == "__main__":
    main()
