"""The engine without a server."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from engine import LLM
from engine.config import ConfigError
from engine.request import FinishReason, SamplingParams
from engine.scheduler import RequestRefusedError
from engine.step import StepPlan, StepResult, TokenLogprobs
from tests.fakes.executor import FakeExecutor
from tests.fakes.serving import ROOT

_FAKE = "tests.fakes.executor:FakeExecutor"
_HERE = "tests.engine.test_llm:"


class LogprobExecutor(FakeExecutor):
    """Says how likely each token was."""

    def execute(self, plan: StepPlan) -> StepResult:
        """The same tokens, with made-up log-probabilities."""
        tokens = super().execute(plan).sampled_token_ids
        asked = [item for item in plan.scheduled if item.samples and item.sampling.num_logprobs is not None]
        logprobs = {item.request_id: TokenLogprobs(-float(item.output_index), ()) for item in asked}
        return StepResult(sampled_token_ids=tokens, logprobs=logprobs)


class InterruptedExecutor(FakeExecutor):
    """Somebody presses Ctrl-C in its third step."""

    steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """The same tokens, and once the signal."""
        InterruptedExecutor.steps += 1
        if InterruptedExecutor.steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().execute(plan)


class OnceFaultyExecutor(FakeExecutor):
    """Fails in its second step, then never again."""

    steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """The same tokens, but for one fault."""
        OnceFaultyExecutor.steps += 1
        if OnceFaultyExecutor.steps == 2:
            raise MemoryError("made-up: no memory for the step")
        return super().execute(plan)


@pytest.fixture
def llm() -> Iterator[LLM]:
    """A made-up model, two requests at a time."""
    return LLM("embedded", factory=_FAKE, max_num_seqs=2)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Whoever zips prompts and outputs gets pairs that belong together, though short ones end first."""
    lengths = [9, 1, 5, 2]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    outputs = llm.generate(["hello", [5, 6], [7], "x"], params)
    assert [len(output.token_ids) for output in outputs] == lengths
    assert [output.text for output in outputs] == [llm._tokenizer.decode(output.token_ids) for output in outputs]
    assert [len(output.text) for output in outputs] == lengths
    assert outputs[1].prompt_token_ids == (5, 6)
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)
    assert all(output.logprobs is None for output in outputs)


def test_numpys_token_ids_are_token_ids(llm: LLM) -> None:
    """A batch that comes from an array is run, and told of in plain numbers."""
    (output,) = llm.generate(np.array([[5, 6]], dtype=np.uint8), SamplingParams(max_tokens=1))  # type: ignore[arg-type]
    assert [type(token_id) for token_id in output.prompt_token_ids] == [int, int]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
        *(("top_p", value) for value in (-0.1, 1.1, math.nan)),
        *(("top_k", value) for value in (-1, 2**31)),
        *(("min_p", value) for value in (-0.1, 2.0)),
        *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-3.0, math.nan)),
        *(("repetition_penalty", value) for value in (0.0, -1.0, math.inf)),
        *(("num_logprobs", value) for value in (-1, 21)),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(name: str, value: float) -> None:
    """Without a server too: a temperature of NaN draws the last token of the vocabulary for ever, and says nothing."""
    with pytest.raises(ValueError, match=f"{name}={value} is not from"):
        SamplingParams(**{"max_tokens": 1, name: value})  # type: ignore[arg-type]


def test_one_set_of_parameters_serves_all(llm: LLM) -> None:
    """And none at all means sixteen tokens."""
    assert [len(output.token_ids) for output in llm.generate(["a"] * 3, SamplingParams(max_tokens=4))] == [4, 4, 4]
    assert [len(output.token_ids) for output in llm.generate(["a"])] == [16]
    assert llm.generate([]) == []


def test_logprobs_come_token_by_token() -> None:
    """Only for prompts that asked."""
    llm = LLM("embedded", factory=_HERE + "LogprobExecutor")
    params = [SamplingParams(max_tokens=3, num_logprobs=0), SamplingParams(max_tokens=3)]
    first, second = llm.generate(["a", "b"], params)
    assert first.logprobs is not None
    assert [token.logprob for token in first.logprobs] == [0, -1, -2]
    assert second.logprobs is None


@pytest.mark.parametrize(
    ("prompts", "words"),
    [(["a", []], "prompt 1: .*empty"), ([[1] * 256], "prompt 0: .*256 tokens"), ([[1, 259]], "prompt 0: .*259")],
)
def test_what_can_never_run_is_refused_by_index(llm: LLM, prompts: list[str | list[int]], words: str) -> None:
    """An hour's batch does not end on its last prompt."""
    with pytest.raises(RequestRefusedError, match=words):
        llm.generate(prompts)
    assert len(llm.generate(["a"])) == 1


def test_misuse_is_named(llm: LLM) -> None:
    """A mistyped knob tunes nothing, a text is no list of prompts, and parameters belong to prompts."""
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=1)])
    with pytest.raises(TypeError, match="list"):
        llm.generate("one text")
    with pytest.raises(TypeError, match="prompt 1 is neither text nor a sequence of token ids"):
        llm.generate(["a", [1.5]])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="max_num_seq"):
        LLM("embedded", factory=_FAKE, max_num_seq=2)
    with pytest.raises(ConfigError, match="data_parallel_size=2"):
        LLM("embedded", factory=_FAKE, data_parallel_size=2)
    with pytest.raises(ConfigError, match="cpu_omp_threads_bind"):
        LLM("embedded", factory=_FAKE, cpu_omp_threads_bind="0")


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Ctrl-C as a terminal has it; whoever runs the tests in the background has it switched off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize(
    ("executor", "error"), [("InterruptedExecutor", KeyboardInterrupt), ("OnceFaultyExecutor", MemoryError)]
)
def test_a_batch_that_is_cut_leaves_nothing(executor: str, error: type[BaseException]) -> None:
    """After Ctrl-C in a notebook, or a step that failed, the next cell has the whole engine."""
    llm = LLM("embedded", factory=_HERE + executor, max_num_seqs=2)
    with pytest.raises(error):
        llm.generate(["hello"] * 5, SamplingParams(max_tokens=50))
    assert not llm._core.has_work
    assert llm._core.step().kv_cache_usage == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [output.token_ids for output in llm.generate(["a"], SamplingParams(max_tokens=3))] == [(97, 98, 99)]


def test_importing_it_does_not_import_torch() -> None:
    """A command line that offers it starts without the seconds that torch takes."""
    code = (
        "import sys; from engine import LLM; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
