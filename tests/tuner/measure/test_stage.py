"""A whole stage against a stub whose behaviour is known."""

from __future__ import annotations

import asyncio
import gc
import math
import os
from typing import Any

import pytest

from tests.fakes.server import Behaviour, StubEngine, running_stub
from tuner.answer import Slo
from tuner.load.generator import ClosedLoop
from tuner.load.prompts import conversations
from tuner.load.workload import WorkloadError, load_workload
from tuner.measure.memory import EngineMemory
from tuner.measure.stage import MeasuredStage, StageSpec, Target, measure_stage
from tuner.records import StageKind, StageRecord

TINY = load_workload(
    {"input_len": {"kind": "fixed", "tokens": 5}, "output_len": {"kind": "uniform", "low": 3, "high": 6}}
)


async def measure(stub: StubEngine, **limits: Any) -> MeasuredStage:
    """A short stage on a stub; load 4 unless told otherwise."""
    given = {"load": 4, "min_s": 0.3, "max_s": 1.5, "max_warm_up_s": 2.0, "min_requests": 60, **limits}
    spec = StageSpec(index=3, kind=StageKind.LADDER, max_num_seqs=4, workload=TINY, entropy=(0, 1, 3, 0), **given)
    memory = EngineMemory(requested_bytes=100, weights_bytes=10, activation_peak_bytes=5, kv_cache_bytes=40)
    target = Target(
        endpoint=stub.endpoint, model="m", max_model_len=99, root_pid=os.getpid(), memory=memory, token_ids=range(5, 50)
    )
    async with asyncio.timeout(30):
        return await measure_stage(spec, target)


async def test_a_sound_stage_reports_what_the_stub_did() -> None:
    """Counts are exact; times are the stub's schedule or longer, never shorter."""
    async with running_stub(Behaviour(ttft_s=0.02, itl_s=0.01)) as stub:
        measured = await measure(stub, target_relative_half_width=0.9, max_s=10.0)
    record = measured.record
    assert (record.index, record.load, record.fenced, record.ended_by) == (3, 4, False, "precise")
    assert (record.num_failed, record.num_rejected, record.first_error) == (0, 0, None)
    assert record.num_completed >= 60
    assert record.num_warm_up_requests >= 4
    assert record.ttft_p50_ms.value >= 20
    assert record.itl_p50_ms.value >= 9
    assert record.e2e_p50_ms.value >= record.ttft_p50_ms.value + 2 * record.tpot_p50_ms.value - 1e-9
    assert record.ttft_p95_ms.has_interval
    assert record.mean_prompt_tokens == 5
    assert 3 <= record.mean_output_tokens <= 6
    assert record.mean_in_flight == pytest.approx(4, rel=0.25)
    assert record.littles_law_ratio == pytest.approx(1, rel=0.5)
    assert (record.num_preemptions, record.kv_cache_usage_peak) == (0, 0.25)
    assert (record.memory.reserved_bytes, record.memory.in_use_peak_bytes) == (100, 25)
    assert record.memory.device_peak_bytes is not None
    assert record.process_cpu_cores is not None
    assert record.process_cpu_cores[0] > 0
    assert record.steps is None
    assert record.send_slip_p95_ms > 0
    assert stub.peak_in_flight == 4
    assert all(5 <= token < 50 for body in stub.bodies for token in body["prompt"])
    counted = [request for request in measured.requests if not request.warm_up]
    assert len(counted) == record.num_completed
    assert StageRecord.model_validate_json(record.model_dump_json()) == record


def _says_others(record: StageRecord) -> bool:
    return any(reason.startswith("others use this server") for reason in record.invalid_reasons)


async def test_others_on_the_server_are_told_from_our_own_requests() -> None:
    """Two benches on one server would each take the other's load for the engine's, and derive limits from it."""
    theirs = conversations(TINY, token_ids=range(50, 90), max_model_len=99, entropy=(9,))
    async with running_stub(Behaviour(ttft_s=0.02, itl_s=0.01)) as stub:
        await measure(stub, load=16)
        alone = (await measure(stub, load=1)).record
        async with ClosedLoop(endpoint=stub.endpoint, model="m", load=1, prompts=theirs):
            beside = (await measure(stub, load=1)).record
    assert not _says_others(alone), alone.invalid_reasons
    assert _says_others(beside), beside.invalid_reasons


async def test_the_engines_steps_are_counted_over_the_window() -> None:
    """Tokens a step tell a full token budget from steps that are merely slow."""
    async with running_stub(Behaviour(itl_s=0.01), tokens_per_step=8) as stub:
        record = (await measure(stub, target_relative_half_width=0.9)).record
    assert record.steps is not None
    assert record.steps.mean_tokens == pytest.approx(8)
    assert record.steps.per_s > 0
    assert record.steps.model_share is None


