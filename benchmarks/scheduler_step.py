"""What the scheduler costs a step: planning and committing decodes, nothing computed in between."""

from __future__ import annotations

from statistics import median
from time import perf_counter

from engine.config import EngineConfig
from engine.executor.clock import VirtualClock
from engine.executor.simulated import SimulatedExecutor
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig
from engine.step import StepResult


def scheduler_step_ms(*, running: int, prompt_tokens: int = 128, steps: int = 300) -> float:
    """Median milliseconds of `schedule` and `commit` with `running` requests that all decode."""
    config = EngineConfig(
        model="embedded", executor="simulated", law="h100-8b", max_num_seqs=running, max_num_batched_tokens=8192
    )
    resolved = SimulatedExecutor(config, clock=VirtualClock()).resolved
    scheduler = Scheduler(SchedulerConfig.from_resolved(resolved))
    sampling = SamplingParams(max_tokens=10 * steps, ignore_eos=True)
    for index in range(running):
        prompt = tuple((index + position) % 256 for position in range(prompt_tokens))
        scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    spent_ms: list[float] = []
    while len(spent_ms) < steps:
        began = perf_counter()
        plan = scheduler.schedule()
        planned = perf_counter()
        result = StepResult(sampled_token_ids={item.request_id: 7 for item in plan.scheduled if item.samples})
        committing = perf_counter()
        scheduler.commit(result)
        if plan.num_scheduled_tokens == running:
            spent_ms.append(1000 * (planned - began + perf_counter() - committing))
    return median(spent_ms)
