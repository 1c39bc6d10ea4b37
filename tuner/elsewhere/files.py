"""Files to one ladder: which format each is in, and whether together they are one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.elsewhere import aiperf, csv_table, guidellm, own, vllm_bench
from tuner.elsewhere.document import Document, is_object, read_json
from tuner.elsewhere.stage import FEWEST_FOR_P95, Axis, ElsewhereStage, reasons_to_leave_out
from tuner.inputs import InputError

FORMATS = (
    "CSV, the folder of a run (or its stages.parquet), of a trial or of `kneetune bench` (or its bench.json), results "
    "of `vllm bench serve` or `sweep` or their folder, GuideLLM's benchmarks.json, AIPerf's profile_export_aiperf.json"
)
_IN_A_FOLDER = ("summary.csv", "**/profile_export_aiperf.json", "benchmarks.json", "*.json")
"""Results that other tools leave in a folder: the first kind that is there is read."""

_NO_RESULTS = ".pytorch.json"
"""A second file that vLLM's benchmark may write beside a result, in a format of a dashboard's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElsewhereLadder:
    """Stages of one kind of load on, as far as can be told, one engine config."""

    axis: Axis
    stages: tuple[ElsewhereStage, ...]
    fence: float | None = None
    notes: tuple[str, ...] = ()
    """What a reader must know of these figures: stages left out, figures that are not what they are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    stages: tuple[ElsewhereStage, ...]
    fence: float | None = None
    notes: tuple[str, ...] = ()


def read_ladder(paths: Sequence[Path], *, trial: int | None = None) -> ElsewhereLadder:
    """All files as one ladder.

    Args:
        paths: files, or a folder that a tool left behind.
        trial: which ladder of a run.

    Raises:
        InputError: for a file that cannot be read, files of several ladders, or of both kinds of load.
    """
    parts = [_read(path, trial) for each in paths for path in _files(each)]
    fences = {part.fence for part in parts if part.fence is not None}
    if len(fences) > 1:
        listed = ", ".join(f"{fence:g}" for fence in sorted(fences))
        raise InputError(f"{paths[0]}: ladders of several engine configs (fences {listed}): name one")
    every = _without_copies([stage for part in parts for stage in part.stages])
    _refuse_several_configs(every)
    axis = _axis(every)
    notes = [note for part in parts for note in part.notes]
    left_out = [(stage, reasons_to_leave_out(stage)) for stage in every]
    notes += [f"{stage.source}: left out: {'; '.join(why)}" for stage, why in left_out if why]
    return ElsewhereLadder(
        axis=axis,
        stages=tuple(every),
        fence=fences.pop() if fences else None,
        notes=(*dict.fromkeys(notes), *_unknown(every)),
    )


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not path.is_dir() or _is_run(path) or own.is_unfinished(path):
        return [path]
    answer = own.answer_file(path)
    if answer is not None:
        return [answer]
    for pattern in _IN_A_FOLDER:
        found = sorted(file for file in path.glob(pattern) if not file.name.endswith(_NO_RESULTS))
        if found:
            return found
    raise InputError(f"{path}: no results found in this folder. Known: {FORMATS}")


def _is_run(path: Path) -> bool:
    return (path / "job.yaml").is_file()


def _read(path: Path, trial: int | None) -> _Read:
    if path.is_dir():
        return _own(own.run_ladder(path, trial) if _is_run(path) else own.unfinished_ladder(path))
    match path.suffix.lower():
        case ".parquet":
            return _own(own.table_ladder(path, trial))
        case ".json" | ".jsonl" | ".ndjson":
            return _json(path)
        case ".csv" | ".tsv" | ".txt":
            return _csv(path)
        case other:
            raise InputError(f"{path}: {other or 'a file without an ending'}: cannot tell its format. Known: {FORMATS}")


def _own(ladder: own.OwnLadder) -> _Read:
    named = () if ladder.trial is None else (f"the ladder of trial {ladder.trial}",)
    return _Read(stages=ladder.stages, fence=ladder.fence, notes=(*named, *ladder.notes))


def _csv(path: Path) -> _Read:
    rows = csv_table.read(path)
    if {"output_throughput", "completed", "request_rate"} <= rows[0].keys():  # `vllm bench sweep` leaves a summary.csv
        results = [Document(f"{path}: row {i}", _numbers(row)) for i, row in enumerate(rows, start=2)]
        return _vllm(results)
    return _Read(stages=tuple(csv_table.stages(path, rows)))


def _numbers(row: dict[str, str]) -> dict[str, object]:
    """A CSV row as JSON would have it."""
    values: dict[str, object] = {}
    for name, cell in row.items():
        try:
            values[name] = float(cell)
        except ValueError:
            values[name] = cell or None
    return values


def _json(path: Path) -> _Read:
    values = read_json(path)
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    objects = [value for value in values if is_object(value)]
    if not objects or len(objects) != len(values):
        raise InputError(f"{path}: no object in it that holds results. Known: {FORMATS}")
    where = [str(path)] if len(objects) == 1 else [f"{path}: result {i}" for i in range(1, len(objects) + 1)]
    documents = [Document(place, data) for place, data in zip(where, objects, strict=True)]
    return _by_tool(path, documents)


def _by_tool(path: Path, documents: Sequence[Document]) -> _Read:
    first = documents[0]
    if all(vllm_bench.is_result(each.data) or vllm_bench.is_failure(each.data) for each in documents):
        return _vllm(documents)
    if len(documents) == 1 and own.is_answer(first.data):
        return _own(own.answer_ladder(path, first.data))
    if "workload_hash" in first.data:
        return _own(own.trial_ladder(path, [each.data for each in documents]))
    if len(documents) == 1 and guidellm.is_report(first.data):
        return _Read(stages=tuple(guidellm.stages(first)), notes=(guidellm.NO_ITL,))
    if all(aiperf.is_export(each.data) for each in documents):
        stages = tuple(aiperf.stage(each) for each in documents)
        return _Read(stages=stages, notes=(aiperf.NO_ITL,) if any(s.itl_p95_ms is None for s in stages) else ())
    if aiperf.is_sweep(first.data):
        raise InputError(f"{path}: AIPerf's summary of several runs; name each run's profile_export_aiperf.json")
    keys = ", ".join(list(first.data)[:8])
    raise InputError(f"{first.where}: its keys ({keys} …) are of no format that is known. Known: {FORMATS}")


def _vllm(documents: Sequence[Document]) -> _Read:
    failed = [each for each in documents if vllm_bench.is_failure(each.data)]
    results = [each for each in documents if not vllm_bench.is_failure(each.data)]
    notes = [f"{each.where}: left out: the run failed: {each.text('error')}" for each in failed]
    stages = tuple(vllm_bench.stages(results)) if results else ()
    if any(stage.ttft_p95_ms is None for stage in stages):
        notes.append(vllm_bench.ASK_FOR_P95)
    return _Read(stages=stages, notes=tuple(notes))


def _axis(stages: Sequence[ElsewhereStage]) -> Axis:
    paced = [stage for stage in stages if math.isfinite(stage.load)]
    first = {axis: next((stage for stage in paced if stage.axis is axis), None) for axis in Axis}
    closed, rated = first[Axis.CONCURRENCY], first[Axis.REQUEST_RATE]
    if closed is not None and rated is not None:
        raise InputError(
            f"a ladder has one kind of load: {closed.source} has {closed.axis.text(closed.load)}, "
            f"{rated.source} {rated.axis.text(rated.load)}"
        )
    return Axis.CONCURRENCY if rated is None else Axis.REQUEST_RATE


def _refuse_several_configs(stages: Sequence[ElsewhereStage]) -> None:
    seen: dict[str, tuple[str, str]] = {}
    for stage in stages:
        for name, value in stage.config:
            known, where = seen.setdefault(name, (value, stage.source))
            if value != known:
                differ = f"{name} is {known} in {where} and {value} in {stage.source}"
                raise InputError(f"several engine configs, each has a ladder of its own: {differ}")


def _without_copies(stages: Sequence[ElsewhereStage]) -> list[ElsewhereStage]:
    """Each stage once: a sweep keeps a run's figures in the run's own file and in a summary."""
    seen: dict[ElsewhereStage, ElsewhereStage] = {}
    for stage in stages:
        seen.setdefault(replace(stage, source=""), stage)
    return list(seen.values())


def _unknown(stages: Sequence[ElsewhereStage]) -> list[str]:
    fit = [stage for stage in stages if not reasons_to_leave_out(stage)]
    few = [s for s in fit if s.num_completed is not None and s.num_completed < FEWEST_FOR_P95]
    notes = []
    if few:
        listed = ", ".join(f"{s.load:g} ({s.num_completed})" for s in few)
        notes.append(f"too few requests for a p95, fewer than {FEWEST_FOR_P95}, at load {listed}: unknown there")
    if fit and all(stage.num_preemptions is None for stage in fit):
        notes.append("preemptions are not known: a knee bought with them looks like any other")
    return notes
