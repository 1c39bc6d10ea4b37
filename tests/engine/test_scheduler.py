"""The scheduler: budgets, order, preemption, prefix cache, refusal. Named cases first, then random scripts.

That every decision is vLLM's is shown by `test_replay.py`; here stands what that is worth to a user, and what holds
whatever arrives.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import EngineConfig, ResolvedConfig
from engine.request import FinishReason, Request, RequestState, SamplingParams
from engine.scheduler import RequestRefusedError, Scheduler, SchedulerConfig, refusal
from engine.step import ScheduledRequest, StepPlan, StepResult
from tests.fakes.executor import EOS_TOKEN_ID, fake_resolved


def make_resolved(*, blocks: int = 64, budget: int = 64, model_len: int = 256, **knobs: object) -> ResolvedConfig:
    """An engine of `blocks` blocks of 16 tokens and at most 8 running requests, unless `knobs` say otherwise."""
    given: dict[str, object] = {"max_num_seqs": 8} | knobs
    config = EngineConfig(
        model="m",
        max_num_batched_tokens=budget,
        max_model_len=model_len,
        num_gpu_blocks_override=blocks,
        **given,  # type: ignore[arg-type]
    )
    return fake_resolved(config)


def make_scheduler(*, blocks: int = 64, budget: int = 64, model_len: int = 256, **knobs: object) -> Scheduler:
    """The scheduler of such an engine, without prefix caching unless it is asked for."""
    knobs = {"enable_prefix_caching": False, **knobs}
    resolved = make_resolved(blocks=blocks, budget=budget, model_len=model_len, **knobs)
    return Scheduler(SchedulerConfig.from_resolved(resolved))


def make_request(
    name: str, num_prompt: int, max_tokens: int = 4, *, ignore_eos: bool = True, first_token: int = 1
) -> Request:
    """A request whose prompt tokens count up from `first_token`."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    prompt = tuple(range(first_token, first_token + num_prompt))
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)


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


def run_lengths(scheduler: Scheduler, request: Request) -> list[int]:
    """Run one more request to its end; the tokens it computes step by step."""
    scheduler.add(request)
    plans = run_until_idle(scheduler)
    return [num_tokens for plan in plans for name, num_tokens in tokens_of(plan) if name == request.request_id]


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
    scheduler = make_scheduler(budget=100, model_len=90, enable_chunked_prefill=False)
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
    reason = refusal(make_resolved(blocks=8), 200)
    assert reason is not None
    assert "needs 13 KV blocks" in reason
    assert "the cache has 8" in reason
    scheduler = make_scheduler(blocks=8)
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
    resolved = make_resolved(model_len=64)
    assert "64 tokens, max_model_len is 64" in str(refusal(resolved, 64))
    assert "empty" in str(refusal(resolved, 0))
    assert refusal(resolved, 63) is None
    scheduler = make_scheduler(model_len=64)
    request = make_request("b", 63, max_tokens=10)
    scheduler.add(request)
    run_until_idle(scheduler)
    assert len(request.output_token_ids) == 1


def test_a_request_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    """Two streams under one name would get each other's tokens."""
    scheduler = make_scheduler()
    request = make_request("a", 5)
    scheduler.add(request)
    with pytest.raises(RequestRefusedError, match="'a' is in use"):
        scheduler.add(make_request("a", 7))
    run_until_idle(scheduler)
    assert len(request.output_token_ids) == 4
    scheduler.add(make_request("a", 7))


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


def test_an_abort_costs_the_same_however_many_wait() -> None:
    """A client that leaves with its thousands of choices would hold all others up for minutes."""

    def calls_of_an_abort(num_waiting: int) -> int:
        scheduler = make_scheduler()
        for number in range(num_waiting):
            scheduler.add(make_request(str(number), 1))
        calls: list[str] = []
        sys.setprofile(lambda _frame, event, _: calls.append(event))
        try:
            scheduler.abort("5")
        finally:
            sys.setprofile(None)
        return len(calls)

    assert calls_of_an_abort(500) == calls_of_an_abort(10)


