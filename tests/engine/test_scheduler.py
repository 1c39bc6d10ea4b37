"""The scheduler: budgets, order, preemption, refusal. Named cases first, then random scripts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.request import FinishReason, Request, RequestState, SamplingParams
from engine.scheduler import RequestRefusedError, Scheduler
from engine.step import StepPlan, StepResult
from tests.fakes.executor import EOS_TOKEN_ID, fake_resolved


def make_scheduler(
    *,
    blocks: int = 64,
    block_size: int = 16,
    seqs: int = 8,
    budget: int = 64,
    model_len: int = 256,
    chunked: bool = True,
) -> Scheduler:
    """A scheduler over a cache of `blocks` blocks."""
    config = EngineConfig(
        model="m",
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=model_len,
        block_size=block_size,
        num_gpu_blocks_override=blocks,
        enable_chunked_prefill=chunked,
    )
    return Scheduler(fake_resolved(config))


def make_request(name: str, num_prompt: int, max_tokens: int = 4, *, ignore_eos: bool = True) -> Request:
    """A request whose prompt tokens count up from 1."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Request(request_id=name, prompt_token_ids=tuple(range(1, num_prompt + 1)), sampling=sampling)


def tokens_of(plan: StepPlan) -> list[tuple[str, int]]:
    """How many tokens each request gets, in order."""
    return [(item.request_id, len(item.token_ids)) for item in plan.scheduled]


def run_step(scheduler: Scheduler, token_id: int = 1000) -> StepPlan:
    """Plan one step, commit `token_id` for all that sample, check the books."""
    plan = scheduler.schedule()
    scheduler.commit(
        StepResult(sampled_token_ids={item.request_id: token_id for item in plan.scheduled if item.samples})
    )
    scheduler.check_integrity()
    return plan


def run_until_idle(scheduler: Scheduler, *, most_steps: int = 2000) -> list[StepPlan]:
    """Step until nothing is left; fails where the scheduler makes no progress."""
    plans: list[StepPlan] = []
    while scheduler.num_running or scheduler.num_waiting:
        assert len(plans) < most_steps, "the scheduler hangs"
        plans.append(run_step(scheduler))
    assert scheduler.kv_cache_usage == 0
    return plans


def test_running_requests_come_before_waiting_ones_within_one_budget() -> None:
    """A prompt half done goes on before a new one is admitted, and decodes keep their token."""
    scheduler = make_scheduler(budget=40)
    scheduler.add(make_request("a", 8))
    scheduler.add(make_request("b", 60))
    scheduler.add(make_request("c", 10))
    assert tokens_of(run_step(scheduler)) == [("a", 8), ("b", 32)]
    assert tokens_of(run_step(scheduler)) == [("a", 1), ("b", 28), ("c", 10)]


def test_without_chunking_a_prompt_over_the_rest_of_the_budget_stops_admission() -> None:
    """Nobody behind it overtakes."""
    scheduler = make_scheduler(budget=100, model_len=90, chunked=False)
    for name, num_prompt in (("a", 60), ("b", 50), ("c", 5)):
        scheduler.add(make_request(name, num_prompt))
    assert tokens_of(run_step(scheduler)) == [("a", 60)]
    assert tokens_of(run_step(scheduler)) == [("a", 1), ("b", 50), ("c", 5)]


def test_a_prompt_is_admitted_only_if_all_of_it_fits_the_free_blocks() -> None:
    """A chunk that fits now would be thrown away by a preemption later; those behind wait their turn."""
    scheduler = make_scheduler(blocks=8, budget=96)
    for name, num_prompt in (("a", 80), ("b", 100), ("c", 5)):
        scheduler.add(make_request(name, num_prompt))
    assert tokens_of(run_step(scheduler)) == [("a", 80)]
    run_until_idle(scheduler)
    assert scheduler.num_preemptions == 0


def test_the_last_running_is_preempted_and_resumes_first_with_its_outputs() -> None:
    """Nobody is admitted in the step of a preemption; prompt and outputs are recomputed, then the next token drawn."""
    scheduler = make_scheduler(blocks=4, budget=64)
    victim = make_request("b", 30, max_tokens=8)
    scheduler.add(make_request("a", 30, max_tokens=8))
    scheduler.add(victim)
    scheduler.add(make_request("c", 3))
    plans = []
    while scheduler.num_preemptions == 0:
        plans.append(run_step(scheduler))
    assert plans[-1].preempted == ("b",)
    assert plans[-1].admitted == plans[-1].resumed == ()
    assert victim.state is RequestState.PREEMPTED
    kept = list(victim.output_token_ids)
    assert kept
    plans = run_until_idle(scheduler)
    resuming = next(plan for plan in plans if plan.resumed or plan.admitted)
    assert resuming.resumed == ("b",)
    (share,) = [item for item in resuming.scheduled if item.request_id == "b"]
    assert share.token_ids == (*victim.prompt_token_ids, *kept)
    assert (share.start, share.output_index, share.samples) == (0, len(kept), True)
    assert len(victim.output_token_ids) == 8


