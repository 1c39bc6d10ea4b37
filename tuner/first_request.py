"""One request before anything is measured: does the server count tokens as they are sent, and give as many as asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tuner.inputs import InputError
from tuner.load.arrivals import Closed
from tuner.load.workload import Workload
from tuner.measure.latency import e2e_s
from tuner.measure.load import load_on
from tuner.measure.spec import StageSpec, Target
from tuner.measure.validity import MAX_PROMPT_DEVIATION, MIN_OUTPUT_RATIO
from tuner.records import RequestRecord, StageKind

ANSWER_S = 300.0
"""Longest an unloaded server may take for one request. Unit: seconds."""

_POLL_S = 0.02
_ENTROPY = 2**32 - 1
"""In place of a trial's number: no stage sends this prompt again."""


async def check_first_request(target: Target, workload: Workload, *, seed: int, tell: Callable[[str], None]) -> float:
    """Send one request of the workload as stages will send theirs, and compare what comes back with what was asked.

    Returns:
        How long it took. Unit: seconds.

    Raises:
        InputError: where it fails, or is so far off that every stage would be measured in vain.
    """
    one_user = StageSpec(
        index=0,
        kind=StageKind.LADDER,
        load=1,
        max_num_seqs=1,
        workload=workload.model_copy(update={"arrivals": Closed()}),
        entropy=(seed, _ENTROPY),
    )
    user = await load_on(one_user, target)
    async with user:
        for _ in range(round(ANSWER_S / _POLL_S)):
            await asyncio.sleep(_POLL_S)
            if user.log.records:
                break
        else:
            raise InputError(f"{target.endpoint.url}: one request was not answered in {ANSWER_S:g} s")
    record = user.log.records[0]
    judge(record, sent_prompt_tokens=user.log.sent[record.index].num_tokens, url=target.endpoint.url, tell=tell)
    return e2e_s(record)


def judge(record: RequestRecord, *, sent_prompt_tokens: int, url: str, tell: Callable[[str], None]) -> None:
    """Refuse a server that cannot be measured with such requests; tell of what is odd and no obstacle.

    Raises:
        InputError: naming what was asked and what came.
    """
    if record.error is not None:
        raise InputError(f"{url}: the first request failed: {record.error}")
    if record.token_source == "chunks":
        raise InputError(
            f"{url}: the server counts no tokens in its stream (stream_options.include_usage), so figures would be "
            "estimates: start it so that it does"
        )
    counted, given, asked = record.num_prompt_tokens, record.num_output_tokens, record.asked_output_tokens
    if abs(counted - sent_prompt_tokens) > MAX_PROMPT_DEVIATION * sent_prompt_tokens:
        raise InputError(
            f"{url}: a prompt of {sent_prompt_tokens} tokens was sent and the server counts {counted}, more than "
            f"{MAX_PROMPT_DEVIATION:.0%} off: it is not served this workload; send prompts it takes as they are"
        )
    if given < MIN_OUTPUT_RATIO * asked:
        raise InputError(
            f"{url}: {asked} output tokens were asked for with ignore_eos and {given} came, so stages would not be "
            "comparable: let the server honour ignore_eos, or ask for fewer tokens (output_len of the workload)"
        )
    if counted != sent_prompt_tokens:
        tell(f"the server counts {counted} tokens in a prompt of {sent_prompt_tokens}; its count is used")
