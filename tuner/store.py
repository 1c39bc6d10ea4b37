"""The run directory: what was measured, appended as it comes, and read back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import ValidationError

from tuner.answer import SCHEMA_VERSION, Provenance, Recommendation, Slo
from tuner.engine_config import EngineConfig
from tuner.frozen import Record
from tuner.inputs import InputError, read_yaml, validated
from tuner.job import TuningJob
from tuner.records import RequestRecord, StageRecord, TrialRecord, TrialRole

_Record = TypeVar("_Record", bound=Record)

if TYPE_CHECKING:
    import pandas as pd

    from tuner.measure.stage import MeasuredStage


class AskedTrial(Record):
    """A trial that was begun; until `trial.json` lies beside it, it has not ended."""

    number: int
    role: TrialRole
    config: EngineConfig
    origin: str
    begun_s: float | None = None
    """As in the trial's record."""


_FLAGS = "engine_flags.txt"


class RunStore:
    """One run's directory. Only the process that holds its lock writes it; anybody may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, root: Path, job: TuningJob, provenance: Provenance) -> RunStore:
        """Make `root/NAME`, or `root/NAME-2` and so on where that is taken, and write the job into it.

        Raises:
            InputError: if the directory cannot be made.
        """
        try:
            path = claim(root, job.name)
            _write_job(path, job, provenance)
            (path / "trials").mkdir()
        except OSError as error:
            raise InputError(
                f"{root}: cannot make a run directory here: {error.strerror}; name another folder with --runs"
            ) from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunStore:
        """A run that exists.

        Raises:
            InputError: if there is none at `path`.
        """
        if not (path / "job.yaml").is_file():
            raise InputError(
                f"{path}: no run here (there is no job.yaml); name a directory that `kneetune tune` made, such as "
                "runs/embedded-chat"
            )
        return cls(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the one that writes this run, until the end of the block or of the process.

        Raises:
            InputError: if another process is, naming it.
        """
        with (self.path / "lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                other = file.read() or "another process"
                raise InputError(f"{self.path}: {other} is writing this run: wait for its end, or end it") from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def is_locked(self) -> bool:
        """Whether a process is writing this run now."""
        try:
            with (self.path / "lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def job(self) -> TuningJob:
        """The job as it was resolved."""
        return validated(TuningJob, self._document()["job"], where=str(self.path / "job.yaml"))

    def write_job(self, job: TuningJob) -> None:
        """Keep the job with the budget it was given since; what it measures stays the same."""
        _write_job(self.path, job, self.provenance())

    def provenance(self) -> Provenance:
        """Versions, hardware and model of the run."""
        return validated(Provenance, self._document()["provenance"], where=str(self.path / "job.yaml"))

    def write_flags(self, flags: frozenset[str]) -> None:
        """Keep what the command line of the installed engine knows."""
        write_whole(self.path / _FLAGS, "".join(f"{flag}\n" for flag in sorted(flags)))

    def flags(self) -> frozenset[str] | None:
        """What the command line of the measured engine knows; None where it was not kept."""
        path = self.path / _FLAGS
        return frozenset(path.read_text(encoding="utf-8").split()) if path.is_file() else None

    def engine_environment(self, number: int) -> dict[str, str]:
        """The variables that a trial's engine was launched with, secrets blanked; empty where they were not kept."""
        path = self.path / "trials" / f"{number:04d}" / "env.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def trial_directory(self, number: int) -> Path:
        """`trials/0007`, made if it is not there."""
        directory = self.path / "trials" / f"{number:04d}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def begin_trial(self, asked: AskedTrial) -> Path:
        """Say what a trial is about before it is launched; returns its directory."""
        directory = self.trial_directory(asked.number)
        write_whole(directory / "asked.json", asked.model_dump_json(indent=1))
        return directory

    def unfinished_trials(self) -> list[AskedTrial]:
        """The trials that were begun and have not ended, by number."""
        begun = sorted(file for file in (self.path / "trials").glob("*/asked.json") if not _ended(file.parent))
        return [read_record(AskedTrial, file) for file in begun]

    def write_trial(self, trial: TrialRecord) -> None:
        """Keep a finished trial: once `trial.json` is there, whole, the trial counts."""
        write_whole(self.trial_directory(trial.number) / "trial.json", trial.model_dump_json(indent=1))

    def trials(self) -> list[TrialRecord]:
        """Every finished trial, by number."""
        files = sorted((self.path / "trials").glob("*/trial.json"))
        return [read_record(TrialRecord, file) for file in files]

    def write_slo(self, slo: Slo) -> None:
        """Keep the limits in force; derived ones are known only after the first trial."""
        write_whole(self.path / "slo.json", slo.model_dump_json(indent=1))

    def write_tables(self, trials: Sequence[TrialRecord]) -> None:
        """Write `trials.parquet` (a row a launch) and `stages.parquet` (a row a stage)."""
        trial_table(trials).to_parquet(self.path / "trials.parquet")
        stage_table(trials).to_parquet(self.path / "stages.parquet")

    def write_recommendation(self, recommendation: Recommendation) -> None:
        """Write the answer, and the schema it follows."""
        write_whole(self.path / "recommendation.json", recommendation.model_dump_json(indent=1))

    def slo(self) -> Slo | None:
        """The limits in force: the job's own, or those derived once a first trial was measured."""
        file = self.path / "slo.json"
        return read_record(Slo, file) if file.is_file() else self.job().limits()

    def has_answer(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "recommendation.json").is_file()

    def recommendation(self) -> Recommendation:
        """The run's answer.

        Raises:
            InputError: if the run has none yet.
        """
        file = self.path / "recommendation.json"
        if not self.has_answer():
            go_on = shlex.join(["kneetune", "tune", "--resume", str(self.path)])
            raise InputError(f"{self.path}: this run has no answer yet; go on with it: {go_on}")
        return read_record(Recommendation, file)

    def _document(self) -> dict[str, object]:
        document = read_yaml(self.path / "job.yaml")
        if not isinstance(document, dict) or not {"job", "provenance"} <= document.keys():
            raise InputError(
                f"{self.path / 'job.yaml'}: not a run's job file (it has no `job` and `provenance`); name a directory "
                "that `kneetune tune` made"
            )
        return document


def _write_job(path: Path, job: TuningJob, provenance: Provenance) -> None:
    document = {"job": job.model_dump(mode="json"), "provenance": provenance.model_dump(mode="json")}
    write_whole(path / "job.yaml", yaml.safe_dump(document, sort_keys=False).rstrip("\n"))


def _ended(directory: Path) -> bool:
    return (directory / "trial.json").is_file()


def read_record(model: type[_Record], path: Path) -> _Record:
    """Read one record from its file.

    Raises:
        InputError: naming the file, if it is cut off or from another version.
    """
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"{path}: damaged, or written by another version than this one (schema {SCHEMA_VERSION}): {first['msg']}; "
            "restore the file, or start a new run"
        ) from None


def keep_stage(directory: Path, measured: MeasuredStage) -> None:
    """Keep a finished stage of a trial; it counts once its line in `stages.jsonl` is there, which comes last.

    `requests.parquet` (a row a request, without its token times) and `memory.parquet` (a row a scrape: KV use, running,
    waiting, the engine's counters) are folders with a file a stage, which pandas reads as one table.
    """
    stage = measured.record
    requests = [request.model_dump(exclude={"token_times_s"}) for request in measured.requests]
    _write_part(directory / "requests.parquet", stage, requests, text=("token_source", "error"))
    _write_part(directory / "memory.parquet", stage, [asdict(sample) for sample in measured.samples])
    with (directory / "stages.jsonl").open("a", encoding="utf-8") as file:
        file.write(stage.model_dump_json() + "\n")


def kept_stages(directory: Path) -> list[StageRecord]:
    """The stages that a trial kept before it was cut off; a last line that was cut itself is taken away."""
    file = directory / "stages.jsonl"
    if not file.is_file():
        return []
    whole, _, torn = file.read_text(encoding="utf-8").rpartition("\n")
    if torn:
        write_whole(file, whole)
    return [StageRecord.model_validate_json(line) for line in whole.splitlines()]


def _write_part(folder: Path, stage: StageRecord, rows: list[dict[str, Any]], *, text: tuple[str, ...] = ()) -> None:
    """One stage's rows as a file of a table; unknown values keep their column's kind, so that all files agree."""
    import pandas as pd

    folder.mkdir(exist_ok=True)
    table = pd.DataFrame(rows)
    known = {"stage": stage.index, "kind": stage.kind.value, "load": float(stage.load)}
    kinds = {name: "string" if name in text else "float64" for name in table if table[name].dtype == object}
    table.astype(kinds).assign(**known).to_parquet(folder / f"stage-{stage.index:02d}.parquet")


def read_requests(directory: Path, stage: StageRecord) -> list[RequestRecord]:
    """The requests of one stage, from a trial's `requests.parquet`; their token times were not kept."""
    import pandas as pd

    table = pd.read_parquet(directory / "requests.parquet" / f"stage-{stage.index:02d}.parquet")
    rows = table.drop(columns=["stage", "kind", "load"])
    rows = rows.astype(object).where(rows.notna(), None)
    return [RequestRecord.model_validate(row) for row in rows.to_dict(orient="records")]


def trial_table(trials: Sequence[TrialRecord]) -> pd.DataFrame:
    """A row a launch: number, role, config, outcome, times."""
    import pandas as pd

    return pd.json_normalize(
        [
            trial.model_dump(mode="json", exclude={"outcome": {"stages"}})
            | {"num_stages": len(trial.outcome.stages) if trial.outcome.outcome == "measured" else 0}
            for trial in trials
        ],
        sep="_",
    )


def stage_table(trials: Sequence[TrialRecord]) -> pd.DataFrame:
    """A row a stage: the trial's number, role and config, and every figure of the stage."""
    import pandas as pd

    rows = []
    for trial in trials:
        if trial.outcome.outcome != "measured":
            continue
        head = {"trial": trial.number, "role": trial.role.value, "config": trial.config.model_dump(mode="json")}
        for stage in trial.outcome.stages:
            figures = stage.model_dump(mode="json")
            figures["invalid_reasons"] = "; ".join(stage.invalid_reasons)
            rows.append(head | figures)
    return pd.json_normalize(rows, sep="_")


def claim(root: Path, name: str) -> Path:
    """Make `root/name`, or `root/name-2` and so on where that is taken.

    Raises:
        InputError: where all are taken.
        OSError: where a folder cannot be made there.
    """
    root.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise InputError(f"{root}/{name}: ten thousand runs of this name; give the job another")


def write_whole(path: Path, text: str) -> None:
    """Write a file that is either the old one or the whole new one, never half."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
