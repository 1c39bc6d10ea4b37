"""Two tools that measure one engine, in turn: what each reports, and whether they agree."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal, TypeAlias

import pandas as pd
import yaml
from served import environment

from tuner.measure.latency import student_t_975

PROMPT_TOKENS, OUTPUT_TOKENS = (32, 96), (16, 48)
"""Least and most, all between them equally likely. Unit: tokens."""


@dataclass(frozen=True, slots=True)
class Load:
    """Users who wait for their answers, or Poisson arrivals a second."""

    arrivals: Literal["users", "requests/s"]
    value: float

    def __str__(self) -> str:
        return f"{self.value:g} {self.arrivals}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One stage as a tool reports it, and the engine's own mean of TTFT meanwhile. NaN: it does not say."""

    output_throughput: float
    request_throughput: float = math.nan
    in_flight: float
    ttft_p50_ms: float
    itl_p50_ms: float = math.nan
    tpot_p50_ms: float
    ttft_mean_ms: float
    engine_ttft_mean_ms: float = math.nan
    prompt_tokens: float = math.nan
    output_tokens: float = math.nan

    @property
    def throughput_per_request(self) -> float:
        """Tokens/s of each request really in flight: a tool that holds fewer than asked gets fewer in all."""
        return self.output_throughput / self.in_flight


Measure: TypeAlias = Callable[[Load, Path, int], Figures]
"""Measures a load into an empty folder, in the round of that number."""

Found: TypeAlias = dict[tuple[str, Load], list[Figures]]


def interleaved(url: str, tools: Mapping[str, Measure], loads: Sequence[Load], *, rounds: int, folder: Path) -> Found:
    """Every tool at every load in every round; who goes first changes from round to round."""
    found: Found = {}
    for number in range(rounds):
        for load in loads:
            for tool in list(tools)[:: 1 if number % 2 == 0 else -1]:
                out = folder / f"{tool}-{load.arrivals[0]}{load.value:g}-{number}"
                out.mkdir()
                before_s, before = _engine_ttfts(url)
                figures = tools[tool](load, out, number)
                after_s, after = _engine_ttfts(url)
                figures = replace(figures, engine_ttft_mean_ms=1e3 * (after_s - before_s) / (after - before))
                found.setdefault((tool, load), []).append(figures)
                print(f"round {number}, {load}, {tool}: {figures}", file=sys.stderr, flush=True)
    return found


def _engine_ttfts(url: str) -> tuple[float, float]:
    """Sum and count of the engine's own times to first token since its start."""
    with urllib.request.urlopen(f"{url}/metrics") as page:  # noqa: S310 - our own server
        lines = [line for line in page.read().decode().splitlines() if line.startswith("vllm:time_to_first_token")]
    total_s, count = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:time_to_first_token_seconds_{name}"))
        for name in ("sum", "count")
    )
    return total_s, count


def kneetune_bench(url: str, *, seconds: int) -> Measure:
    """Our own tool on that server."""

    def measure(load: Load, out: Path, _: int) -> Figures:
        lengths = [{"kind": "uniform", "low": low, "high": high} for low, high in (PROMPT_TOKENS, OUTPUT_TOKENS)]
        workload = out / "workload.yaml"
        workload.write_text(yaml.safe_dump(dict(zip(("input_len", "output_len"), lengths, strict=True))))
        at = ["--loads", f"{load.value:g}"] if load.arrivals == "users" else ["--rates", f"{load.value:g}"]
        command = [sys.executable, "-m", "tuner", "bench", url, "--workload", str(workload), *at]
        command += ["--time", f"{seconds}s", "--out", str(out / "bench")]
        with (out / "output.txt").open("wb") as log:
            subprocess.run(command, check=False, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        stage = json.loads((out / "bench" / "stages.jsonl").read_text().splitlines()[-1])
        if not stage["valid"]:
            print(f"ours is invalid: {stage['invalid_reasons']}", file=sys.stderr)
        # All requests, as the engine counts all: those of the warm-up too.
        requests = pd.read_parquet(out / "bench" / "requests.parquet")
        return Figures(
            output_throughput=stage["output_throughput"]["value"],
            request_throughput=stage["request_throughput_rps"],
            in_flight=stage["mean_in_flight"],
            ttft_p50_ms=stage["ttft_p50_ms"]["value"],
            itl_p50_ms=stage["itl_p50_ms"]["value"],
            tpot_p50_ms=stage["tpot_p50_ms"]["value"],
            ttft_mean_ms=1e3 * float((requests["first_token_s"] - requests["intended_s"]).mean()),
            prompt_tokens=stage["mean_prompt_tokens"],
            output_tokens=stage["mean_output_tokens"],
        )

    return measure


def table(found: Found, loads: Sequence[Load]) -> Iterator[str]:
    """A line a load and figure: the mean of the rounds with its 95 % interval, and the ratio of a round's pairs."""
    first, second = dict.fromkeys(tool for tool, _ in found)
    yield f"| load | figure | {first} | {second} | ratio |"
    yield "| --- | --- | --- | --- | --- |"
    for load in loads:
        for name in (*(each.name for each in fields(Figures)), "throughput_per_request"):
            ours, theirs = ([getattr(seen, name) for seen in found[tool, load]] for tool in (first, second))
            if not any(map(math.isnan, (*ours, *theirs))):
                ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
                yield f"| {load} | {name} | {_interval(ours)} | {_interval(theirs)} | {_interval(ratios)} |"


def _interval(values: Sequence[float]) -> str:
    """The mean with the half width of its 95 % interval, by Student's t over the rounds."""
    mean = fmean(values)
    if len(values) < 2:
        return f"{mean:.4g}"
    half = student_t_975(len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean:.4g} ± {half:.2g}"
