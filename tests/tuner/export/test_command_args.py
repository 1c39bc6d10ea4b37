"""What an engine that is data is deployed by: the command that it was measured by."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.fakes.records import resolved_run
from tests.fakes.workers import FakeWorkers
from tests.tuner.engines.test_definition import llama_job
from tests.tuner.test_tuning import Silent
from tuner.commands.export import formats_of, write_exports
from tuner.inputs import InputError
from tuner.store import RunStore
from tuner.tuning import run_tuning


def test_an_engine_without_a_share_is_tuned_and_exported_by_its_own_flags(tmp_path: Path) -> None:
    """Whoever deploys llama.cpp gets its own flags: vLLM's names would be refused by it, or worse, mean something."""
    job = llama_job(budget={"trials": 6, "time": "10h"})
    origin = resolved_run().recommendation.provenance
    store = RunStore.create(tmp_path, job, origin)
    run_tuning(job, store, origin, FakeWorkers(), Silent())
    assert formats_of(job) == ("args",)
    written = write_exports(store, ("args",), tmp_path / "out")
    assert written[-1].name == "runbook.md"
    for profile, path in zip(("production", "protective"), written, strict=False):
        config = getattr(store.recommendation(), profile).config
        line = shlex.split(path.read_text())
        assert line[0] == "true"
        assert line[line.index("--parallel") + 1] == str(config.max_num_seqs)
        assert line[line.index("--batch-size") + 1] == str(config.max_num_batched_tokens)
        assert config.gpu_memory_utilization is None
    runbook = written[-1].read_text()
    assert "`gpu_memory_utilization`" not in runbook
    assert "share down" not in runbook
    with pytest.raises(InputError, match="the run measured llama-cpp"):
        write_exports(store, ("vllm",), tmp_path / "out")
