"""Replays recorded decisions of vLLM's scheduler through ours and says where they part.

A trace file holds scenarios: a config, requests with their arrivals and aborts, and what the recorded scheduler did in
every step; its own `meta` explains the fields. Recorded block ids start at 1, since vLLM keeps block 0 to itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from engine.request import FinishReason, Request, RequestState, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig
from engine.step import ScheduledRequest, StepPlan, StepResult

_EOS_TOKEN_ID = 0
_FIRST_BLOCK_ID = 1

_Positive = Annotated[int, Field(ge=1)]
_Natural = Annotated[int, Field(ge=0)]
_MOST_BLOCKS = 10_000_000
"""Each takes some hundred bytes here."""

_MOST_TOKENS = 10_000_000
"""Of one run of a prompt, which is written out."""

_Counts = tuple[tuple[str, int], ...]
"""(request id, number) pairs."""


class TraceFileError(ValueError):
    """A file that is not a readable trace file; the message names it and what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedConfig:
    """The recorded scheduler's settings, under vLLM's names."""

    max_num_seqs: _Positive
    max_num_batched_tokens: _Positive
    max_model_len: _Positive
    block_size: _Positive
    num_gpu_blocks: Annotated[int, Field(ge=2, le=_MOST_BLOCKS)]
    """The null block included, which is never handed out."""

    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    long_prefill_token_threshold: _Natural
    max_num_active_seqs: _Positive | None
    watermark: Annotated[float, Field(ge=0, lt=1)]
    scheduler_reserve_full_isl: bool

    def scheduler_config(self) -> SchedulerConfig:
        """The same for our scheduler, as bare as the recorded one: no limit but `max_model_len` ends a request."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_active_seqs or self.max_num_seqs,
            max_num_scheduled_tokens=self.max_num_batched_tokens,
            max_known_tokens=self.max_model_len,
            num_blocks=self.num_gpu_blocks - 1,
            block_size=self.block_size,
            watermark_blocks=int(self.watermark * self.num_gpu_blocks),
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            reserve_full_isl=self.scheduler_reserve_full_isl,
            enable_chunked_prefill=self.enable_chunked_prefill,
            enable_prefix_caching=self.enable_prefix_caching,
            eos_token_ids=(_EOS_TOKEN_ID,),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """A request and the tokens its made-up model draws."""

    id: str
    arrival_step: _Natural
    prompt: Annotated[tuple[tuple[int, Annotated[int, Field(ge=1, le=_MOST_TOKENS)]], ...], Field(min_length=1)]
    """Runs of consecutive token ids: (first, count)."""

    max_tokens: _Positive
    ignore_eos: bool
    eos_at: _Natural | None
    """Index of the output that is the end of sequence."""

    out_start: int
    """The first output; each further one is one more."""

    def request(self) -> Request:
        """What our scheduler gets."""
        runs = (range(first, first + count) for first, count in self.prompt)
        return Request(
            request_id=self.id,
            prompt_token_ids=tuple(chain.from_iterable(runs)),
            sampling=SamplingParams(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos),
        )

    def output(self, index: int) -> int:
        """The token drawn as output `index`."""
        return _EOS_TOKEN_ID if index == self.eos_at else self.out_start + index


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAbort:
    """A client that leaves before `schedule` or, `mid`, while the step runs."""

    step: _Natural
    id: str
    when: Literal["before", "mid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """What a scheduler did in one step; every field is compared."""

    t: int
    sched: _Counts
    """Tokens computed, in the scheduler's order."""

    new: tuple[str, ...]
    resumed: tuple[str, ...]
    preempted: tuple[str, ...]
    finished: tuple[tuple[str, str], ...]
    running: _Counts
    """Computed tokens after the step, in running order."""

    waiting: tuple[str, ...]
    free_sched: int
    """Free blocks after `schedule`."""

    free: int
    """Free blocks after the step."""

    hits: _Counts = ()
    """Tokens found in the prefix cache, of requests admitted here."""

    alloc: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Blocks gained, in table order; all blocks of a request admitted here."""

    free_queue: tuple[int, ...] | None = None
    """Free blocks after the step, the next to be handed out first; None where it was not recorded."""

    cached_free: tuple[int, ...] | None = None
    """Those of them that hold a cached prefix; None where it was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One recording."""

    id: str
    config: RecordedConfig
    requests: tuple[RecordedRequest, ...]
    aborts: tuple[RecordedAbort, ...]
    steps: tuple[RecordedStep, ...]

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(request.id for request in self.requests).items() if count > 1]
        if twice:
            raise ValueError(f"request ids must be unique in {self.id}: {twice}")


@dataclass(frozen=True, slots=True)
class TraceFile:
    """All scenarios of a file."""

    scenarios: tuple[Scenario, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a scenario's replay first parts from its record."""

    scenario: str
    step: int
    field: str
    recorded: object
    ours: object

    def __str__(self) -> str:
        return f"{self.scenario}: step {self.step}, {self.field}: recorded {self.recorded}, ours {self.ours}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """How a whole file's replay went."""

    num_scenarios: int
    num_steps: int
    """Steps recorded."""

    num_agree: int
    """Scenarios whose every step agrees."""

    differences: tuple[Difference, ...]
    """One for each of the others."""

    def __str__(self) -> str:
        head = (
            f"{self.num_agree} of {self.num_scenarios} scenarios agree in every step ({self.num_steps} steps recorded)"
        )
        return "\n".join([head, *map(str, self.differences)])

    def to_json(self) -> str:
        """The same for programs."""
        return TypeAdapter(ReplayReport).dump_json(self, indent=2).decode()


