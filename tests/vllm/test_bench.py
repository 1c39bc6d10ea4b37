"""A real vLLM that somebody else started, measured as it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.conftest import MakeJob
from tuner.bench_answer import BenchAnswer
from tuner.engines.starting import serving
from tuner.engines.vllm import VllmEngine
from tuner.parameters import SearchedValues

pytestmark = pytest.mark.vllm

WORKLOAD = """
name: short
input_len: {kind: fixed, tokens: 32}
output_len: {kind: fixed, tokens: 16}
"""


def test_a_load_past_the_fence_it_tells_of_is_said_to_queue(make_job: MakeJob, tmp_path: Path) -> None:
    """Who asks for sixteen streams of a server with four seats measures its queue: the answer says from where on."""
    job = make_job()
    config = job.config(SearchedValues(max_num_seqs=4, max_num_batched_tokens=256, gpu_memory_utilization=0.1))
    (tmp_path / "short.yaml").write_text(WORKLOAD)
    with serving(VllmEngine(), job.model, config, job.engine, served_model_name="m", directory=tmp_path) as server:
        asked = ["--workload", "short.yaml", "--loads", "2,16", "--time", "2s", "--json"]
        bench = subprocess.run(
            [sys.executable, "-m", "tuner", "bench", server.base_url, *asked],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            check=False,
        )
    answer = BenchAnswer.model_validate_json(bench.stdout)
    assert (answer.fence, answer.fence_source) == (4, "told")
    assert {stage.load: stage.fenced for stage in answer.stages} == {2: False, 16: True}
    assert any("load 16 is past the fence: max_num_seqs lets 4 requests run" in each for each in answer.warnings)
