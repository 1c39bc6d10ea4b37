"""The built-in engine on the GPU at hand: kernels, steps, tokens/s, a ladder with its knee, and where the memory goes.

    python benchmarks/gpu.py [--out FOLDER] [--smoke]

One command, at most eight minutes on one GPU, nothing downloaded, run from the source tree. It needs torch >= 2.11,
triton >= 3.6, transformers >= 5.17, aiohttp, pandas, typer, rich and prometheus-client. Where typer brings no pydantic
(newer ones do), bring its wheels along: pydantic, pydantic-core (2 MB, compiled for the Python there),
annotated-types, typing-inspection. With nvidia-ml-py (pure Python) the driver's own memory figures stand beside the
engine's; with uvloop the load generator takes half the CPU.

Each part is a process of its own, so that a kernel that faults ends nobody else's work. `results.json` has every figure
with card and versions, `results.md` the tables. `--smoke` runs all of it on a CPU with tiny shapes: the parts work, and
no figure means anything.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from served import ROOT, environment

LIMIT_S = 480.0
"""Of all parts together; one that has no time left is not begun. Unit: seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something to measure by `measure` of a module beside this one, which takes `smoke` and returns rows by table."""

    module: str
    function: str
    most_s: float


PARTS = {
    "floors": Part(module="gpu_kernels", function="floors", most_s=60.0),
    "kernels": Part(module="gpu_kernels", function="kernels", most_s=150.0),
    "small": Part(module="gpu_engine", function="small", most_s=150.0),
    "agreement": Part(module="gpu_engine", function="agreement", most_s=90.0),
    "large": Part(module="gpu_engine", function="large", most_s=200.0),
    "ladder": Part(module="gpu_ladder", function="ladder", most_s=180.0),
}

Rows = list[dict[str, Any]]


def main(
    *,
    out: Annotated[Path, typer.Option(help="Where results.json and results.md go.")] = Path("gpu-results"),
    smoke: Annotated[bool, typer.Option(help="On a CPU, with shapes that mean nothing.")] = False,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure all parts, each in a process of its own."""
    if part is not None:
        _measure(part, out, smoke=smoke)
        return
    if not (smoke or _has_gpu()):
        print("torch finds no GPU: --smoke runs all of it on a CPU", file=sys.stderr)
        raise typer.Exit(2)
    out.mkdir(parents=True, exist_ok=True)
    began_s, tables, failures = time.perf_counter(), {}, {}
    for name in PARTS:
        left_s = LIMIT_S - (time.perf_counter() - began_s)
        rows = _in_a_process(name, out, left_s, smoke=smoke)
        if isinstance(rows, str):
            failures[name] = rows
            print(f"{name}: FAILED: {rows}", file=sys.stderr)
        else:
            tables |= rows
            print(f"{name}: done after {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
    found = {"card": _card(smoke=smoke), "smoke": smoke, "wall_s": round(time.perf_counter() - began_s, 1)}
    found |= {"tables": tables, "failures": failures}
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "results.md").write_text("\n".join(_markdown(found)) + "\n")
    print(out / "results.md")
    raise typer.Exit(1 if failures else 0)


def _in_a_process(name: str, out: Path, left_s: float, *, smoke: bool) -> dict[str, Rows] | str:
    """The tables of one part, or why there are none."""
    most_s = min(PARTS[name].most_s, left_s)
    if most_s <= 0:
        return f"not begun: the {LIMIT_S:g} s were over"
    command = [sys.executable, __file__, "--part", name, "--out", str(out / f"{name}.json")]
    shown = {"CUDA_VISIBLE_DEVICES": ""} if smoke else {}
    log = out / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, *(["--smoke"] if smoke else [])],
            env=environment() | shown,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(most_s)
        except subprocess.TimeoutExpired:
            return f"not done after {most_s:.0f} s, see {log}"
        finally:
            # With what it has started: a server that stays keeps the GPU from the parts that follow.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if exit_code != 0:
        said = [line for line in log.read_text(errors="replace").splitlines() if line and not line[0].isspace()]
        return f"{said[-1] if said else 'said nothing'} (exit code {exit_code}, see {log})"
    result = out / f"{name}.json"
    tables: dict[str, Rows] = json.loads(result.read_text())
    result.unlink()
    return tables


def _measure(name: str, out: Path, *, smoke: bool) -> None:
    sys.path.insert(0, str(ROOT))
    part = PARTS[name]
    tables = getattr(importlib.import_module(part.module), part.function)(smoke=smoke)
    out.write_text(json.dumps(tables))


def _has_gpu() -> bool:
    """Whether torch finds one; nothing is taken of it yet."""
    import torch

    return torch.cuda.is_available()


def _card(*, smoke: bool) -> dict[str, object]:
    """What it was measured on, and with what."""
    import torch
    import transformers
    import triton

    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "CUDA": torch.version.cuda}
    versions |= {"triton": triton.__version__, "transformers": transformers.__version__}
    if smoke:
        return {"device": "cpu", "versions": versions}
    card = torch.cuda.get_device_properties(0)
    return {
        "device": card.name,
        "memory_bytes": card.total_memory,
        "sms": card.multi_processor_count,
        "capability": f"{card.major}.{card.minor}",
        "versions": versions,
    }


def _markdown(found: dict[str, Any]) -> list[str]:
    card, versions = found["card"], found["card"]["versions"]
    lines = [f"# {card['device']}", "", ", ".join(f"{name} {version}" for name, version in versions.items()), ""]
    if found["smoke"]:
        lines += ["**A smoke run on a CPU: no figure here means anything.**", ""]
    for name, rows in found["tables"].items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += [f"## {name}", "", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
        lines += [f"| {' | '.join(_cell(row.get(column)) for column in columns)} |" for row in rows]
        lines.append("")
    lines += [f"- {name}: **failed**: {why}" for name, why in found["failures"].items()]
    return lines


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
