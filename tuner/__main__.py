"""The command line: `kneetune COMMAND`.

Exit codes: 0 done, 1 no answer (the verdict says why), 2 bad input or a disk that does not take it, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from typing import Annotated

import typer

from tuner.commands import bench, clean, doctor, export, knee, plan, report, show, tune
from tuner.inputs import InputError

app = typer.Typer(
    name="kneetune",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


class LogLevel(StrEnum):
    """How much is logged to stderr beside what a command says itself."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@app.callback()
def options(
    log_level: Annotated[LogLevel, typer.Option(help="Log to stderr from this level on.")] = LogLevel.WARNING,
) -> None:
    """Find the throughput knee of an LLM serving engine before a deployment."""
    logging.basicConfig(
        level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )


app.command()(tune.tune)
app.command()(plan.plan)
app.command()(bench.bench)
app.command()(knee.knee)
app.command()(show.show)
app.command()(report.report)
app.command()(export.export)
app.command()(clean.clean)
app.command()(doctor.doctor)


def main() -> None:
    """Run a command; what the user can mend ends in one readable error, not a traceback."""
    try:
        app()
    except InputError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that may not be written
        what = f"{error.filename or 'a file'}: {error.strerror or error}"
        typer.echo(f"error: {what}; see that this user may write there and the disk has room", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
