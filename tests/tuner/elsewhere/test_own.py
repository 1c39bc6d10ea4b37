"""Our own results give the answer that the run gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes import records
from tests.tuner.analysis.curves import climbed
from tuner.analysis.knee import find_knee, points_of
from tuner.elsewhere.files import ElsewhereLadder, read_ladder
from tuner.elsewhere.stage import point_of
from tuner.engine_config import EngineConfig
from tuner.inputs import InputError
from tuner.records import Measured, StageKind, TrialRecord
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