def test_every_knob_reaches_the_scheduler() -> None:
    """A setting that is accepted and not acted on would be tuned for nothing."""
    resolved = make_resolved(blocks=30, budget=512, max_num_seqs=16, block_size=8, enable_prefix_caching=False)
    default = SchedulerConfig.from_resolved(resolved)
    assert default == SchedulerConfig(
        max_num_seqs=16,
        max_num_scheduled_tokens=512,
        max_known_tokens=30 * 8 + 1,
        num_blocks=30,
        block_size=8,
        eos_token_ids=(EOS_TOKEN_ID,),
    )
    asked = replace(
        resolved.asked,
        max_num_active_seqs=4,
        max_num_scheduled_tokens=300,
        long_prefill_token_threshold=50,
        watermark=0.1,
        scheduler_reserve_full_isl=False,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
    )
    assert SchedulerConfig.from_resolved(replace(resolved, asked=asked, max_model_len=200)) == replace(
        default,
        max_num_seqs=4,
        max_num_scheduled_tokens=300,
        max_known_tokens=200,
        long_prefill_token_threshold=50,
        watermark_blocks=3,
        reserve_full_isl=False,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
    )


def test_200_decodes_leave_7992_of_8192_tokens_for_prefill() -> None:
    """The budget is shared: what decodes take, a long prompt does not get."""
    scheduler = make_scheduler(blocks=2000, budget=8192, model_len=16384, max_num_seqs=256)
    for index in range(200):
        scheduler.add(make_request(f"decode {index}", 4))
    run_step(scheduler)
    scheduler.add(make_request("prompt", 10_000))
    plan = run_step(scheduler)
    assert tokens_of(plan)[-1] == ("prompt", 7992)
    assert (plan.num_decodes, plan.num_prefill_tokens, plan.num_scheduled_tokens) == (200, 7992, 8192)
    assert plan.num_context_tokens == 200 * 5 + 7992
    assert tokens_of(run_step(scheduler))[-1] == ("prompt", 10_000 - 7992)


def test_a_long_prompt_is_held_back_only_while_others_are_there() -> None:
    """The threshold buys others short steps, and costs a lone prompt nothing."""
    scheduler = make_scheduler(budget=64, long_prefill_token_threshold=10)
    scheduler.add(make_request("long", 100))
    assert tokens_of(run_step(scheduler)) == [("long", 64)]
    scheduler.add(make_request("other", 3))
    assert tokens_of(run_step(scheduler)) == [("long", 10), ("other", 3)]


def test_a_step_takes_no_more_than_max_num_scheduled_tokens() -> None:
    """Buffers may be sized for more than a step is to take."""
    scheduler = make_scheduler(budget=64, max_num_scheduled_tokens=24)
    assert run_lengths(scheduler, make_request("a", 50, max_tokens=1)) == [24, 24, 2]


def test_max_num_active_seqs_is_the_fence_where_it_is_set() -> None:
    """Buffers may be sized for more requests than are to run."""
    scheduler = make_scheduler(max_num_seqs=8, max_num_active_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 4))
    assert run_step(scheduler).admitted == ("a", "b")
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_the_watermark_holds_back_whoever_comes_second() -> None:
    """Blocks kept free for those that run spare them a preemption; nobody running, they are for anybody."""
    scheduler = make_scheduler(blocks=10, budget=200, watermark=0.25)
    scheduler.add(make_request("a", 100, max_tokens=60))
    scheduler.add(make_request("b", 20))
    assert run_step(scheduler).admitted == ("a",), "3 blocks are free, b needs 2 and 2 stay"
    run_until_idle(scheduler)
    assert scheduler.num_preemptions == 0
    scheduler.add(make_request("whole", 160, max_tokens=1))
    assert run_step(scheduler).admitted == ("whole",)


def test_without_reserve_a_prompt_is_admitted_chunk_by_chunk_and_may_be_preempted() -> None:
    """A user who turns the reserve off gets earlier starts, and preemptions where the cache is short."""
    outcomes = {}
    for reserve in (True, False):
        scheduler = make_scheduler(blocks=8, budget=48, scheduler_reserve_full_isl=reserve)
        scheduler.add(make_request("a", 80, max_tokens=20))
        scheduler.add(make_request("b", 100, max_tokens=4))
        plans = run_until_idle(scheduler)
        admitted_at = next(index for index, plan in enumerate(plans) if "b" in plan.admitted)
        outcomes[reserve] = (admitted_at, scheduler.num_preemptions > 0)
    assert outcomes[False] == (1, True)
    assert outcomes[True] == (21, False)


