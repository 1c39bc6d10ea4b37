"""`kneetune bench`: one ladder on a server that is already running."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from tuner.bench import run_bench, write_answer
from tuner.bench_answer import BenchAnswer
from tuner.bench_options import BenchOptions
from tuner.commands.bench_lines import answer_lines
from tuner.commands.bench_progress import BenchProgress
from tuner.commands.options import duration_s, limit_ms, loads_in, rates_in
from tuner.inputs import InputError, validated
from tuner.ladder_answer import AnswerVerdict
from tuner.load.connection import Endpoint
from tuner.load.workload import Workload, load_workload, read_workload
from tuner.stopping import StopOnInterrupt
from tuner.store import claim

DEFAULT_WORKLOAD = "chat"
MOST_SEED = 2**31
"""A fresh seed is drawn below it."""

SHORTEST_STAGE_S = 1.0
"""No stage is measured for less, unless less was asked for. Unit: seconds."""


def bench(
    url: Annotated[str, typer.Argument(help="Where it listens, such as http://127.0.0.1:8000.", metavar="URL")],
    model: Annotated[str | None, typer.Option(help="The name it serves the model under, where it has several.")] = None,
    workload: Annotated[str, typer.Option(help="A workload preset, such as `chat-short`, or a YAML file.")] = (
        DEFAULT_WORKLOAD
    ),
    max_load: Annotated[int, typer.Option(help="Most concurrent requests to try.")] = 1024,
    loads: Annotated[str | None, typer.Option(help="Measure just these loads: 1,4,16.")] = None,
    rates: Annotated[str | None, typer.Option(help="Measure just these rates, in requests/s: 1,2,4.5.")] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(help="Look for the safe rate too, requests coming `poisson` or `constant`ly."),
    ] = None,
    slo_ttft_p95: Annotated[str | None, typer.Option(help="Limit on p95 time to first token, such as 500ms.")] = None,
    slo_itl_p95: Annotated[str | None, typer.Option(help="Limit on p95 inter-token latency, such as 50ms.")] = None,
    time: Annotated[
        str,
        typer.Option(
            help="Longest a stage is measured, and warmed up, unless its p95s need more: three times as long where "
            "requests are slow; at a rate, until 120 requests came (10 minutes at the most)."
        ),
    ] = "30s",
    fence: Annotated[int | None, typer.Option(help="The server's max_num_seqs, where it does not tell.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seeds every prompt; a fresh one by default.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the server's API key.", metavar="NAME")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write; runs/bench-HOST-PORT if not given.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON, progress on stderr.")] = False,
) -> None:
    """Climb a load ladder on a running server and say where its knee is.

    Starts and stops no engine. Ctrl-C finishes the stage and answers from what there is; once more, or SIGTERM, at
    once. Exit codes: 0 found what was asked for, 1 did not, 2 bad input, 130 interrupted before it was found.
    """
    for option, limit in (("--slo-ttft-p95", slo_ttft_p95), ("--slo-itl-p95", slo_itl_p95)):
        limit_ms(option, limit)
    options = _options(
        model=model,
        workload=workload,
        max_load=max_load,
        loads=loads_in("--loads", loads),
        rates=rates_in("--rates", rates),
        arrivals=arrivals,
        slo_ttft_p95=slo_ttft_p95,
        slo_itl_p95=slo_itl_p95,
        measure=_measure(time),
        fence=fence,
        seed=secrets.randbelow(MOST_SEED) if seed is None else seed,
        command=shlex.join(["kneetune", *sys.argv[1:]]),
    )
    endpoint = _endpoint(url, api_key_env)
    directory = _directory(out, endpoint)
    try:
        with BenchProgress() as progress, StopOnInterrupt(progress.note) as stop:
            answer = run_bench(endpoint, options, directory, progress, stop_requested=lambda: stop.requested)
    except KeyboardInterrupt:
        _remove_if_empty(directory)
        typer.echo("interrupted before anything was measured", err=True)
        raise typer.Exit(130) from None
    except InputError:
        _remove_if_empty(directory)
        raise
    _write(directory, answer)
    typer.echo(answer.model_dump_json(indent=1) if json else "\n".join(answer_lines(answer, directory)))
    raise typer.Exit(_exit_code(answer))


def _options(**given: object) -> BenchOptions:
    return validated(BenchOptions, given | {"workload": _workload(str(given["workload"]))}, where="kneetune bench")


def _measure(time: str) -> dict[str, str]:
    most_s = duration_s("--time", time)
    return {"min_time": f"{min(SHORTEST_STAGE_S, most_s):g}s", "max_time": time, "max_warm_up": time}


def _workload(name: str) -> Workload:
    """A preset by its name, or a YAML file."""
    return read_workload(Path(name)) if name.endswith((".yaml", ".yml")) else load_workload(name)


def _endpoint(url: str, api_key_env: str | None) -> Endpoint:
    """The address with the key to it.

    Raises:
        InputError: for another scheme than http, credentials in the address, or a variable that holds no key.
    """
    if "@" in urlsplit(url).netloc:
        raise InputError("the address holds a user name or a password, which would be shown: use --api-key-env NAME")
    try:
        endpoint = Endpoint.from_url(url)
    except ValueError as error:
        raise InputError(str(error)) from None
    if api_key_env is None:
        return endpoint
    key = os.environ.get(api_key_env, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise InputError(f"--api-key-env {api_key_env}: this variable is not set, or holds no key of printable ASCII")
    return endpoint.with_key(key)


def _directory(out: Path | None, endpoint: Endpoint) -> Path:
    try:
        if out is None:
            return claim(Path("runs"), f"bench-{endpoint.host.replace(':', '-')}-{endpoint.port}")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out or 'runs'}: cannot make a directory here: {error.strerror}") from None
    if any(out.iterdir()):
        raise InputError(f"{out} is not empty: name a new directory, or leave --out away")
    return out


def _remove_if_empty(directory: Path) -> None:
    if not any(directory.iterdir()):
        directory.rmdir()


def _write(directory: Path, answer: BenchAnswer) -> None:
    from reports.bench import write_bench_report

    write_answer(directory, answer)
    write_bench_report(directory / "report.html", answer)


def _exit_code(answer: BenchAnswer) -> int:
    """0 where what was asked for was found, a knee or every rate; else 130 where it was cut off, 1 where it was not."""
    if answer.verdict in (AnswerVerdict.RESOLVED, AnswerVerdict.MEASURED):
        return 0
    return 130 if answer.interrupted else 1