def read_traces(path: Path) -> TraceFile:
    """Read a trace file.

    Raises:
        TraceFileError: if there is none, or it is not JSON, lacks a field, or holds a value that cannot be.
    """
    try:
        return TypeAdapter(TraceFile).validate_json(path.read_bytes())
    except OSError as error:
        raise TraceFileError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole file"
        raise TraceFileError(f"{path} is not a file of scheduler traces: {place}: {first['msg']}") from error


def replay_file(traces: TraceFile) -> ReplayReport:
    """Replay every scenario from its start to its first difference."""
    differences = tuple(found for scenario in traces.scenarios if (found := replay(scenario)) is not None)
    return ReplayReport(
        num_scenarios=len(traces.scenarios),
        num_steps=sum(len(scenario.steps) for scenario in traces.scenarios),
        num_agree=len(traces.scenarios) - len(differences),
        differences=differences,
    )


def replay(scenario: Scenario) -> Difference | None:
    """Replay one scenario; the first difference, None if there is none.

    After every step the scheduler's own books are checked too; a fault there is a difference in `integrity`.
    """
    replayed = _Replay(scenario)
    for step, recorded in enumerate(scenario.steps):
        ours = replayed.step(step)
        for name in (item.name for item in fields(RecordedStep)):
            theirs = getattr(recorded, name)
            if theirs is not None and theirs != getattr(ours, name):
                return Difference(
                    scenario=scenario.id, step=step, field=name, recorded=theirs, ours=getattr(ours, name)
                )
        try:
            replayed.scheduler.check_integrity()
        except AssertionError as fault:
            return Difference(scenario=scenario.id, step=step, field="integrity", recorded=None, ours=str(fault))
    return None


@dataclass(slots=True)
class _Replay:
    """A scenario on its way through our scheduler."""

    scenario: Scenario
    scheduler: Scheduler = field(init=False)
    requests: dict[str, Request] = field(default_factory=dict)
    """All that have arrived."""

    num_blocks: dict[str, int] = field(default_factory=dict)
    """Length of each one's block table when it was last scheduled."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.scenario.config.scheduler_config())

    def step(self, t: int) -> RecordedStep:
        """Do what happened at step `t`: arrivals, aborts, a plan, aborts while it runs, its outcome."""
        scheduler = self.scheduler
        for recorded in self.scenario.requests:
            if recorded.arrival_step == t:
                self.requests[recorded.id] = recorded.request()
                scheduler.add(self.requests[recorded.id])
        finished = self._abort(t, "before")
        plan = scheduler.schedule()
        num_free = scheduler.num_free_blocks
        finished += self._abort(t, "mid")
        outputs = scheduler.commit(StepResult(sampled_token_ids=self._draw(plan)))
        finished += [(output.request_id, output.finish_reason.value) for output in outputs if output.finish_reason]
        after = scheduler.snapshot()
        admitted = {*plan.admitted, *plan.resumed}
        hits = ((item.request_id, item.start) for item in plan.scheduled if item.request_id in admitted and item.start)
        return RecordedStep(
            t=t,
            sched=tuple((item.request_id, len(item.token_ids)) for item in plan.scheduled),
            new=plan.admitted,
            resumed=plan.resumed,
            preempted=plan.preempted,
            finished=tuple(finished),
            running=after.running,
            waiting=after.waiting,
            free_sched=num_free,
            free=len(after.free_block_ids),
            hits=tuple(hits),
            alloc=self._gained(plan.scheduled, admitted),
            free_queue=_recorded_ids(after.free_block_ids),
            cached_free=_recorded_ids(after.cached_free_block_ids),
        )

    def _abort(self, t: int, when: Literal["before", "mid"]) -> list[tuple[str, str]]:
        """Abort whom the record says leaves now; those who did leave."""
        leaving = [abort.id for abort in self.scenario.aborts if (abort.step, abort.when) == (t, when)]
        present = [
            name for name in leaving if name in self.requests and self.requests[name].state is not RequestState.FINISHED
        ]
        for name in present:
            self.scheduler.abort(name)
        return [(name, FinishReason.ABORT.value) for name in present]

    def _draw(self, plan: StepPlan) -> dict[str, int]:
        """The made-up model's next tokens."""
        outputs = {item.request_id: item.output_index for item in plan.scheduled if item.samples}
        return {
            recorded.id: recorded.output(outputs[recorded.id])
            for recorded in self.scenario.requests
            if recorded.id in outputs
        }

    def _gained(
        self, scheduled: Sequence[ScheduledRequest], admitted: set[str]
    ) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The blocks each request has now and had not when it was last scheduled."""
        gained: list[tuple[str, tuple[int, ...]]] = []
        for item in scheduled:
            num_before = 0 if item.request_id in admitted else self.num_blocks[item.request_id]
            self.num_blocks[item.request_id] = len(item.block_ids)
            if len(item.block_ids) > num_before:
                gained.append((item.request_id, _recorded_ids(item.block_ids[num_before:])))
        return tuple(gained)


def _recorded_ids(blocks: Sequence[int]) -> tuple[int, ...]:
    return tuple(block + _FIRST_BLOCK_ID for block in blocks)
