"""The study learns from failures, repeats nothing, and keeps everything in its journal."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import get_args

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tuner.space import SamplerName, SearchedValues, SearchSpace, load_space
from tuner.study import STUDY_NAME, Objectives, Study

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


def _space(seqs: list[int]) -> SearchSpace:
    space = load_space("cpu").model_dump(mode="json")
    space["parameters"]["max_num_seqs"]["choices"] = seqs
    space["parameters"]["max_num_batched_tokens"]["choices"] = [2048]
    space["parameters"]["gpu_memory_utilization"]["choices"] = [0.5, 0.9]
    return load_space(space)


def _stored(journal: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=STUDY_NAME, storage=JournalStorage(JournalFileBackend(str(journal)))).trials


def test_no_setting_is_proposed_twice_and_a_small_space_ends(tmp_path: Path) -> None:
    """Launches are dear: six settings are six proposals, then the study says it is done."""
    study = Study(_space([16, 32, 64]), tmp_path / "study.journal", seed=0)
    seen = []
    while (proposal := study.ask()) is not None:
        seen.append(proposal.values)
        study.tell_measured(proposal, Objectives(100.0, 10.0, 5.0), {"itl": -0.1})
    assert len(seen) == len(set(seen)) == 6


def test_queued_settings_come_first_even_outside_the_choices(tmp_path: Path) -> None:
    """The engine's defaults are measured although the space does not hold them."""
    study = Study(_space([16, 32]), tmp_path / "study.journal", seed=0)
    odd = SearchedValues(max_num_seqs=256, max_num_batched_tokens=8192, gpu_memory_utilization=0.91)
    inside = SearchedValues(max_num_seqs=32, max_num_batched_tokens=2048, gpu_memory_utilization=0.9)
    study.enqueue(odd, "defaults")
    study.enqueue(inside, "cautious_start")
    study.enqueue(odd, "again")
    first, second = study.ask(), study.ask()
    assert first is not None
    assert second is not None
    assert (first.values, first.origin) == (odd, "defaults")
    assert (second.values, second.origin) == (inside, "cautious_start")


def test_failures_are_told_as_violated_constraints_not_as_zeros(tmp_path: Path) -> None:
    """A setting that crashed must not look like a slow one, nor like one nobody tried."""
    journal = tmp_path / "study.journal"
    study = Study(_space([16, 32]), journal, seed=0)
    good, bad = study.ask(), study.ask()
    assert good is not None
    assert bad is not None
    study.tell_measured(good, Objectives(100.0, 10.0, 5.0), {"itl": -0.1})
    study.tell_infeasible(bad, {"works": 1.0}, "no_kv_memory: 3 blocks")
    kept = {trial.number: trial for trial in _stored(journal)}
    assert kept[good.number].values == [100.0, 10.0, 5.0]
    assert kept[bad.number].values is None
    assert kept[bad.number].user_attrs["reason"] == "no_kv_memory: 3 blocks"
    assert any("works" in key and value == 1.0 for key, value in kept[bad.number].system_attrs.items())


def test_one_seed_proposes_one_sequence(tmp_path: Path) -> None:
    """A run can be repeated; seed 0 is a seed like any other."""

    def proposals(name: str, seed: int) -> list[SearchedValues]:
        study = Study(load_space("cpu"), tmp_path / name, seed=seed)
        values = []
        for _ in range(8):
            proposal = study.ask()
            assert proposal is not None
            values.append(proposal.values)
            study.tell_measured(proposal, Objectives(proposal.values.max_num_seqs, 10.0, 5.0), {"itl": -0.1})
        return values

    assert proposals("a", 0) == proposals("b", 0)
    assert proposals("c", 0) != proposals("d", 1)


def test_a_region_that_always_fails_is_left(tmp_path: Path) -> None:
    """Half of this space dies; under half of the launches go there."""
    space = load_space("cpu").model_dump(mode="json")
    space["parameters"]["max_num_seqs"]["choices"] = list(range(8, 648, 8))
    space["parameters"]["max_num_batched_tokens"]["choices"] = [2048]
    space["parameters"]["gpu_memory_utilization"]["choices"] = [0.9, 0.92]
    study = Study(load_space(space), tmp_path / "study.journal", seed=0)
    crashed = 0
    for _ in range(30):
        proposal = study.ask()
        assert proposal is not None
        seqs = proposal.values.max_num_seqs
        if seqs > 320:
            crashed += 1
            study.tell_infeasible(proposal, {"works": 1.0}, "oom_startup")
        else:
            study.tell_measured(proposal, Objectives(seqs, 10.0 + seqs, 5.0), {"itl": -0.1})
    assert crashed <= 12


@pytest.mark.parametrize("sampler", get_args(SamplerName))
def test_every_sampler_goes_through_a_small_space_and_repeats_nothing(tmp_path: Path, sampler: SamplerName) -> None:
    """Whoever prefers another sampler gets every setting once, by one seed in one sequence."""
    sequences = []
    for name in ("first", "second"):
        study = Study(_space([16, 32, 64, 128]), tmp_path / name, seed=3, sampler=sampler)
        seen = []
        while (proposal := study.ask()) is not None:
            seen.append(proposal.values)
            if proposal.values.max_num_seqs == 128:
                study.tell_infeasible(proposal, {"works": 1.0}, "out of memory")
            else:
                throughput = float(proposal.values.max_num_seqs)
                study.tell_measured(proposal, Objectives(throughput, 10.0, 5.0), {"itl": -0.1})
        sequences.append(seen)
    assert len(sequences[0]) == len(set(sequences[0])) == 8
    assert sequences[0] == sequences[1]


def test_a_study_with_many_askers_keeps_every_row(tmp_path: Path) -> None:
    """24 workers of 15 trials each, one owner of the journal: 360 rows, each told, none twice."""
    space = _space(list(range(1, 201)))
    study, lock = Study(space, tmp_path / "study.journal", seed=0, sampler="random"), threading.Lock()

    def work() -> None:
        for _ in range(15):
            with lock:
                proposal = study.ask()
            assert proposal is not None
            with lock:
                study.tell_measured(proposal, Objectives(1.0, 1.0, 1.0), {"itl": -0.1})

    workers = [threading.Thread(target=work) for _ in range(24)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done = [trial for trial in _stored(tmp_path / "study.journal") if trial.state is TrialState.COMPLETE]
    assert len(done) == 360
    assert len({str(trial.user_attrs["values"]) for trial in done}) == 360


def test_a_journal_cut_in_the_middle_of_a_line_with_its_lock_left_is_gone_on_with(tmp_path: Path) -> None:
    """Kill -9 while Optuna writes costs the line it wrote, and no wait for a lock that nobody holds."""
    journal = tmp_path / "study.journal"
    study = Study(_space([16, 32]), journal, seed=0)
    first, second = study.ask(), study.ask()
    assert first is not None
    assert second is not None
    study.tell_measured(first, Objectives(1.0, 1.0, 1.0), {"itl": -0.1})
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "worker_')
    Path(f"{journal}.lock").touch()

    again = Study(_space([16, 32]), journal, seed=0)
    assert again.num_left_open == 1
    left = again.ask()
    assert left is not None
    assert (left.values, left.origin) == (second.values, second.origin)
    again.tell_measured(left, Objectives(1.0, 1.0, 1.0), {"itl": -0.1})
    rest = [proposal.values for proposal in iter(again.ask, None)]
    assert len({first.values, second.values, *rest}) == 4
