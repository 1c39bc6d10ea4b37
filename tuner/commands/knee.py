"""`kneetune knee`: the knee in results that were measured elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tuner.analysis.knee import DEFAULT_R, LadderPoint, find_knee
from tuner.analysis.open_loop import OpenLoopPoint, completions_noise, find_open_loop_knee
from tuner.analysis.slo import SloBoundary, highest_inside, slo_boundary
from tuner.answer import KneeFinding, LadderVerdict
from tuner.commands.options import limit_ms
from tuner.elsewhere.files import ElsewhereLadder, read_ladder
from tuner.elsewhere.stage import Axis, point_of, reasons_to_leave_out
from tuner.frozen import Record
from tuner.inputs import InputError
from tuner.ladder_answer import AnswerVerdict, LadderAnswer, knee_figures, verdict_of
from tuner.wording import latency, throughput

_WHAT_NOW = {
    LadderVerdict.KNEE: "measure a stage just left of the knee, and run there",
    LadderVerdict.FENCED: "raise max_num_seqs and measure on",
    LadderVerdict.NOT_REACHED: "measure higher loads, each twice the last one",
    LadderVerdict.ALREADY_SATURATED: "measure lower loads",
    LadderVerdict.TOO_FEW_STAGES: "measure more loads: 1, 2, 4, 8 and so on until throughput stops growing",
}


class PointFigures(Record):
    """A measured stage to run at."""

    load: float
    output_throughput: float
    ttft_p95_ms: float | None
    itl_p95_ms: float | None
    num_preemptions: int | None


class BoundaryFigures(Record):
    """Where the SLO is left."""

    load: float | None
    between: tuple[float | None, float]
    limit: str
    how: str = "interpolated, not measured"


class KneeAnswer(LadderAnswer):
    """What the command prints with `--json`; the last two only where limits were given."""

    operating_point: PointFigures | None = None
    slo_boundary: BoundaryFigures | None = None


def knee(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE…", help="Results of one ladder, or the folder they are in.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    r: Annotated[
        float, typer.Option(help="Exponent of generalised power: the knee is where a gain of 1/(1+r) counts as small.")
    ] = DEFAULT_R,
    fence: Annotated[int | None, typer.Option(help="The engine's max_num_seqs, where the files do not say.")] = None,
    slo_ttft_p95: Annotated[str | None, typer.Option(help="Limit, such as 500ms.")] = None,
    slo_itl_p95: Annotated[str | None, typer.Option(help="Limit, such as 50ms.")] = None,
    trial: Annotated[int | None, typer.Option(help="Which ladder of a run.")] = None,
) -> None:
    """Find the knee in results that are there: CSV, runs and benches of ours, vLLM's benchmarks, GuideLLM, AIPerf."""
    if not 0 < r <= 100:
        raise InputError(f"--r is {r:g}, it must be above 0 and at most 100")
    if fence is not None and fence < 1:
        raise InputError(f"--fence is {fence}, it must be at least 1")
    limits = limit_ms("--slo-ttft-p95", slo_ttft_p95), limit_ms("--slo-itl-p95", slo_itl_p95)
    ladder = read_ladder(files, trial=trial)
    fence = fence or (None if ladder.fence is None else round(ladder.fence))
    points = [point_of(stage, fence=fence) for stage in ladder.stages]
    finding, how = _found(ladder, points, r, fence)
    answer = _answer(ladder, points, finding, how, limits)
    if json:
        unasked = {"operating_point", "slo_boundary"} if limits == (None, None) else set()
        typer.echo(answer.model_dump_json(indent=1, exclude=unasked))
    else:
        for line in _lines(ladder, answer, finding, how):
            typer.echo(line)
    raise typer.Exit(0 if answer.verdict is AnswerVerdict.RESOLVED else 1)


def _found(
    ladder: ElsewhereLadder, points: Sequence[LadderPoint], r: float, fence: float | None
) -> tuple[KneeFinding, str]:
    """The knee and, in words, the rule that gave it."""
    if ladder.axis is Axis.CONCURRENCY:
        return find_knee(points, fence=fence, r=r), f"power X^{1 + r:g}/N over the concurrency"
    rates = [
        OpenLoopPoint(
            point=point,
            request_throughput_rps=stage.request_throughput_rps,
            sent_rps=stage.sent_rps,
            noise=completions_noise(stage.in_flight or 0.0, stage.num_sent or 0.0),
        )
        for stage, point in zip(ladder.stages, points, strict=True)
    ]
    finding, rule = find_open_loop_knee(rates, fence=fence, r=r)
    return finding, f"open loop: {rule.value}"


