"""Our own results give the answer that the run gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes import records
from tests.fakes.bench import bench_answer
from tests.tuner.analysis.curves import climbed
from tuner.analysis.knee import find_knee, points_of
from tuner.elsewhere.files import ElsewhereLadder, read_ladder
from tuner.elsewhere.own import _only
from tuner.elsewhere.stage import Axis, point_of
from tuner.engine_config import EngineConfig
from tuner.inputs import InputError
from tuner.records import Failed, FailureKind, Measured, StageKind, StageRecord, TrialRecord
from tuner.store import stage_table

OTHER = records.CHOSEN.model_copy(update={"max_num_seqs": 32})


def _trial(number: int, config: EngineConfig) -> TrialRecord:
    burst = records.stage(config, 44, index=20, kind=StageKind.BURST)
    outcome = Measured(facts=records.facts(config), stages=(*climbed(config), burst))
    return records.trial(number, config, outcome=outcome)


def _knee(ladder: ElsewhereLadder) -> object:
    fence = None if ladder.fence is None else round(ladder.fence)
    return find_knee([point_of(stage, fence=fence) for stage in ladder.stages], fence=ladder.fence)


def test_the_table_gives_the_knee_of_its_trial(tmp_path: Path) -> None:
    """A stages.parquet read back is the ladder that was measured, its intervals and its fence included."""
    path = tmp_path / "stages.parquet"
    stage_table([_trial(3, records.CHOSEN), _trial(5, OTHER)]).to_parquet(path)

    for number, config in ((3, records.CHOSEN), (5, OTHER)):
        expected = find_knee(points_of(climbed(config)), fence=config.fence)
        assert _knee(read_ladder([path], trial=number)) == expected
    with pytest.raises(InputError, match=r"name one by --trial\. Trials: 3, 5"):
        read_ladder([path])
    with pytest.raises(InputError, match="no ladder of trial 4"):
        read_ladder([path], trial=4)


def test_one_trials_lines_give_its_knee(tmp_path: Path) -> None:
    """A trial that was cut off has its stages.jsonl only, and that is enough."""
    path = tmp_path / "stages.jsonl"
    path.write_text("\n".join(stage.model_dump_json() for stage in climbed()))

    assert _knee(read_ladder([path])) == find_knee(points_of(climbed()))
    path.write_text(json.dumps({"workload_hash": "x"}))
    with pytest.raises(InputError, match="not stages of this version"):
        read_ladder([path])


def _bench(folder: Path, stages: tuple[StageRecord, ...]) -> None:
    (folder / "bench.json").write_text(bench_answer(stages).model_dump_json())
    (folder / "stages.jsonl").write_text("".join(f"{stage.model_dump_json()}\n" for stage in stages))


def test_a_bench_folder_and_its_file_give_the_knee_of_the_bench(tmp_path: Path) -> None:
    """What `kneetune bench` leaves behind can be asked again, with other limits for one, and by the same fence."""
    _bench(tmp_path, climbed())
    (tmp_path / "memory.parquet").mkdir()
    expected = find_knee(points_of(climbed()), fence=64)

    assert _knee(read_ladder([tmp_path])) == expected
    assert _knee(read_ladder([tmp_path / "bench.json"])) == expected
    assert read_ladder([tmp_path]).fence == 64


def test_a_bench_at_rates_is_read_as_rates(tmp_path: Path) -> None:
    """A rate is never taken for a number of users."""
    rates = {"kind": StageKind.RATE, "loop": "open"}
    stages = tuple(s.model_copy(update=rates | {"load": s.load / 2}) for s in climbed())
    _bench(tmp_path, stages)

    ladder = read_ladder([tmp_path])
    assert ladder.axis is Axis.REQUEST_RATE
    assert [stage.load for stage in ladder.stages] == [stage.load for stage in stages]
    assert all(stage.in_flight is not None for stage in ladder.stages)


def test_a_trials_folder_gives_its_knee_and_its_fence(tmp_path: Path) -> None:
    """Any trial of a run can be looked at alone."""
    (tmp_path / "trial.json").write_text(_trial(3, OTHER).model_dump_json())
    (tmp_path / "asked.json").write_text("{}")

    assert _knee(read_ladder([tmp_path])) == find_knee(points_of(climbed(OTHER)), fence=OTHER.fence)
    failed = Failed(kind=FailureKind.OOM_STARTUP, detail="no memory left")
    (tmp_path / "trial.json").write_text(records.trial(4, OTHER, outcome=failed).model_dump_json())
    with pytest.raises(InputError, match="trial 4 has no ladder, it failed: oom_startup: no memory left"):
        read_ladder([tmp_path])


def test_what_has_not_come_to_its_end_is_read_and_left_alone(tmp_path: Path) -> None:
    """Looking at a bench that runs takes nothing from it, not even the line that is being written."""
    lines = tmp_path / "stages.jsonl"
    written = "\n".join(stage.model_dump_json() for stage in climbed())[:-40]
    lines.write_text(written)

    ladder = read_ladder([tmp_path])
    assert len(ladder.stages) == len(climbed()) - 1
    assert any("has not come to its end" in note for note in ladder.notes)
    assert lines.read_text() == written


def test_a_run_whose_trials_all_failed_says_so(tmp_path: Path) -> None:
    """No ladder is told in words, not by an empty list of trials."""
    with pytest.raises(InputError, match="no trial has measured a ladder"):
        _only("run", None, [])