async def test_the_garbage_collector_leaves_old_objects_alone_while_a_stage_runs() -> None:
    """A full collection of a process with numpy and pandas takes 20 ms, in which every token that arrives is late."""
    seen: list[int] = []

    def behave(_: int) -> Behaviour:
        seen.append(gc.get_freeze_count())
        return Behaviour()

    async with running_stub(behave) as stub:
        await measure(stub)
    assert min(seen) > 0
    assert gc.get_freeze_count() == 0


async def test_what_the_first_wave_pays_is_not_in_the_figures() -> None:
    """Kernels compile at the first sight of a batch size: 17 s against 1.1 s in one report."""

    def slow_at_first(ordinal: int) -> Behaviour:
        return Behaviour(ttft_s=0.7 if ordinal < 4 else 0.01)

    async with running_stub(slow_at_first) as stub:
        measured = await measure(stub, target_relative_half_width=0.9, max_warm_up_s=20.0)
    assert measured.record.warm_up_s >= 0.7
    assert not {request.index for request in measured.requests if not request.warm_up} & set(range(4))


async def test_a_start_that_outlasts_the_first_wave_is_cut_off() -> None:
    """Ten slow turns after start-up: what comes before the load's own rate belongs to the warm-up, and says so."""

    def slow_for_long(ordinal: int) -> Behaviour:
        return Behaviour(ttft_s=0.09 if ordinal < 80 else 0.02)

    async with running_stub(slow_for_long) as stub:
        measured = await measure(stub, min_requests=10_000, max_s=5.0, max_warm_up_s=0.5)
    record = measured.record
    assert record.transient_s > 1.0
    assert record.warm_up_s + record.measured_s == pytest.approx(record.wall_s)
    assert record.ttft_p95_ms.value < 60
    assert not {request.index for request in measured.requests if not request.warm_up} & set(range(40))
    assert record.num_preemptions == 0


@pytest.mark.parametrize(("limit_ms", "ended_by"), [(1000.0, "precise"), (60.0, "time")])
async def test_a_stage_goes_on_while_its_judgement_is_open(limit_ms: float, ended_by: str) -> None:
    """One request in twenty waits past the limit: whether p95 holds it takes more samples than a throughput does."""

    def slow_now_and_then(ordinal: int) -> Behaviour:
        return Behaviour(ttft_s=0.12 if ordinal % 20 == 19 else 0.02)

    limits = Slo(ttft_p95_ms=limit_ms, itl_p95_ms=1000.0)
    async with running_stub(slow_now_and_then) as stub:
        measured = await measure(stub, target_relative_half_width=0.9, max_s=3.0, limits=limits)
    assert measured.record.ended_by == ended_by


async def test_failed_streams_make_a_stage_invalid_and_carry_no_latency() -> None:
    """One in ten streams dies after its first token: no figure may contain it."""

    def one_in_ten(ordinal: int) -> Behaviour:
        return Behaviour(itl_s=0.005, error_after=1 if ordinal % 10 == 9 else None)

    async with running_stub(one_in_ten) as stub:
        measured = await measure(stub, target_relative_half_width=0.9, max_s=10.0)
    record = measured.record
    assert not record.valid
    assert record.num_failed > 0
    assert record.first_error == "error in the stream: engine died"
    assert any("success rate" in reason for reason in record.invalid_reasons)
    assert record.ttft_p95_ms.num_samples == record.num_completed


async def test_a_stage_of_failures_ends_early() -> None:
    """A server that only fails is left alone after a few dozen requests, not after the stage's whole time."""
    async with running_stub(Behaviour(status=500)) as stub:
        record = (await measure(stub, max_s=20.0, max_warm_up_s=20.0)).record
    assert (record.ended_by, record.valid) == ("failures", False)
    assert math.isnan(record.ttft_p95_ms.value)
    assert StageRecord.model_validate_json(record.model_dump_json()).ended_by == "failures"


async def test_a_dead_server_is_a_stage_of_failures() -> None:
    """Refused connections never raise throughput."""
    async with running_stub(Behaviour()) as stub:
        pass
    record = (await measure(stub, max_s=20.0, max_warm_up_s=20.0)).record
    assert (record.ended_by, record.valid, record.output_throughput.value) == ("failures", False, 0.0)
    assert (record.num_preemptions, record.mean_running, record.kv_cache_usage_peak) == (None, None, None)


async def test_an_engine_that_stops_moving_is_stalled() -> None:
    """Health answers 200 while nothing runs: what hung is counted as failed."""
    async with running_stub(lambda ordinal: Behaviour(hang_after=1 if ordinal >= 20 else None)) as stub:
        measured = await measure(stub, stall_s=0.5, max_s=20.0, max_warm_up_s=20.0, min_requests=10**6)
    record = measured.record
    assert (record.ended_by, record.valid) == ("stalled", False)
    assert record.num_failed == 4
    assert not any(request.unfinished for request in measured.requests)


