"""The run directory: what was measured, appended as it comes, and read back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml
from pydantic import ValidationError

from tuner.answer import SCHEMA_VERSION, Provenance, Recommendation, Slo
from tuner.inputs import InputError, read_yaml, validated
from tuner.job import TuningJob
from tuner.records import Record, RequestRecord, StageRecord, TrialRecord

_Record = TypeVar("_Record", bound=Record)

if TYPE_CHECKING:
    import pandas as pd

    from tuner.measure.stage import MeasuredStage


class RunStore:
    """One run's directory. Only the process that tunes writes it; anybody may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, root: Path, job: TuningJob, provenance: Provenance) -> RunStore:
        """Make `root/NAME`, or `root/NAME-2` and so on where that is taken, and write the job into it.

        Raises:
            InputError: if the directory cannot be made.
        """
        try:
            path = _claim(root, job.name)
            document = {"job": job.model_dump(mode="json"), "provenance": provenance.model_dump(mode="json")}
            (path / "job.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
            (path / "trials").mkdir()
        except OSError as error:
            raise InputError(f"{root}: cannot make a run directory here: {error.strerror}") from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunStore:
        """A run that exists.

        Raises:
            InputError: if there is none at `path`.
        """
        if not (path / "job.yaml").is_file():
            raise InputError(f"{path}: no run here (there is no job.yaml)")
        return cls(path)

    def job(self) -> TuningJob:
        """The job as it was resolved."""
        return validated(TuningJob, self._document()["job"], where=str(self.path / "job.yaml"))

    def provenance(self) -> Provenance:
        """Versions, hardware and model of the run."""
        return validated(Provenance, self._document()["provenance"], where=str(self.path / "job.yaml"))

    def trial_directory(self, number: int) -> Path:
        """`trials/0007`, made if it is not there."""
        directory = self.path / "trials" / f"{number:04d}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def write_trial(self, trial: TrialRecord) -> None:
        """Keep a finished trial: once `trial.json` is there, whole, the trial counts."""
        _write_whole(self.trial_directory(trial.number) / "trial.json", trial.model_dump_json(indent=1))

    def trials(self) -> list[TrialRecord]:
        """Every finished trial, by number."""
        files = sorted((self.path / "trials").glob("*/trial.json"))
        return [read_record(TrialRecord, file) for file in files]

    def write_slo(self, slo: Slo) -> None:
        """Keep the limits in force; derived ones are known only after the first trial."""
        _write_whole(self.path / "slo.json", slo.model_dump_json(indent=1))

    def write_tables(self, trials: Sequence[TrialRecord]) -> None:
        """Write `trials.parquet` (a row a launch) and `stages.parquet` (a row a stage)."""
        trial_table(trials).to_parquet(self.path / "trials.parquet")
        stage_table(trials).to_parquet(self.path / "stages.parquet")

    def write_recommendation(self, recommendation: Recommendation) -> None:
        """Write the answer, and the schema it follows."""
        _write_whole(self.path / "recommendation.json", recommendation.model_dump_json(indent=1))

    def recommendation(self) -> Recommendation:
        """The run's answer.

        Raises:
            InputError: if the run has none yet.
        """
        file = self.path / "recommendation.json"
        if not file.is_file():
            raise InputError(f"{self.path}: this run has no answer yet (there is no recommendation.json)")
        return read_record(Recommendation, file)

    def _document(self) -> dict[str, object]:
        document = read_yaml(self.path / "job.yaml")
        if not isinstance(document, dict) or not {"job", "provenance"} <= document.keys():
            raise InputError(f"{self.path / 'job.yaml'}: not a run's job file (it has no `job` and `provenance`)")
        return document


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
            f"{path}: damaged, or written by another version: {first['msg']} (schema {SCHEMA_VERSION})"
        ) from None


def append_stage(directory: Path, stage: StageRecord) -> None:
    """Add a line to a trial's `stages.jsonl`."""
    with (directory / "stages.jsonl").open("a", encoding="utf-8") as file:
        file.write(stage.model_dump_json() + "\n")


def write_requests(directory: Path, stages: Iterable[MeasuredStage]) -> None:
    """Write a trial's `requests.parquet`: a row a request, with its stage and without its token times."""
    import pandas as pd

    rows = [
        _place(stage.record) | request.model_dump(exclude={"token_times_s"})
        for stage in stages
        for request in stage.requests
    ]
    pd.DataFrame(rows).to_parquet(directory / "requests.parquet")


def write_memory(directory: Path, stages: Iterable[MeasuredStage]) -> None:
    """Write a trial's `memory.parquet`: a row a scrape, with KV use, running, waiting and the engine's counters."""
    import pandas as pd

    rows = [_place(stage.record) | asdict(sample) for stage in stages for sample in stage.samples]
    pd.DataFrame(rows).to_parquet(directory / "memory.parquet")


def _place(stage: StageRecord) -> dict[str, int | str]:
    return {"stage": stage.index, "kind": stage.kind.value, "load": stage.load}


def read_requests(directory: Path, stage: StageRecord) -> list[RequestRecord]:
    """The requests of one stage, from a trial's `requests.parquet`; their token times were not kept."""
    import pandas as pd

    table = pd.read_parquet(directory / "requests.parquet")
    rows = table[table["stage"] == stage.index].drop(columns=["stage", "kind", "load"])
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


def _claim(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise InputError(f"{root}/{name}: ten thousand runs of this name; give the job another")


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is either the old one or the whole new one, never half."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
