"""What the installed vLLM says before anything is launched."""

from __future__ import annotations

import os

import pytest

from tests.vllm.conftest import MakeJob
from tuner.engines.vllm import VLLM
from tuner.engines.vllm_install import Question, ask
from tuner.inputs import InputError
from tuner.job import EngineSpec

pytestmark = pytest.mark.vllm


def test_its_version_and_its_own_defaults_are_asked_of_it(make_job: MakeJob) -> None:
    """Trial 0 is what a user gets unasked on this machine, and the gain is stated against that."""
    installed = VLLM.installed(make_job())
    assert installed.version == "0.32.0"
    three = installed.defaults
    assert (three.max_num_seqs, three.max_num_batched_tokens, three.gpu_memory_utilization) == (128, 2048, 0.92)


def test_a_flag_it_does_not_have_is_named_with_its_version(vllm_command: str, model: str) -> None:
    """A valve of a newer version is an error in half a minute, not twelve launches that exit at once."""
    environment = VLLM.environment(os.environ, model, EngineSpec(name="vllm"))
    question = Question(
        command=(vllm_command,),
        flags=frozenset({"--max-num-seqs", "--max-num-queued-reqs", "--max-num-wishes"}),
        arguments=("--model", model),
        environment=tuple(sorted(environment.items())),
    )
    with pytest.raises(InputError, match=r"the vLLM 0\.32\.0 of .* does not know --max-num-wishes:"):
        ask(question)


def test_a_fixed_value_that_it_refuses_is_an_error_before_the_first_launch(make_job: MakeJob) -> None:
    """A length beyond the model's fails every setting alike: the job is wrong, and says which value."""
    job = make_job(engine={"fixed": {"max_model_len": 4096, "dtype": "float32"}})
    with pytest.raises(InputError, match=r"User-specified max_model_len \(4096\)"):
        VLLM.installed(job)
