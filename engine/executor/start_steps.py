"""Steps that a start takes before any request comes: the largest there can be, and small ones. Pure."""

from __future__ import annotations

from dataclasses import replace

from engine.config import EngineConfig
from engine.request import MAX_LOGPROBS, SamplingParams
from engine.step import ScheduledRequest, StepPlan


def first_token() -> ScheduledRequest:
    """The first token of some request, in the first block."""
    return ScheduledRequest(
        request_id="first",
        token_ids=(0,),
        start=0,
        block_ids=(0,),
        samples=False,
        output_index=0,
        sampling=SamplingParams(max_tokens=1),
    )


def small_steps(config: EngineConfig, max_model_len: int, *, with_decodes: bool) -> tuple[StepPlan, ...]:
    """Steps of one request, at the start of its context and at the end of the longest: attention to many keys is cut.

    Args:
        with_decodes: besides chunks of a prompt also steps of one token.
    """
    chunk = min(2, config.max_num_batched_tokens, max_model_len)
    cut, whole = SamplingParams(max_tokens=1, top_k=2), SamplingParams(max_tokens=1)
    steps = []
    for num_tokens in (chunk, 1) if with_decodes else (chunk,):
        for start, sampling in ((0, cut), (max_model_len - num_tokens, whole)):
            request = replace(
                first_token(),
                token_ids=(0,) * num_tokens,
                start=start,
                block_ids=(0,) * -(-(start + num_tokens) // config.block_size),
                samples=True,
                sampling=sampling,
            )
            steps.append(StepPlan(scheduled=(request,)))
    return tuple(steps)


def words(step: StepPlan) -> str:
    """A step in words, as a reader of the memory table needs it."""
    decodes = sum(len(item.token_ids) == 1 for item in step.scheduled)
    chunks = len(step.scheduled) - decodes
    return f"{step.num_scheduled_tokens} tokens: {decodes} requests decoding, {chunks} in prefill, all sampled"


def largest_steps(config: EngineConfig, max_model_len: int, *, vocab_size: int) -> tuple[StepPlan, ...]:
    """The steps that take the most memory: the whole budget as long chunks, and with all other seats decoding.

    Every request stands at the end of a context of `max_model_len` tokens and has its distribution sorted and its
    log-probabilities told; in the last step one is greedy, which sets the others apart. Penalties take less, as they
    touch only tokens that were seen. All share one block, so that a KV cache for one request is enough.
    """
    seats = config.max_num_seqs
    # A top-k of the whole vocabulary sorts it and cuts nothing.
    dear = SamplingParams(max_tokens=1, seed=0, top_k=vocab_size, num_logprobs=MAX_LOGPROBS)
    block_ids = (0,) * -(-max_model_len // config.block_size)
    steps = []
    for decodes, first in ((0, dear), (seats - 1, dear), (seats - 1, SamplingParams(max_tokens=1, temperature=0.0))):
        scheduled = tuple(
            ScheduledRequest(
                request_id=str(index),
                token_ids=(0,) * length,
                start=max_model_len - length,
                block_ids=block_ids,
                samples=True,
                output_index=0,
                sampling=dear if index else first,
            )
            for index, length in enumerate(_largest_lens(config, max_model_len, decodes=decodes))
        )
        steps.append(StepPlan(scheduled=scheduled))
    return tuple(steps)


def _largest_lens(config: EngineConfig, max_model_len: int, *, decodes: int) -> list[int]:
    """Tokens a request: `decodes` of 1, and the rest of the budget in chunks as long as they come, to the last seat."""
    lens = [1] * decodes
    budget = config.max_num_batched_tokens
    while len(lens) < config.max_num_seqs and sum(lens) < budget:
        lens.append(min(max_model_len, budget - sum(lens)))
    return lens
