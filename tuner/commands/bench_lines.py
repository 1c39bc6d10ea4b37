"""The answer of `kneetune bench` in the terminal."""

from __future__ import annotations

from pathlib import Path

from tuner import wording
from tuner.answer import CrossChecks
from tuner.bench_answer import BenchAnswer, headline, next_move
from tuner.commands.words import duration_text, estimate_text, milliseconds_text
from tuner.elsewhere.stage import Axis
from tuner.ladder_answer import AnswerVerdict


def answer_lines(answer: BenchAnswer, directory: Path) -> list[str]:
    """Verdict, knee, operating point, fence, what was not known, and what to do."""
    lines = [f"{answer.verdict.value}: {headline(answer)}"]
    if answer.verdict is AnswerVerdict.RESOLVED:
        lines.append(f"bound by    {answer.finding.binding or 'unknown'}")
    lines += [f"because     {sentence}" for sentence in answer.because]
    lines += [f"seen        {signal}" for signal in answer.finding.signals]
    lines += [*([] if answer.axis is Axis.REQUEST_RATE else [_operating(answer)]), *_slo(answer)]
    if answer.safe_rate_rps is not None:
        lines.append(f"safe rate   {wording.safe_rate(answer.safe_rate_rps)}")
    if answer.finding.cautious_load is not None:
        lines.append(
            f"cautious    {answer.axis.text(answer.finding.cautious_load)} have the most throughput per latency (r = 1)"
        )
    lines.append(f"fence       {'unknown' if answer.fence is None else f'{answer.fence}, {answer.fence_source}'}")
    lines.append(f"other rules {_checks(answer.finding.cross_checks)}")
    valid = sum(stage.valid for stage in answer.stages)
    lines.append(f"time        {duration_text(answer.wall_s)}, {len(answer.stages)} stages, {valid} valid")
    lines += [f"warning     {warning}" for warning in answer.warnings]
    return [*lines, f"report      {directory / 'report.html'}", f"next        {next_move(answer)}"]


def _operating(answer: BenchAnswer) -> str:
    point = answer.operating_point
    if point is None:
        return "operating   no stage"
    preemptions = wording.preemptions(point)
    return (
        f"operating   load {point.load}: {estimate_text(point.output_throughput)} tok/s, "
        f"p95 TTFT {milliseconds_text(point.ttft_p95_ms)}, p95 ITL {milliseconds_text(point.itl_p95_ms)}, "
        f"preemptions {preemptions}, KV use {wording.kv_use(point)}"
    )


def _slo(answer: BenchAnswer) -> list[str]:
    if answer.slo is None:
        return []
    limits = f"p95 TTFT {wording.latency(answer.slo.ttft_p95_ms)}, p95 ITL {wording.latency(answer.slo.itl_p95_ms)}"
    return [f"SLO         {limits}{' (derived from load 1)' if answer.slo.derived else ''}"]


def _checks(checks: CrossChecks) -> str:
    said = {
        "asymptotes": checks.asymptote_crossing,
        "USL": checks.usl,
        "Kneedle": checks.kneedle,
        "10 % a doubling": checks.ten_percent_per_doubling,
    }
    return ", ".join(f"{name} {'none' if load is None else wording.number(load)}" for name, load in said.items())