def test_a_cached_prefix_is_not_computed_again_and_takes_no_budget() -> None:
    """The second of two equal prompts starts where its cached blocks end, beside a full step's worth of others."""
    scheduler = make_scheduler(budget=64, enable_prefix_caching=True)
    assert run_lengths(scheduler, make_request("a", 60, max_tokens=1)) == [60]
    again = make_request("b", 60, max_tokens=1)
    scheduler.add(again)
    scheduler.add(make_request("c", 52, max_tokens=1, first_token=1000))
    plan = run_step(scheduler)
    assert tokens_of(plan) == [("b", 12), ("c", 52)]
    assert plan.scheduled[0].start == again.num_cached_tokens == 48
    assert (scheduler.num_prefix_queries_tokens, scheduler.num_prefix_hits_tokens) == (60 + 60 + 52, 48)


def test_a_prompt_cached_as_a_whole_still_computes_its_last_block() -> None:
    """A step that computes nothing draws no token, and a request that waits for one waits for ever."""
    scheduler = make_scheduler(enable_prefix_caching=True)
    assert run_lengths(scheduler, make_request("a", 32)) == [32, 1, 1, 1]
    assert run_lengths(scheduler, make_request("b", 32)) == [16, 1, 1, 1]


def test_a_preempted_request_finds_its_own_blocks_again_and_that_is_no_query() -> None:
    """A preemption costs less with the cache on; the hit rate stays that of new requests, as vLLM counts it."""
    scheduler = make_scheduler(blocks=6, budget=96, enable_prefix_caching=True)
    scheduler.add(make_request("a", 40, max_tokens=12))
    victim = make_request("b", 40, max_tokens=12, first_token=1000)
    scheduler.add(victim)
    plans = run_until_idle(scheduler)
    assert scheduler.num_preemptions == 1
    assert victim.num_cached_tokens > 0
    resuming = next(plan for plan in plans if plan.resumed)
    assert resuming.scheduled[-1].start == victim.num_cached_tokens
    assert (scheduler.num_prefix_queries_tokens, scheduler.num_prefix_hits_tokens) == (80, 0)


def test_what_a_failed_step_was_to_compute_is_never_found() -> None:
    """After an error in a step, the next batch must not read keys and values that were never written."""
    scheduler = make_scheduler(enable_prefix_caching=True)
    for name in "ab":
        scheduler.add(make_request(name, 48))
    assert tokens_of(scheduler.schedule()) == [("a", 48), ("b", 16)], "b shares what a is about to compute"
    scheduler.abort("a")
    plan = run_step(scheduler)
    assert (tokens_of(plan), plan.resumed) == ([("b", 48)], ("b",))
    run_until_idle(scheduler)


def test_cache_use_is_what_requests_hold_and_a_reset_waits_for_them() -> None:
    """Prefixes kept for later do not look like load, and a reset between two measurements says whether it worked."""
    scheduler = make_scheduler(enable_prefix_caching=True)
    scheduler.add(make_request("a", 48))
    run_step(scheduler)
    assert scheduler.kv_cache_usage == pytest.approx(3 / 64)
    assert not scheduler.reset_prefix_cache()
    run_until_idle(scheduler)
    assert run_lengths(scheduler, make_request("b", 48)) == [16, 1, 1, 1]
    assert scheduler.reset_prefix_cache()
    assert run_lengths(scheduler, make_request("c", 48)) == [48, 1, 1, 1]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_prompt", [15, 16, 17, 32, 33])
