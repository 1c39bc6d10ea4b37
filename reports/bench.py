"""The report of a bench: one HTML file for the ladder of a running server."""

from __future__ import annotations

from pathlib import Path

from reports import evidence
from reports.figures.knee import KneeInfo, curve_point, knee_figure
from reports.report import Chart, embedded, rendered
from reports.tables import Cell, Table, cell
from reports.view import slo_words
from tuner import wording
from tuner.bench_answer import BenchAnswer, headline, next_move
from tuner.ladder_answer import AnswerVerdict


def write_bench_report(path: Path, answer: BenchAnswer) -> None:
    """Write the report of a bench, whatever its verdict, to `path`."""
    path.write_text(render_bench(answer), encoding="utf-8")


def render_bench(answer: BenchAnswer) -> str:
    """The report's HTML."""
    info = bench_info(answer)
    return rendered(
        "bench.html.j2",
        title=f"{answer.server.model} at {answer.server.url}",
        headline=headline(answer),
        answer=answer,
        resolved=answer.verdict is AnswerVerdict.RESOLVED,
        next_move=next_move(answer),
        operating=_operating(answer),
        slo=slo_words(answer.slo),
        why=evidence.finding_lines(answer.finding, answer.because),
        cross_checks=evidence.cross_checks(answer.finding),
        stages=_stages(answer),
        provenance=_provenance(answer),
        charts={} if info is None else {"knee": embedded(Chart(info.title, knee_figure(info)), "knee")},
    )


def bench_info(answer: BenchAnswer) -> KneeInfo | None:
    """The ladder as the knee's chart draws it; None where no stage was measured."""
    closed = [stage for stage in answer.stages if stage.loop == "closed"]
    if not closed:
        return None
    point, slo, finding = answer.operating_point, answer.slo, answer.finding
    return KneeInfo(
        title=headline(answer)[:1].upper() + headline(answer)[1:],
        trial=None,
        points=tuple(curve_point(stage) for stage in sorted(closed, key=lambda stage: stage.load)),
        knee=finding.load,
        knee_interval=finding.interval,
        operating_load=point.load if point else None,
        production_fence=None,
        trial_fence=answer.fence,
        slo_ttft_p95_ms=slo.ttft_p95_ms if slo else None,
        slo_itl_p95_ms=slo.itl_p95_ms if slo else None,
    )


def _operating(answer: BenchAnswer) -> Table | None:
    point, rate_rps = answer.operating_point, answer.safe_rate_rps
    safe = () if rate_rps is None else ((Cell("Safe rate"), Cell(wording.safe_rate(rate_rps))),)
    if point is None:
        return Table(("Safe rate", ""), safe) if safe else None
    rows = (
        *safe,
        (Cell("Load"), Cell(f"{point.load} concurrent")),
        (Cell("Output throughput"), cell(point.output_throughput, "tok/s")),
        (Cell("p95 TTFT"), cell(point.ttft_p95_ms, "ms")),
        (Cell("p95 ITL"), cell(point.itl_p95_ms, "ms")),
        (Cell("Preemptions"), Cell(wording.preemptions(point))),
        (Cell("KV cache in use at the peak"), Cell(wording.kv_use(point))),
    )
    return Table(("Operating point", ""), rows)


def _stages(answer: BenchAnswer) -> Table:
    ordered = sorted(answer.stages, key=lambda stage: (stage.loop == "open", stage.load, stage.index))
    head = (
        "Load",
        "Output throughput",
        "p95 TTFT",
        "p95 ITL",
        "Running, waiting",
        "Preemptions",
        "KV use",
        "Measured as",
        "Stage",
    )
    return Table(
        head,
        tuple(
            (
                Cell(wording.load(stage)),
                cell(stage.output_throughput, "tok/s"),
                cell(stage.ttft_p95_ms, "ms"),
                cell(stage.itl_p95_ms, "ms"),
                Cell(f"{_mean(stage.mean_running)}, {_mean(stage.mean_waiting)}"),
                Cell(wording.preemptions(stage)),
                Cell(wording.kv_use(stage)),
                Cell(f"no. {stage.index + 1}"),
                Cell(
                    "past the fence" if stage.fenced else "valid" if stage.valid else "left out",
                    "; ".join(stage.invalid_reasons),
                ),
            )
            for stage in ordered
        ),
    )


def _mean(value: float | None) -> str:
    return wording.UNKNOWN if value is None else wording.number(value)


def _provenance(answer: BenchAnswer) -> Table:
    server = answer.server
    fence = wording.UNKNOWN if answer.fence is None else f"{answer.fence}, {answer.fence_source}"
    rows = (
        ("Server", server.url),
        ("Engine", f"{server.engine} {server.version or 'of unknown version'}"),
        ("Model", server.model),
        ("Device", server.device or wording.UNKNOWN),
        ("Context length", wording.count(server.max_model_len)),
        ("Fence (max_num_seqs)", fence),
        ("Engine config", "not told" if server.config is None else wording.config_text(server.config)),
        ("Workload", f"{answer.workload.name} ({answer.workload_hash})"),
        ("Prefix cache before the first stage", answer.prefix_cache),
        ("Seed", str(answer.seed)),
        ("Command", answer.command or wording.UNKNOWN),
        ("Took", wording.duration(answer.wall_s)),
        ("kneetune", answer.kneetune_version),
        ("Created", answer.created),
    )
    return Table(("", ""), tuple((Cell(name), Cell(value)) for name, value in rows))
