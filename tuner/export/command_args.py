"""A profile for an engine that is data: its command line, from the same definition that it was measured by."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tuner.export.context import ExportContext, check_exportable


def command_args(context: ExportContext, command: Sequence[str]) -> str:
    """The command as one line for a shell.

    Raises:
        ExportRefusedError: for production without a `resolved` verdict.
    """
    check_exportable(context)
    return shlex.join(command) + "\n"
