"""A run directory reads back as what was written, and a half-written file never counts."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.fakes.records import resolved_run
from tuner.inputs import InputError
from tuner.job import load_job
from tuner.measure.stage import MeasuredStage
from tuner.records import RequestRecord
from tuner.store import RunStore, keep_stage, kept_stages, read_requests


def _store(tmp_path: Path) -> RunStore:
    return RunStore.create(tmp_path, load_job("embedded"), resolved_run().recommendation.provenance)


def test_a_run_reads_back_as_itself(tmp_path: Path) -> None:
    """What `show`, `report` and `export` read is what was measured."""
    store, run = _store(tmp_path), resolved_run()
    for trial in run.trials:
        store.write_trial(trial)
    store.write_recommendation(run.recommendation)
    again = RunStore.open(store.path)
    assert again.job() == load_job("embedded")
    assert again.provenance() == run.recommendation.provenance
    assert again.trials() == list(run.trials)
    assert again.recommendation() == run.recommendation


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    """Nothing measured is ever overwritten by the next run."""
    paths = [_store(tmp_path).path.name for _ in range(3)]
    assert paths == ["embedded-chat", "embedded-chat-2", "embedded-chat-3"]


def test_a_half_written_trial_does_not_count(tmp_path: Path) -> None:
    """A run killed while writing reads as if that trial had not ended."""
    store = _store(tmp_path)
    (store.trial_directory(0) / ".trial.json.partial").write_text('{"number": 0, "ro')
    assert store.trials() == []


def test_no_run_and_no_answer_are_said_by_name(tmp_path: Path) -> None:
    """A wrong path or an unfinished run is one clear line."""
    with pytest.raises(InputError, match="no run here"):
        RunStore.open(tmp_path)
    with pytest.raises(InputError, match="no answer yet"):
        _store(tmp_path).recommendation()


def test_tables_have_a_row_a_launch_and_a_row_a_stage(tmp_path: Path) -> None:
    """Pandas users find every figure without parsing JSON."""
    store, run = _store(tmp_path), resolved_run()
    store.write_tables(run.trials)
    trials = pd.read_parquet(store.path / "trials.parquet")
    stages = pd.read_parquet(store.path / "stages.parquet")
    measured = [trial for trial in run.trials if trial.outcome.outcome == "measured"]
    assert list(trials["number"]) == [trial.number for trial in run.trials]
    assert len(stages) == sum(len(trial.outcome.stages) for trial in measured)
    assert {"trial", "load", "output_throughput_value", "itl_p95_ms_low", "config_max_num_seqs"} <= set(stages.columns)


def test_requests_read_back_by_stage(tmp_path: Path) -> None:
    """Goodput under the burst is worked out from the very requests that were sent."""
    stage = next(trial for trial in resolved_run().trials if trial.outcome.outcome == "measured").outcome.stages[0]
    good = RequestRecord(
        index=0,
        intended_s=0.0,
        sent_s=0.001,
        first_token_s=0.02,
        finished_s=0.3,
        num_prompt_tokens=40,
        num_output_tokens=30,
        asked_output_tokens=30,
    )
    refused = good.model_copy(update={"index": 1, "first_token_s": None, "rejected": True, "error": "503"})
    other = stage.model_copy(update={"index": 99})
    keep_stage(tmp_path, MeasuredStage(record=other, requests=(good,), samples=()))
    keep_stage(tmp_path, MeasuredStage(record=stage, requests=(good, refused), samples=()))
    assert read_requests(tmp_path, stage) == [good, refused]
    assert len(pd.read_parquet(tmp_path / "requests.parquet")) == 3


def test_a_stage_counts_once_its_line_is_whole(tmp_path: Path) -> None:
    """A run killed while it wrote a stage's line repeats that stage, and only that one."""
    stage = next(trial for trial in resolved_run().trials if trial.outcome.outcome == "measured").outcome.stages[0]
    keep_stage(tmp_path, MeasuredStage(record=stage, requests=(), samples=()))
    whole = (tmp_path / "stages.jsonl").read_text()
    (tmp_path / "stages.jsonl").write_text(whole + whole[:40])

    assert kept_stages(tmp_path) == [stage]
    assert (tmp_path / "stages.jsonl").read_text() == whole
    assert kept_stages(tmp_path / "nothing") == []