def _answer(
    ladder: ElsewhereLadder,
    points: Sequence[LadderPoint],
    finding: KneeFinding,
    how: str,
    limits: tuple[float | None, float | None],
) -> KneeAnswer:
    ttft, itl = limits
    point = boundary = None
    warnings = [*finding.warnings, *ladder.notes]
    signals = (how, *finding.signals) if ladder.axis is Axis.REQUEST_RATE else finding.signals
    if limits != (None, None):
        point = highest_inside(points, finding, ttft_p95_ms=ttft, itl_p95_ms=itl)
        boundary = slo_boundary(points, ttft_p95_ms=ttft, itl_p95_ms=itl)
    verdict = verdict_of(finding, is_feasible=point is not None or limits == (None, None))
    if verdict is AnswerVerdict.SLO_INFEASIBLE:
        warnings.insert(0, f"the knee is at {finding.load:g}, but no stage left of it is known to be inside the SLO")
    if verdict is not AnswerVerdict.RESOLVED:
        warnings += signals
    return KneeAnswer(
        verdict=verdict,
        knee=knee_figures(finding, verdict, signals),
        warnings=tuple(warnings),
        operating_point=None if point is None else _figures(point),
        slo_boundary=None if boundary is None else _boundary(boundary),
    )


def _figures(point: LadderPoint) -> PointFigures:
    return PointFigures(
        load=point.name,
        output_throughput=point.throughput,
        ttft_p95_ms=point.ttft_p95_ms,
        itl_p95_ms=point.itl_p95_ms,
        num_preemptions=point.num_preemptions,
    )


def _boundary(boundary: SloBoundary) -> BoundaryFigures:
    return BoundaryFigures(load=boundary.load, between=(boundary.inside, boundary.outside), limit=boundary.limit)


def _lines(ladder: ElsewhereLadder, answer: KneeAnswer, finding: KneeFinding, how: str) -> list[str]:
    text = ladder.axis.text
    num_valid = sum(not reasons_to_leave_out(stage) for stage in ladder.stages)
    lines = [f"{answer.verdict.value}: {num_valid} of {len(ladder.stages)} stages valid; {how}"]
    if finding.load is not None:
        lines.append(f"knee        {text(finding.load)}")
        if finding.interval is not None:
            lines.append(f"interval    {finding.interval[0]:g} to {finding.interval[1]:g}, from the stages' noise")
    if finding.cautious_load is not None:
        lines.append(f"cautious    {text(finding.cautious_load)} (r = 1, throughput over latency)")
    lines += [f"why         {signal}" for signal in finding.signals]
    checks = [f"{name.replace('_', ' ')} {value:g}" for name, value in finding.cross_checks if value is not None]
    if checks:
        lines.append(f"others say  {', '.join(checks)}")
    lines += _slo_lines(answer, ladder.axis)
    lines += [f"warning     {warning}" for warning in answer.warnings if warning not in (how, *finding.signals)]
    return [*lines, f"next        {_what_now(answer, finding, ladder.axis)}"]


def _what_now(answer: KneeAnswer, finding: KneeFinding, axis: Axis) -> str:
    """What to do; at a fence with an eye on the limits: it is safe to stand at one only inside them."""
    now, point = _WHAT_NOW[finding.verdict], answer.operating_point
    if finding.verdict is not LadderVerdict.FENCED:
        return now
    stand = "loosen the limits: no stage is known to be inside" if point is None else f"run at {axis.text(point.load)}"
    if answer.slo_boundary is not None:
        return f"{stand}; the limits are left before the fence is met, so raising max_num_seqs does not help"
    if point is None:
        return f"{now}; whether the fence keeps your limits is not known: --slo-ttft-p95, --slo-itl-p95"
    return f"{now}; until then {stand}"


def _slo_lines(answer: KneeAnswer, axis: Axis) -> list[str]:
    lines = []
    point, boundary = answer.operating_point, answer.slo_boundary
    if point is not None:
        tails = [
            f"p95 {name} {latency(value)}"
            for name, value in (("TTFT", point.ttft_p95_ms), ("ITL", point.itl_p95_ms))
            if value is not None
        ]
        lines.append(f"run at      {axis.text(point.load)}: {', '.join([throughput(point.output_throughput), *tails])}")
    if boundary is not None:
        low, high = boundary.between
        name = boundary.limit.replace("_p95", "").upper()
        if boundary.load is None or low is None:
            lines.append(f"SLO         p95 {name} is over its limit at the lowest load already, {high:g}")
        else:
            lines.append(
                f"SLO         p95 {name} crosses its limit near {boundary.load:.3g}, between {low:g} and {high:g} "
                f"({boundary.how})"
            )
    return lines
