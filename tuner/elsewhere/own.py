"""Our own results: a run directory, its `stages.parquet`, or one trial's `stages.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tuner.elsewhere.stage import Axis, ElsewhereStage
from tuner.inputs import InputError
from tuner.records import CLIMB_KINDS, StageKind, StageRecord
from tuner.store import RunStore

if TYPE_CHECKING:
    import pandas as pd

_KINDS = {kind.value for kind in (*CLIMB_KINDS, StageKind.OVERLOAD)}
_NEEDED = ("trial", "kind", "load", "valid", "fenced", "output_throughput_value", "config_max_num_seqs")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLadder:
    """The ladder of one trial."""

    stages: tuple[ElsewhereStage, ...]
    fence: int | None
    trial: int | None


def run_ladder(path: Path, trial: int | None) -> OwnLadder:
    """A trial's ladder of a run: the one its answer stands on, unless another is named.

    Raises:
        InputError: if there is no such trial, or it has no ladder.
    """
    store = RunStore.open(path)
    measured = {t.number: t for t in store.trials() if t.outcome.outcome == "measured"}
    if trial is None and store.has_answer():
        trial = store.recommendation().knee_trial
    chosen = measured[_only(str(path), trial, measured)]
    if chosen.outcome.outcome != "measured":
        raise InputError(f"{path}: trial {trial} has no ladder")
    stages = tuple(_of_record(str(path), stage) for stage in chosen.outcome.stages if stage.kind.value in _KINDS)
    return OwnLadder(stages=stages, fence=chosen.config.fence, trial=chosen.number)


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
    stages = tuple(_of_record(str(path), record) for record in records if record.kind.value in _KINDS)
    return OwnLadder(stages=stages, fence=None, trial=None)


def _only(where: str, asked: int | None, trials: Mapping[int, object] | Sequence[int]) -> int:
    numbers = ", ".join(str(number) for number in trials)
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
        axis=Axis.CONCURRENCY,
        load=float(stage.load),
        output_throughput=throughput.value,
        output_throughput_half_width=((throughput.high or 0) - (throughput.low or 0)) / 2 if known else None,
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
