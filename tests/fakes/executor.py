"""An executor without a model: made-up tokens, the same for the same request, at once or after a timed wait."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from engine.config import ConfigError, EngineConfig, MemoryBudget, ResolvedConfig, check_against_model
from engine.step import ScheduledRequest, StepPlan, StepResult, TokenLogprobs

EOS_TOKEN_ID = 0
NUM_BLOCKS = 64
SECOND_DEVICE = "auto:1"
"""What the second of several cores is told to compute on."""


def fake_resolved(asked: EngineConfig, *, eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,)) -> ResolvedConfig:
    """What an engine of 64 blocks (or the override) and a model of 256 tokens would decide."""
    max_model_len = asked.max_model_len or 256
    return ResolvedConfig(
        asked=asked,
        served_model_name=asked.served_model_name or asked.model,
        max_model_len=max_model_len,
        dtype="float32",
        device="cpu",
        num_gpu_blocks=asked.num_gpu_blocks_override or NUM_BLOCKS,
        kv_block_bytes=1000,
        memory=MemoryBudget(
            total_bytes=100_000,
            free_bytes=95_000,
            requested_bytes=90_000,
            weights_bytes=10_000,
            activation_peak_bytes=9_000,
            request_buffers_bytes=4_000,
            non_torch_bytes=3_000,
            kv_cache_bytes=64_000,
        ),
        eos_token_ids=eos_token_ids,
        vocab_size=259,
        captures_graphs=False,
        warnings=tuple(check_against_model(asked, max_model_len=max_model_len)),
    )


def next_token(item: ScheduledRequest) -> int:
    """A printable byte that depends on the position only: `a`, `b`, … `z`, `a`; never the end of sequence."""
    return ord("a") + item.output_index % 26


def made_up_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The token before the one drawn is the likeliest, then the one drawn, then those before them."""
    order = (token_id - 1, token_id, *range(token_id - 2, token_id - 20, -1))
    return TokenLogprobs(-1.0, tuple((other, -float(rank)) for rank, other in enumerate(order[:count])))


class FakeExecutor:
    """Answers at once."""

    def __init__(self, config: EngineConfig) -> None:
        self.resolved = fake_resolved(config)

    def execute(self, plan: StepPlan) -> StepResult:
        """One made-up token for every request that samples, and how likely it was for those that ask."""
        sampling = [item for item in plan.scheduled if item.samples]
        return StepResult(
            sampled_token_ids={item.request_id: next_token(item) for item in sampling},
            logprobs={
                item.request_id: made_up_logprobs(next_token(item), item.sampling.num_logprobs)
                for item in sampling
                if item.sampling.num_logprobs is not None
            },
        )


class SmallVocabularyExecutor(FakeExecutor):
    """Knows fewer tokens than the tokenizer has: `a` is token 97 and still one of them, `z` is 122."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.resolved = replace(self.resolved, vocab_size=110)


class SlowExecutor(FakeExecutor):
    """Takes 20 ms a step, so that a test can act while requests run."""

    def execute(self, plan: StepPlan) -> StepResult:
        """The same tokens, later."""
        time.sleep(0.02)
        return super().execute(plan)


class UnevenExecutor(SlowExecutor):
    """Has fewer blocks behind the second core."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        if config.device == SECOND_DEVICE:
            self.resolved = replace(self.resolved, num_gpu_blocks=40)


class QuickExecutor(FakeExecutor):
    """Takes 1 ms a step: requests queue, and clients find time to leave."""

    def execute(self, plan: StepPlan) -> StepResult:
        """The same tokens, a little later."""
        time.sleep(0.001)
        return super().execute(plan)


class MarkingExecutor(FakeExecutor):
    """Makes an empty file, named as the model is, when it has drawn the last token of all that run."""

    def execute(self, plan: StepPlan) -> StepResult:
        """The same tokens, and the mark."""
        if all(item.output_index == item.sampling.max_tokens - 1 for item in plan.scheduled):
            Path(self.resolved.asked.model).touch()
        return super().execute(plan)


class SecondLoadsForEver(FakeExecutor):
    """Is ready at once, except behind the second core."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        if config.device == SECOND_DEVICE:
            load_for_ever(config)


class SecondRefuses(FakeExecutor):
    """Refuses its config behind the second core; behind a third it loads for ever."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        if config.device == SECOND_DEVICE:
            raise ConfigError(f"made up to be refused on {config.device}")
        if config.device != "auto":
            load_for_ever(config)


class CrashingExecutor(FakeExecutor):
    """Fails at the third output."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Two tokens, then an error."""
        if any(item.output_index >= 2 for item in plan.scheduled):
            raise RuntimeError("made-up fault in the forward pass")
        return super().execute(plan)


class OutOfMemoryExecutor(FakeExecutor):
    """Runs out of memory at the third output."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Two tokens, then no memory."""
        if any(item.output_index >= 2 for item in plan.scheduled):
            raise MemoryError("made-up: no memory for the step")
        return super().execute(plan)


def refuse_config(config: EngineConfig) -> FakeExecutor:
    """An executor that finds the config unusable."""
    raise ConfigError(f"block_size={config.block_size} is made up to be refused")


def refuse_for_no_kv_memory(config: EngineConfig) -> FakeExecutor:
    """An executor with no room for one sequence."""
    from engine.memory import NoKvMemoryError

    raise NoKvMemoryError(f"block_size={config.block_size}: made-up lack of room")


def fail_to_load(config: EngineConfig) -> FakeExecutor:
    """An executor with a fault of its own."""
    raise RuntimeError(f"made-up fault while loading {config.model}")


def run_out_of_memory(config: EngineConfig) -> FakeExecutor:
    """An executor that asks for more than there is."""
    raise MemoryError(f"made-up: no memory for {config.model}")


def refuse_for_too_much_memory(config: EngineConfig) -> FakeExecutor:
    """An executor whose share is more than is free."""
    from engine.memory import NotEnoughMemoryError

    raise NotEnoughMemoryError(f"block_size={config.block_size}: made-up lack of free memory")


def load_for_ever(config: EngineConfig) -> FakeExecutor:
    """An executor that says it is loading, and is never ready."""
    sys.stderr.write(f"loading {config.model}\n")
    sys.stderr.flush()
    while True:
        time.sleep(60)