def test_a_prompt_larger_than_the_cache_is_refused_with_both_numbers() -> None:
    """200 tokens need 13 blocks of 16 and there are 8; a small request beside it is served."""
    scheduler = make_scheduler(blocks=8)
    with pytest.raises(RequestRefusedError, match=r"(?s)\b13\b.*\b8\b"):
        scheduler.add(make_request("large", 200))
    scheduler.add(make_request("small", 16))
    run_until_idle(scheduler)


def test_a_request_that_outgrows_the_cache_ends_with_length() -> None:
    """Its prompt fits, its outputs do not: it ends where the cache ends, and hangs nobody."""
    scheduler = make_scheduler(blocks=8)
    request = make_request("a", 100, max_tokens=100)
    behind = make_request("b", 16)
    scheduler.add(request)
    scheduler.add(behind)
    run_until_idle(scheduler)
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_known_tokens == 8 * 16 + 1
    assert behind.finish_reason is FinishReason.LENGTH


def test_a_prompt_that_leaves_no_room_for_an_output_is_refused() -> None:
    """The longest prompt is one less than max_model_len; both numbers are named."""
    scheduler = make_scheduler(model_len=64)
    with pytest.raises(RequestRefusedError, match=r"64 tokens, max_model_len is 64"):
        scheduler.add(make_request("a", 64))
    with pytest.raises(RequestRefusedError, match="empty"):
        scheduler.add(make_request("e", 0))
    request = make_request("b", 63, max_tokens=10)
    scheduler.add(request)
    run_until_idle(scheduler)
    assert len(request.output_token_ids) == 1


def test_end_of_sequence_stops_unless_ignored_and_wins_over_length() -> None:
    """Load tests need exact lengths; everybody else needs the model's own end."""
    scheduler = make_scheduler()
    listens, ignores = make_request("a", 5, max_tokens=1, ignore_eos=False), make_request("b", 5, max_tokens=2)
    scheduler.add(listens)
    scheduler.add(ignores)
    run_step(scheduler, EOS_TOKEN_ID)
    assert listens.finish_reason is FinishReason.STOP
    assert ignores.finish_reason is None
    run_step(scheduler, EOS_TOKEN_ID)
    assert ignores.finish_reason is FinishReason.LENGTH


def test_an_abort_while_the_step_runs_frees_at_once_and_drops_the_token() -> None:
    """A client that left costs no further step, and no one else a token."""
    scheduler = make_scheduler()
    request, other = make_request("a", 20), make_request("b", 20)
    scheduler.add(request)
    scheduler.add(other)
    scheduler.schedule()
    scheduler.abort("a")
    scheduler.abort("a")
    scheduler.abort("never seen")
    assert scheduler.kv_cache_usage == pytest.approx(2 / 64)
    outputs = scheduler.commit(StepResult(sampled_token_ids={"a": 5, "b": 6}))
    assert [(output.request_id, output.token_id) for output in outputs] == [("b", 6)]
    assert request.finish_reason is FinishReason.ABORT
    scheduler.check_integrity()


