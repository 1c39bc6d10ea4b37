"""Our own results: a run's folder, its `stages.parquet`, one trial's folder or `stages.jsonl`, or a bench's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tuner.bench_answer import BenchAnswer
from tuner.elsewhere.stage import Axis, ElsewhereStage
from tuner.inputs import InputError
from tuner.records import CLIMB_KINDS, StageKind, StageRecord, TrialRecord
from tuner.store import RunStore, read_record

if TYPE_CHECKING:
    import pandas as pd

_KINDS = {kind.value for kind in (*CLIMB_KINDS, StageKind.OVERLOAD)}
_STAGES, _TRIAL, _BENCH = "stages.jsonl", "trial.json", "bench.json"
_NEEDED = ("trial", "kind", "load", "valid", "fenced", "output_throughput_value", "config_max_num_seqs")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLadder:
    """The ladder of one trial or bench."""

    stages: tuple[ElsewhereStage, ...]
    fence: int | None
    """None where it is not told there; the stages then say which of them were past it."""

    trial: int | None
    notes: tuple[str, ...] = ()


def answer_file(folder: Path) -> Path | None:
    """What a bench or a trial ended with, where this is the folder of one."""
    return next((folder / name for name in (_BENCH, _TRIAL) if (folder / name).is_file()), None)


def is_unfinished(folder: Path) -> bool:
    """Whether this is the folder of a bench or a trial that has not come to its end."""
    return answer_file(folder) is None and (folder / _STAGES).is_file()


def unfinished_ladder(folder: Path) -> OwnLadder:
    """The stages of a bench or a trial that runs, or was killed.

    Raises:
        InputError: for files of another version.
    """
    # Of a line that is being written only those before it are whole.
    whole, _, _ = (folder / _STAGES).read_text(encoding="utf-8").rpartition("\n")
    ladder = trial_ladder(folder / _STAGES, [json.loads(line) for line in whole.splitlines()])
    return replace(ladder, notes=(f"{folder}: it has not come to its end; the ladder goes as far as it came",))


def is_answer(data: Mapping[str, object]) -> bool:
    """Whether this is what a bench or a trial ends with: a `bench.json` or a `trial.json`."""
    return _is_trial(data) or {"finding", "server", "stages"} <= data.keys()


def answer_ladder(path: Path, data: Mapping[str, object]) -> OwnLadder:
    """The ladder in a `bench.json` or a `trial.json`, of which `data` is the content.

    Raises:
        InputError: for a trial that failed, or a file of another version.
    """
    if _is_trial(data):
        return _ladder_of(str(path), read_record(TrialRecord, path))
    answer = read_record(BenchAnswer, path)
    return OwnLadder(stages=_of_one_axis(str(path), answer.stages), fence=answer.fence, trial=None)


def _is_trial(data: Mapping[str, object]) -> bool:
    return {"role", "outcome", "config"} <= data.keys()


def run_ladder(path: Path, trial: int | None) -> OwnLadder:
    """A trial's ladder of a run: the one its answer stands on, unless another is named.

    Raises:
        InputError: if there is no such trial, or it has no ladder.
    """
    store = RunStore.open(path)
    measured = {t.number: t for t in store.trials() if t.outcome.outcome == "measured"}
    if trial is None and store.has_answer():
        trial = store.recommendation().knee_trial
    return _ladder_of(str(path), measured[_only(str(path), trial, measured)])


def _ladder_of(where: str, trial: TrialRecord) -> OwnLadder:
    if trial.outcome.outcome != "measured":
        failed = f"it failed: {trial.outcome.kind.value}: {trial.outcome.detail}"
        raise InputError(f"{where}: trial {trial.number} has no ladder, {failed}")
    return OwnLadder(stages=_of_one_axis(where, trial.outcome.stages), fence=trial.config.fence, trial=trial.number)


def table_ladder(path: Path, trial: int | None) -> OwnLadder:
    """A trial's ladder of a `stages.parquet`.

    Raises:
        InputError: if it is no such table, or holds several ladders and none was named.
    """
    import pandas as pd
    import pyarrow as pa

    try:
        table = pd.read_parquet(path)
    except (pa.ArrowInvalid, ValueError) as error:
        raise InputError(f"{path}: not a parquet file: {error}") from None
    missing = [name for name in _NEEDED if name not in table.columns]
    if missing:
        raise InputError(f"{path}: not a stages.parquet of a run: it has no column {missing[0]!r}")
    chosen = _only(str(path), trial, sorted({int(number) for number in table["trial"]}))
    rows = table[(table["trial"] == chosen) & table["kind"].isin(_KINDS)]
    if rows.empty:
        raise InputError(f"{path}: trial {chosen} has no stages of a ladder")
    stages = tuple(_of_row(f"{path}: trial {chosen}", row) for _, row in rows.iterrows())
    fences = [_known(rows.iloc[0], f"config_{name}") for name in ("max_num_seqs", "max_num_active_seqs")]
    return OwnLadder(stages=stages, fence=int(min(f for f in fences if f is not None)), trial=chosen)


def trial_ladder(path: Path, lines: Sequence[object]) -> OwnLadder:
    """The ladder in a `stages.jsonl`; its fence is not told there, but which stages were past it is.

    Raises:
        InputError: for a line that is no stage of this version.
    """
    try:
        records = [StageRecord.model_validate(line) for line in lines]
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise InputError(f"{path}: not stages of this version: {place}: {fault['msg']}") from None
    return OwnLadder(stages=_of_one_axis(str(path), records), fence=None, trial=None)


def _of_one_axis(where: str, records: Sequence[StageRecord]) -> tuple[ElsewhereStage, ...]:
    """The stages of the ladder of users; where there is none, those under a rate.

    Raises:
        InputError: where there is neither.
    """
    climbed = [record for record in records if record.kind.value in _KINDS]
    stages = climbed or [record for record in records if record.kind is StageKind.RATE]
    if not stages:
        raise InputError(f"{where}: no stage of a ladder was measured there")
    return tuple(_of_record(where, record) for record in stages)


def _only(where: str, asked: int | None, trials: Mapping[int, object] | Sequence[int]) -> int:
    numbers = ", ".join(str(number) for number in trials)
    if not trials:
        raise InputError(f"{where}: no trial has measured a ladder yet")
    if asked is None and len(trials) == 1:
        return next(iter(trials))
    if asked is None:
        raise InputError(f"{where}: {len(trials)} ladders, one a trial: name one by --trial. Trials: {numbers}")
    if asked not in trials:
        raise InputError(f"{where}: no ladder of trial {asked}. Trials: {numbers}")
    return asked


def _of_record(where: str, stage: StageRecord) -> ElsewhereStage:
    throughput = stage.output_throughput
    known = throughput.low is not None and throughput.high is not None
    return ElsewhereStage(
        source=f"{where}: stage {stage.index}",
        axis=Axis.REQUEST_RATE if stage.loop == "open" else Axis.CONCURRENCY,
        load=float(stage.load),
        output_throughput=throughput.value,
        output_throughput_half_width=((throughput.high or 0) - (throughput.low or 0)) / 2 if known else None,
        request_throughput_rps=stage.request_throughput_rps if stage.loop == "open" else None,
        sent_rps=stage.sent_rps,
        num_sent=None if stage.sent_rps is None else stage.sent_rps * stage.measured_s,
        mean_in_flight=stage.mean_in_flight if stage.loop == "open" else None,
        ttft_p95_ms=stage.ttft_p95_ms.value if stage.ttft_p95_ms.has_interval else None,
        itl_p95_ms=stage.itl_p95_ms.value if stage.itl_p95_ms.has_interval else None,
        e2e_p95_ms=stage.e2e_p95_ms.value if stage.e2e_p95_ms.has_interval else None,
        num_preemptions=stage.num_preemptions,
        fenced=stage.fenced,
        kv_cache_usage_peak=stage.kv_cache_usage_peak,
        mean_running=stage.mean_running,
        mean_waiting=stage.mean_waiting,
        unfit=() if stage.valid else stage.invalid_reasons or ("invalid",),
    )


def _of_row(where: str, row: pd.Series) -> ElsewhereStage:
    low, high = _known(row, "output_throughput_low"), _known(row, "output_throughput_high")
    preemptions = _known(row, "num_preemptions")
    return ElsewhereStage(
        source=f"{where}, load {row['load']}",
        axis=Axis.CONCURRENCY,
        load=float(row["load"]),
        output_throughput=float(row["output_throughput_value"]),
        output_throughput_half_width=None if low is None or high is None else (high - low) / 2,
        ttft_p95_ms=_proven(row, "ttft_p95_ms"),
        itl_p95_ms=_proven(row, "itl_p95_ms"),
        e2e_p95_ms=_proven(row, "e2e_p95_ms"),
        num_preemptions=None if preemptions is None else round(preemptions),
        fenced=bool(row["fenced"]),
        kv_cache_usage_peak=_known(row, "kv_cache_usage_peak"),
        mean_running=_known(row, "mean_running"),
        mean_waiting=_known(row, "mean_waiting"),
        unfit=() if row["valid"] else (str(row.get("invalid_reasons") or "invalid"),),
    )


def _proven(row: pd.Series, name: str) -> float | None:
    """A p95 that has an interval."""
    return None if _known(row, f"{name}_high") is None else _known(row, f"{name}_value")


def _known(row: pd.Series, name: str) -> float | None:
    value = row.get(name)
    # Not equal to itself: NaN, which is how a table holds what is unknown.
    return None if value is None or value != value else float(value)
