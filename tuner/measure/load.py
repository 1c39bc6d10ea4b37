"""The load of a stage: which generator its workload asks for, and whether the server takes its prompts as they are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, repeat

import numpy as np

from tuner.load.arrivals import AllAtOnce, Closed, open_times_s, think_times_s
from tuner.load.generator import ClosedLoop
from tuner.load.log import LoadLog
from tuner.load.open_loop import OpenLoop
from tuner.load.probe import calibrate, tells_token_ids
from tuner.load.prompts import conversations
from tuner.load.workload import WorkloadError
from tuner.measure.spec import StageSpec, Target
from tuner.measure.validity import MAX_PROMPT_DEVIATION

Generator = ClosedLoop | OpenLoop


async def load_on(spec: StageSpec, target: Target) -> Generator:
    """The generator of a stage, ready to be entered; for a workload of text, the server is asked how long words are.

    Raises:
        WorkloadError: where the workload does not fit the engine.
    """
    workload = spec.workload
    workload.check_fits(target.max_model_len)
    is_text = workload.api == "chat"
    prompts = conversations(
        workload,
        token_ids=target.token_ids,
        max_model_len=target.max_model_len,
        entropy=spec.entropy,
        text=await calibrate(target.endpoint, target.model) if is_text else None,
        asks_token_ids=workload.has_turns
        and not is_text
        and await tells_token_ids(target.endpoint, target.model, token_ids=target.token_ids),
    )
    # Another branch of the stage's entropy than the prompts', so that times and lengths are independent.
    rng = np.random.default_rng(np.random.SeedSequence([*spec.entropy, len(spec.entropy)]))
    match workload.arrivals:
        case Closed(think_time=think_time_s):
            return ClosedLoop(
                endpoint=target.endpoint,
                model=target.model,
                load=int(spec.load),
                prompts=prompts,
                think_times_s=think_times_s(think_time_s, rng),
            )
        case AllAtOnce():
            times_s: Iterator[float] = repeat(0.0)
            prompts = islice(prompts, int(spec.load))
        case arrivals:
            trace = workload.fitting_trace(target.max_model_len)
            trace_s = None if trace is None else trace.times_s
            times_s = open_times_s(arrivals, rate_rps=spec.load, rng=rng, trace_s=trace_s)
    return OpenLoop(endpoint=target.endpoint, model=target.model, prompts=prompts, times_s=times_s)


def check_prompt_lengths(log: LoadLog) -> None:
    """Refuse to measure where the server counted other prompts than were meant.

    Raises:
        WorkloadError: naming both lengths.
    """
    ended = [record for record in log.records if record.error is None and not record.unfinished]
    if not ended:
        return
    meant = float(np.mean([log.sent[record.index].num_tokens for record in ended]))
    counted = float(np.mean([record.num_prompt_tokens for record in ended]))
    if abs(counted - meant) > MAX_PROMPT_DEVIATION * meant:
        raise WorkloadError(
            f"prompts were to have {meant:g} tokens on average and the server counts {counted:g}, more than "
            f"{MAX_PROMPT_DEVIATION:.0%} off: another tokenizer or a chat template; send token ids (api: completions) "
            "or longer prompts"
        )