@pytest.mark.parametrize("num_prompt", [15, 16, 17, 32, 33])
def test_block_boundaries_lose_no_token_under_preemption(num_prompt: int) -> None:
    """Each position is computed from the right token and written to a block that is there, around every boundary."""
    # Two prompts fill the cache, so that growing preempts; one request alone always fits.
    blocks = max(2 * -(-num_prompt // 16), -(-(num_prompt + 20) // 16))
    scheduler = make_scheduler(blocks=blocks)
    requests = {name: make_request(name, num_prompt, max_tokens=20) for name in "abc"}
    for request in requests.values():
        scheduler.add(request)
    while scheduler.num_running or scheduler.num_waiting:
        plan = scheduler.schedule()
        for item in plan.scheduled:
            request, stop = requests[item.request_id], item.start + len(item.token_ids)
            assert item.token_ids == request.known_tokens(item.start, stop)
            assert len(item.block_ids) == -(-stop // 16)
        scheduler.commit(
            StepResult(
                sampled_token_ids={item.request_id: 1000 + item.output_index for item in plan.scheduled if item.samples}
            )
        )
        scheduler.check_integrity()
    assert scheduler.num_preemptions > 0
    assert all(request.output_token_ids == list(range(1000, 1020)) for request in requests.values())


@dataclass
class Run:
    """One random script, followed step by step with the properties checked on the way."""

    scheduler: Scheduler
    budget: int
    requests: dict[str, Request] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    """At which output each request draws the end-of-sequence token."""

    refused: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    admitted: list[str] = field(default_factory=list)
    to_resume: list[str] = field(default_factory=list)

    def add(self, num_prompt: int, max_tokens: int, *, eos_after: int) -> None:
        """One more arrival."""
        request = make_request(f"r{len(self.requests)}", num_prompt, max_tokens, ignore_eos=eos_after > 10)
        self.requests[request.request_id] = request
        self.ends[request.request_id] = eos_after
        try:
            self.scheduler.add(request)
        except RequestRefusedError:
            self.refused.add(request.request_id)

    def abort(self, index: int) -> None:
        """Somebody leaves."""
        name = f"r{index}"
        if name in self.requests and self.requests[name].state is not RequestState.FINISHED:
            self.aborted.add(name)
            self.to_resume = [item for item in self.to_resume if item != name]
        self.scheduler.abort(name)

    def step(self) -> None:
        """Plan, check the plan, commit, check the books."""
        plan = self.scheduler.schedule()
        assert plan.num_scheduled_tokens <= self.budget
        assert plan.scheduled or not (self.scheduler.num_running or self.scheduler.num_waiting)
        if plan.preempted:
            assert plan.admitted == plan.resumed == ()
        for name in plan.resumed:
            assert name == self.to_resume.pop(0)
        assert not (plan.admitted and self.to_resume), "a new request overtook a preempted one"
        for name in plan.preempted:
            self.to_resume.insert(0, name)
        self.admitted += plan.admitted
        sampled = {}
        for item in plan.scheduled:
            request, stop = self.requests[item.request_id], item.start + len(item.token_ids)
            assert item.token_ids == request.known_tokens(item.start, stop)
            assert item.samples == (stop == request.num_known_tokens)
            if item.samples:
                is_end = item.output_index == self.ends[item.request_id]
                sampled[item.request_id] = EOS_TOKEN_ID if is_end else 1000 + item.output_index
        self.scheduler.commit(StepResult(sampled_token_ids=sampled))
        self.scheduler.check_integrity()

    def check_end(self) -> None:
        """Everybody was refused, left, or got an unbroken run of tokens; admission was first come, first served."""
        order = {name: index for index, name in enumerate(self.requests)}
        assert self.admitted == sorted(self.admitted, key=order.__getitem__)
        for name, request in self.requests.items():
            if name in self.refused | self.aborted:
                continue
            assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), request
            expected = [1000 + index for index in range(len(request.output_token_ids))]
            end = self.ends[name]
            if end < len(expected):
                expected[end] = EOS_TOKEN_ID
            assert request.output_token_ids == expected
        assert self.scheduler.kv_cache_usage == 0


ARRIVAL = st.tuples(
    st.just("add"), st.one_of(st.integers(1, 12), st.integers(1, 70)), st.integers(1, 40), st.integers(0, 60)
)
ABORT = st.tuples(st.just("abort"), st.integers(0, 12), st.just(0), st.just(0))
STEP = st.tuples(st.just("step"), st.integers(1, 6), st.just(0), st.just(0))
SCRIPT = st.lists(st.one_of(ARRIVAL, ARRIVAL, STEP, STEP, ABORT), max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    script=SCRIPT,
    blocks=st.integers(1, 14),
    seqs=st.integers(1, 6),
    spare=st.integers(0, 60),
    block_size=st.sampled_from([1, 4, 7]),
    chunked=st.booleans(),
)
def test_whatever_arrives_and_leaves_the_promises_hold(
    *, script: list[tuple[str, int, int, int]], blocks: int, seqs: int, spare: int, block_size: int, chunked: bool
) -> None:
    """Budgets are kept, no block leaks, first come is first served, and every request finishes or is refused."""
    model_len = 60
    budget = seqs + spare if chunked else model_len + spare
    scheduler = make_scheduler(
        blocks=blocks, block_size=block_size, seqs=seqs, budget=budget, model_len=model_len, chunked=chunked
    )
    run = Run(scheduler, budget)
    for action, first, second, third in script:
        if action == "add":
            run.add(first, second, eos_after=third)
        elif action == "abort":
            run.abort(first)
        else:
            for _ in range(first):
                run.step()
    for _ in range(20_000):
        if not (scheduler.num_running or scheduler.num_waiting):
            break
        run.step()
    run.check_end()
