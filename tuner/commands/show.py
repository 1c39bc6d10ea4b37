"""`kneetune show`: a run's answer in the terminal."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from tuner import wording
from tuner.analysis.standing import standing
from tuner.answer import Profile, Recommendation, RunVerdict
from tuner.commands.words import duration_text, estimate_text, milliseconds_text
from tuner.store import RunStore
from tuner.wording import config_text


def show(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    json: Annotated[bool, typer.Option("--json", help="Print recommendation.json.")] = False,
) -> None:
    """Show a run's answer: verdict, knee, both profiles, what was gained, what to do next; or how far it has come."""
    store = RunStore.open(run)
    if not store.has_answer() and not json:
        for line in standing_lines(store):
            typer.echo(line)
        raise typer.Exit(1)
    recommendation = store.recommendation()
    print_answer(recommendation, store.path, as_json=json)
    raise typer.Exit(0 if recommendation.verdict is RunVerdict.RESOLVED else 1)


def print_answer(recommendation: Recommendation, path: Path, *, as_json: bool) -> None:
    """Write the answer to stdout, in ten lines or as JSON."""
    if as_json:
        typer.echo(recommendation.model_dump_json(indent=1))
        return
    for line in answer_lines(recommendation, path):
        typer.echo(line)


def answer_lines(recommendation: Recommendation, path: Path) -> list[str]:
    """The answer, and the next command to type."""
    lines = [f"{recommendation.verdict.value}: {recommendation.reason}"]
    knee = recommendation.knee
    if knee is not None and knee.load is not None:
        between = "" if knee.interval is None else f" (between {knee.interval[0]:g} and {knee.interval[1]:g})"
        lines.append(f"knee        {knee.load:g} concurrent requests{between}, bound by {knee.binding or 'unknown'}")
    lines += _diagnosis_lines(recommendation)
    lines += [_profile_line(profile) for profile in (recommendation.production, recommendation.protective) if profile]
    baseline = recommendation.baseline
    if baseline is not None and baseline.throughput_gain is not None:
        gain = baseline.throughput_gain
        sure = "" if gain.low is None else f" (between {gain.low:.2f} and {gain.high:.2f})"
        lines.append(f"vs defaults throughput x {gain.value:.2f}{sure} at the same load, re-measured in turn")
    if recommendation.production is not None:
        lines += [f"            {sentence}" for sentence in recommendation.production.evidence[-2:]]
    if recommendation.protective is not None and recommendation.protective.burst is not None:
        burst = recommendation.protective.burst
        held = "held" if burst.passed else "NOT held"
        figures = f"p95 ITL {milliseconds_text(burst.itl_p95_ms)}, p95 TTFT {milliseconds_text(burst.ttft_p95_ms)}"
        reasons = f" ({'; '.join(burst.reasons)})" if burst.reasons else ""
        lines.append(f"burst       {burst.load} long prompts at once on protective: {held}, {figures}{reasons}")
    if recommendation.safe_rate_rps is not None:
        lines.append(f"safe rate   {wording.safe_rate(recommendation.safe_rate_rps)} (Poisson arrivals)")
    lines += _capacity_lines(recommendation)
    time = recommendation.time
    share = 100 * time.overhead_s / time.wall_s if time.wall_s > 0 else 0.0
    lines.append(
        f"time        {duration_text(time.wall_s)}: starts {duration_text(time.start_s)}, "
        f"measuring {duration_text(time.measure_s)}, overhead {duration_text(time.overhead_s)} ({share:.1f} %)"
    )
    lines += [f"warning     {warning}" for warning in recommendation.warnings]
    return [*lines, f"report      {path / 'report.html'}", *_next(recommendation, path)]


def _diagnosis_lines(recommendation: Recommendation) -> list[str]:
    """Why the knee is there, and which parameters can still help."""
    diagnosis = recommendation.diagnosis
    if diagnosis is None or not diagnosis.advice:
        return []
    helps = [each for each in diagnosis.advice if each.effect == "can_help"]
    said = "; ".join(f"{each.parameter} {each.change}" for each in helps) or "none of those that are known"
    return [f"because     {'; '.join(diagnosis.evidence)}", f"can help    {said}"]


def _capacity_lines(recommendation: Recommendation) -> list[str]:
    """What a replica holds, and how many an expected load takes."""
    capacity = recommendation.capacity
    if capacity is None:
        return []
    more = [capacity.reason] if capacity.reason else []
    more += [wording.cost(capacity)] if wording.cost(capacity) else []
    return [f"capacity    {wording.held(capacity)}", *(f"            {line}" for line in more)]


def standing_lines(store: RunStore) -> list[str]:
    """How far a run without an answer has come, and how to go on where nobody is writing it."""
    now = standing(store.trials(), store.slo())
    lines = [f"no answer yet: {now.num_measured} launches measured, {now.num_refused} settings refused before launch"]
    lines += [f"failed      {kind.value}: {count}" for kind, count in now.failures.items()]
    if now.best is not None:
        trial, stage = now.best
        lines.append(
            f"best so far {config_text(trial.config)}: at load {stage.load} "
            f"{estimate_text(stage.output_throughput)} tok/s, p95 TTFT {milliseconds_text(stage.ttft_p95_ms)}, "
            f"p95 ITL {milliseconds_text(stage.itl_p95_ms)} (trial {trial.number}, not re-measured yet)"
        )
    if store.is_locked():
        numbers = [str(asked.number) for asked in store.unfinished_trials()]
        at_work = "between launches" if not numbers else f"in trial {', '.join(numbers)}"
        return [*lines, f"running     {at_work}"]
    return [*lines, f"next        kneetune tune --resume {shlex.quote(str(store.path))}"]


def _profile_line(profile: Profile) -> str:
    point = profile.operating_point
    return (
        f"{profile.name:<11} {config_text(profile.config)}: at load {point.load} "
        f"{estimate_text(point.output_throughput)} tok/s, p95 TTFT {milliseconds_text(point.ttft_p95_ms)}, "
        f"p95 ITL {milliseconds_text(point.itl_p95_ms)}"
    )


def _next(recommendation: Recommendation, path: Path) -> list[str]:
    if recommendation.production is not None:
        engine = recommendation.provenance.engine
        if engine not in ("builtin", "vllm"):
            return [f"next        start the line in {path / 'export' / 'production.args.txt'}"]
        on_vllm = engine == "vllm"
        starts = ["vllm"] if on_vllm else [sys.executable, "-m", "engine"]
        config = path / "export" / f"production.{'vllm' if on_vllm else 'engine'}.yaml"
        return [f"next        {shlex.join([*starts, 'serve', '--config', str(config)])}"]
    return [f"next        read {path / 'report.html'} for why, mend that, and tune again"]