def test_block_boundaries_lose_no_token_under_preemption(*, num_prompt: int, prefix_caching: bool) -> None:
    """Each position is computed from the right token and written to a block that is there, around every boundary."""
    # Two prompts fill the cache, so that growing preempts; one request alone always fits.
    blocks = max(2 * -(-num_prompt // 16), -(-(num_prompt + 20) // 16))
    scheduler = make_scheduler(blocks=blocks, enable_prefix_caching=prefix_caching)
    requests = {
        name: make_request(name, num_prompt, max_tokens=20, first_token=100 * index) for index, name in enumerate("abc")
    }
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
    assert scheduler.num_free_blocks == blocks


class PretendMemory:
    """KV that says of what it is: a slot holds the tokens up to its own, as a real one's keys and values depend on."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def execute(self, plan: StepPlan, requests: dict[str, Request]) -> None:
        """Write all that the step computes, then read all that it attends to, as every layer does."""
        for item in plan.scheduled:
            for position in range(item.start, item.start + len(item.token_ids)):
                known = requests[item.request_id].known_tokens(0, position + 1)
                assert known[-1] == item.token_ids[position - item.start]
                self._slots[self._slot(item, position)] = known
        for item in plan.scheduled:
            for position in range(item.start + len(item.token_ids)):
                known = requests[item.request_id].known_tokens(0, position + 1)
                assert self._slots[self._slot(item, position)] == known, "somebody else's keys and values"

    def _slot(self, item: ScheduledRequest, position: int) -> tuple[int, int]:
        return item.block_ids[position // self._block_size], position % self._block_size


MODEL_LEN = 60


class SchedulerMachine(RuleBasedStateMachine):
    """Anything may arrive, leave and be configured; two schedulers with other request names go side by side."""

    @initialize(
        blocks=st.integers(1, 14),
        block_size=st.sampled_from([1, 4, 7]),
        seqs=st.integers(1, 6),
        spare=st.integers(0, 60),
        threshold=st.sampled_from([0, 0, 1, 5, 20]),
        watermark=st.sampled_from([0, 0, 1, 3]),
        reserve=st.booleans(),
        chunked=st.booleans(),
        caching=st.sampled_from([True, True, False]),
    )
    def configure(
        self,
        *,
        blocks: int,
        block_size: int,
        seqs: int,
        spare: int,
        threshold: int,
        watermark: int,
        reserve: bool,
        chunked: bool,
        caching: bool,
    ) -> None:
        """An engine as small as it may be."""
        self.config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_scheduled_tokens=1 + spare if chunked else MODEL_LEN + spare,
            max_known_tokens=min(MODEL_LEN, blocks * block_size + 1),
            num_blocks=blocks,
            block_size=block_size,
            watermark_blocks=watermark,
            long_prefill_token_threshold=threshold,
            reserve_full_isl=reserve,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
            eos_token_ids=(EOS_TOKEN_ID,),
        )
        self.scheduler = Scheduler(self.config)
        self.twin = Scheduler(self.config)
        self.memory = PretendMemory(block_size)
        self.requests: dict[str, Request] = {}
        self.ends: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.admitted: list[str] = []
        self.to_resume: list[str] = []

    @rule(
        parts=st.lists(st.sampled_from([100, 200, 300]), max_size=2),
        num_own=st.integers(1, 12),
        max_tokens=st.integers(1, 40),
        eos_after=st.integers(0, 60),
    )
    def add(self, *, parts: list[int], num_own: int, max_tokens: int, eos_after: int) -> None:
        """A prompt of shared parts and own tokens, or shared to the last token."""
        num_before = len(self.requests)
        own = 1000 + 100 * (num_before if num_own % 2 else 0)
        prompt = tuple(first + index for first in parts for index in range(20)) + tuple(range(own, own + num_own))
        most = min(MODEL_LEN - 1, self.config.num_blocks * self.config.block_size)
        name = f"r{num_before}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=eos_after > 10)
        request = Request(request_id=name, prompt_token_ids=prompt[:most], sampling=sampling)
        self.requests[name] = request
        self.ends[name] = eos_after
        self.scheduler.add(request)
        self.twin.add(Request(request_id=twin_of(name), prompt_token_ids=prompt[:most], sampling=sampling))

    @rule(index=st.integers(0, 12))
    def abort(self, index: int) -> None:
        """Somebody leaves, perhaps twice."""
        name = f"r{index}"
        if name in self.requests and self.requests[name].state is not RequestState.FINISHED:
            self.aborted.add(name)
            self.to_resume = [item for item in self.to_resume if item != name]
        self.scheduler.abort(name)
        self.twin.abort(twin_of(name))

    @rule()
    def reset_prefix_cache(self) -> None:
        """Emptied only if nobody holds blocks."""
        idle = self.scheduler.num_free_blocks == self.config.num_blocks
        assert self.scheduler.reset_prefix_cache() == self.twin.reset_prefix_cache() == idle
        assert not (idle and self.scheduler.snapshot().cached_free_block_ids)

    @precondition(lambda self: self.scheduler.num_running or self.scheduler.num_waiting)
    @rule(num_steps=st.integers(1, 6), leaves=st.none() | st.integers(0, 12))
    def step(self, num_steps: int, leaves: int | None) -> None:
        """Some steps, in the last of which somebody may leave while it runs."""
        for _ in range(num_steps - 1):
            self.one_step(leaves=None)
        self.one_step(leaves=leaves)

    def one_step(self, *, leaves: int | None, num_lost: int = 0) -> None:
        """Plan, check the plan, compute, commit; `num_lost` requests were in a step that was never computed."""
        num_running = self.scheduler.num_running - num_lost
        num_requests = self.scheduler.num_running + self.scheduler.num_waiting
        plan, twin_plan = self.scheduler.schedule(), self.twin.schedule()
        assert renamed(plan) == twin_plan, "a decision hangs on a name or on chance"
        self.check_limits(plan, num_running, num_requests)
        self.check_order(plan)
        self.memory.execute(plan, self.requests)
        sampled = {item.request_id: self.draw(item) for item in plan.scheduled if item.samples}
        if leaves is not None:
            self.abort(leaves)
        outputs = self.scheduler.commit(StepResult(sampled_token_ids=sampled))
        assert [output.request_id for output in outputs] == [name for name in sampled if name not in self.aborted]
        self.twin.commit(StepResult(sampled_token_ids={twin_of(name): token for name, token in sampled.items()}))

    def check_limits(self, plan: StepPlan, num_running: int, num_requests: int) -> None:
        """Budget, threshold, fence and watermark."""
        assert plan.num_scheduled_tokens <= self.config.max_num_scheduled_tokens
        assert plan.scheduled or not num_requests, "a core that has work must have a step"
        threshold = self.config.long_prefill_token_threshold
        if threshold and num_requests > 1:
            assert all(num_tokens <= threshold for _, num_tokens in tokens_of(plan))
        num_admitted = len(plan.admitted) + len(plan.resumed)
        if num_admitted and num_running + num_admitted > 1:
            assert self.scheduler.num_free_blocks >= self.config.watermark_blocks

    def check_order(self, plan: StepPlan) -> None:
        """The preempted come back in order and before anybody new; nobody comes in a step with a preemption."""
        if plan.preempted:
            assert plan.admitted == plan.resumed == ()
        for name in plan.resumed:
            assert name == self.to_resume.pop(0)
        assert not (plan.admitted and self.to_resume), "a new request overtook a preempted one"
        self.to_resume[:0] = reversed(plan.preempted)
        self.admitted += plan.admitted

    def draw(self, item: ScheduledRequest) -> int:
        """The end of sequence where the request is to end, else a token that tells its place."""
        return EOS_TOKEN_ID if item.output_index == self.ends[item.request_id] else 5000 + item.output_index

    @precondition(lambda self: self.scheduler.num_running or self.scheduler.num_waiting)
    @rule(leaves=st.none() | st.integers(0, 12))
    def fail_one_step(self, leaves: int | None) -> None:
        """A step is planned and never computed, as when the executor raises; then one that is."""
        plan = self.scheduler.schedule()
        assert renamed(plan) == self.twin.schedule()
        self.check_order(plan)
        if leaves is not None:
            self.abort(leaves)
        lost = [item.request_id for item in plan.scheduled if item.request_id not in self.aborted]
        self.to_resume[:0] = lost
        self.one_step(leaves=None, num_lost=len(lost))

    @invariant()
    def books_agree(self) -> None:
        """Blocks, reference counts, names, states."""
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        """Everybody who stayed ends with an unbroken run of tokens, and every block is free again."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not (self.scheduler.num_running or self.scheduler.num_waiting):
                break
            self.one_step(leaves=None)
            self.books_agree()
        order = list(self.requests)
        assert self.admitted == sorted(self.admitted, key=order.index)
        for name in set(self.requests) - self.aborted:
            request = self.requests[name]
            assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), request
            num_outputs, end = len(request.output_token_ids), self.ends[name]
            expected = [EOS_TOKEN_ID if index == end else 5000 + index for index in range(num_outputs)]
            assert request.output_token_ids == expected
        assert self.scheduler.num_free_blocks == self.config.num_blocks
        assert self.scheduler.snapshot() == self.twin.snapshot()


def twin_of(name: str) -> str:
    """Another name, that sorts and hashes differently."""
    return f"{99 - int(name[1:])} is {name}"


def renamed(plan: StepPlan) -> StepPlan:
    """The plan with every request under its twin's name."""
    return StepPlan(
        scheduled=tuple(replace(item, request_id=twin_of(item.request_id)) for item in plan.scheduled),
        admitted=tuple(map(twin_of, plan.admitted)),
        resumed=tuple(map(twin_of, plan.resumed)),
        preempted=tuple(map(twin_of, plan.preempted)),
    )


TestWhateverArrivesAndLeavesThePromisesHold = SchedulerMachine.TestCase
TestWhateverArrivesAndLeavesThePromisesHold.settings = settings(max_examples=200, stateful_step_count=40)