async def test_a_core_that_hangs_behind_a_server_that_last_heard_of_no_work_is_stalled() -> None:
    """The metrics of vLLM are what its core last reported: nothing to do, from before these requests came."""
    page = "\n".join(
        [
            'vllm:num_requests_running{engine="0"} 0.0',
            'vllm:num_requests_waiting{engine="0"} 0.0',
            'vllm:generation_tokens_total{engine="0"} 7.0',
            "",
        ]
    )
    async with running_stub(Behaviour(hang_after=0), pages={"/metrics": (200, page)}) as stub:
        record = (await measure(stub, stall_s=0.5, max_s=20.0, max_warm_up_s=20.0)).record
    assert (record.ended_by, record.valid, record.num_completed) == ("stalled", False, 0)


async def test_a_server_that_accepts_and_says_nothing_cannot_hold_a_stage() -> None:
    """Bounded time whatever the server does, and its own word that it has work and does none is a stall."""
    async with running_stub(Behaviour(hang_after=0)) as stub:
        record = (await measure(stub, max_s=1.0, max_warm_up_s=0.5)).record
    assert (record.ended_by, record.valid, record.num_completed) == ("stalled", False, 0)


async def test_a_long_prefill_is_not_a_stall() -> None:
    """A busy engine whose first answer outlasts the stage needs more time: its config is not to blame."""
    async with running_stub(Behaviour(hang_after=0), prefilling=True) as stub:
        record = (await measure(stub, max_s=1.0, max_warm_up_s=0.5)).record
    assert (record.ended_by, record.valid, record.num_failed) == ("time", False, 0)
    assert any("no request finished" in reason and "measure.max_time" in reason for reason in record.invalid_reasons)


async def test_silence_while_the_engine_works_is_not_a_stall() -> None:
    """However long the stream is quiet: an engine whose own figures move is at work."""
    async with running_stub(Behaviour(hang_after=0), prefilling=True) as stub:
        record = (await measure(stub, stall_s=1.5, max_s=1.5, max_warm_up_s=1.0)).record
    assert record.ended_by == "time"


async def test_refusals_are_counted_apart() -> None:
    """A valve that says 503 is not a failure, and not a completed request either."""

    def every_other(ordinal: int) -> Behaviour:
        return Behaviour(itl_s=0.01, status=503 if ordinal % 2 else 200)

    async with running_stub(every_other) as stub:
        record = (await measure(stub, max_s=1.0)).record
    assert record.num_rejected > 0
    assert record.num_failed == 0
    assert not any("success rate" in reason for reason in record.invalid_reasons)


async def test_a_valve_that_refuses_everything_is_not_a_failing_engine() -> None:
    """Refusals cost the stage its figures, and never say that the engine is broken."""
    async with running_stub(Behaviour(status=503)) as stub:
        record = (await measure(stub, max_s=1.6)).record
    assert (record.ended_by, record.num_failed, record.num_completed) == ("time", 0, 0)
    assert record.num_rejected > 0


@pytest.mark.parametrize(
    ("behaviour", "options", "reason"),
    [
        (Behaviour(itl_s=0.01, num_tokens=2), {}, "short outputs: 2.0 tokens"),
        (Behaviour(itl_s=0.01, usage="none"), {}, "token counts are estimated"),
        (Behaviour(itl_s=0.01), {"prefix_hit_rate": 0.5}, "warm cache: "),
    ],
)
async def test_a_stage_that_measured_something_else_says_so(
    behaviour: Behaviour, options: dict[str, Any], reason: str
) -> None:
    """Short answers, guessed counts and a warm cache all look like speed."""
    async with running_stub(behaviour, **options) as stub:
        record = (await measure(stub, max_s=0.6)).record
    assert not record.valid
    assert any(reason in sentence for sentence in record.invalid_reasons), record.invalid_reasons


async def test_above_the_fence_is_said() -> None:
    """Load that waits by our own limit is not saturation."""
    async with running_stub(Behaviour(itl_s=0.005), preemptions=None) as stub:
        record = (await measure(stub, load=5, max_s=0.4)).record
    assert record.fenced
    assert record.num_preemptions is None


async def test_a_workload_that_does_not_fit_sends_nothing() -> None:
    """Both numbers are in the error, and the engine never saw a request."""
    async with running_stub(Behaviour()) as stub:
        spec = StageSpec(index=0, kind=StageKind.LADDER, load=1, max_num_seqs=1, workload=TINY, entropy=(0,), max_s=1.0)
        with pytest.raises(WorkloadError, match=r"11 tokens.*max_model_len=10"):
            await measure_stage(spec, Target(endpoint=stub.endpoint, model="m", max_model_len=10))
        assert stub.num_requests == 0
