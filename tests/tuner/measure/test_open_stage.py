"""Stages at a rate, of a batch and of a trace against a stub whose behaviour is known."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.server import Behaviour, StubEngine, running_stub
from tuner.analysis.knee import points_of
from tuner.load.workload import WorkloadError, load_workload
from tuner.measure.stage import MeasuredStage, StageSpec, Target, measure_stage
from tuner.measure.validity import CLIENT_BOUND
from tuner.records import StageKind, StageRecord

SMALL: dict[str, Any] = {
    "input_len": {"kind": "fixed", "tokens": 40},
    "output_len": {"kind": "uniform", "low": 3, "high": 6},
}


async def measure(
    stub: StubEngine, load: float, kind: StageKind, workload: dict[str, Any], **limits: Any
) -> MeasuredStage:
    """A stage on a stub."""
    given = {"min_s": 0.5, "max_s": 20.0, "max_warm_up_s": 5.0, "target_relative_half_width": 0.9, **limits}
    spec = StageSpec(
        index=0, kind=kind, load=load, max_num_seqs=4, workload=load_workload(workload), entropy=(0, 1, 3), **given
    )
    async with asyncio.timeout(60):
        return await measure_stage(spec, Target(endpoint=stub.endpoint, model="m", max_model_len=200))


async def test_a_rate_is_a_stage_of_its_own_and_no_point_of_a_knee_curve() -> None:
    """Requests per second beside concurrent users on one axis would bend any curve."""
    async with running_stub(Behaviour(ttft_s=0.02, itl_s=0.005)) as stub:
        arrivals = {"arrivals": {"kind": "poisson"}}
        record = (await measure(stub, 37.5, StageKind.RATE, {**SMALL, **arrivals})).record
    assert (record.load, record.loop, record.ended_by) == (37.5, "open", "precise")
    assert record.request_throughput_rps == pytest.approx(37.5, rel=0.5)
    assert not record.fenced
    assert record.send_slip_p99_ms >= record.send_slip_p95_ms >= 0
    assert points_of([record]) == []
    assert StageRecord.model_validate_json(record.model_dump_json()) == record


async def test_a_rate_is_not_measured_while_the_server_fills() -> None:
    """Half a second into requests that take one and a half, fewer are in flight than ever after."""
    async with running_stub(Behaviour(ttft_s=1.5)) as stub:
        arrivals = {"arrivals": {"kind": "constant"}}
        limits = {"max_warm_up_s": 0.5, "max_s": 2.0}
        record = (await measure(stub, 20.0, StageKind.RATE, {**SMALL, **arrivals}, **limits)).record
    assert any("measured before as many requests had ended" in reason for reason in record.invalid_reasons)


async def test_a_rate_above_capacity_ends_as_a_finding() -> None:
    """Ten a second are served and twenty come: a queue that grows is the finding, and no fault of the stage.

    A busy machine may make the sender late, which is no word on the queue.
    """
    async with running_stub(Behaviour(ttft_s=0.1), num_slots=1) as stub:
        workload = {**SMALL, "arrivals": {"kind": "constant"}}
        limits = {"max_warm_up_s": 1.0, "target_relative_half_width": 1e-9}
        record = (await measure(stub, 20.0, StageKind.RATE, workload, **limits)).record
    assert record.ended_by == "oversaturated"
    assert [reason for reason in record.invalid_reasons if not reason.startswith(CLIENT_BOUND)] == []
    assert record.ttft_p95_ms.value > 1000


async def test_a_batch_is_whole_or_invalid() -> None:
    """Total tokens over the time all of it took; half a batch has no such figure."""
    batch = {**SMALL, "arrivals": {"kind": "batch"}}
    async with running_stub(Behaviour(ttft_s=0.05), num_slots=4) as stub:
        record = (await measure(stub, 40, StageKind.BATCH, batch)).record
        assert stub.num_requests == 40
    assert (record.ended_by, record.loop, record.load, record.fenced) == ("complete", "batch", 40, True)
    assert record.num_completed == 40
    assert record.warm_up_s == 0
    assert record.output_throughput.value == pytest.approx(record.mean_output_tokens * 40 / record.measured_s, rel=0.02)
    assert points_of([record]) == []
    async with running_stub(Behaviour(ttft_s=0.4), num_slots=1) as stub:
        record = (await measure(stub, 40, StageKind.BATCH, batch, max_s=1.0)).record
    assert record.ended_by == "time"
    assert any("not complete" in reason for reason in record.invalid_reasons)


async def test_a_trace_is_sent_whole_with_its_lengths_and_at_its_times(tmp_path: Path) -> None:
    """What was left out is counted, what was sent adds up, and the pattern is the trace's."""
    rows = [{"at_s": 10 * n**0.5, "input_tokens": 10 + n, "output_tokens": 1 + n % 5} for n in range(60)]
    rows.append({"at_s": 3, "input_tokens": 500, "output_tokens": 1})
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    workload = {"trace": {"path": str(path), "format": "jsonl"}, "arrivals": {"kind": "trace"}}
    async with running_stub(Behaviour()) as stub:
        measured = await measure(stub, 60.0, StageKind.RATE, workload)
    record = measured.record
    assert (record.ended_by, record.num_completed, record.num_left_out) == ("complete", 60, 1)
    assert sum(request.num_prompt_tokens for request in measured.requests) == sum(10 + n for n in range(60))
    assert sum(request.num_output_tokens for request in measured.requests) == sum(1 + n % 5 for n in range(60))
    times = [request.intended_s for request in sorted(measured.requests, key=lambda request: request.index)]
    assert times == pytest.approx([(n / 59) ** 0.5 * 59 / 60 for n in range(60)], abs=1e-6)


@pytest.mark.parametrize(("hit_rate", "is_warm"), [(0.79, False), (0.95, True)])
async def test_what_is_shared_by_design_is_no_warm_cache(hit_rate: float, is_warm: bool) -> None:  # noqa: FBT001
    """A workload that shares four fifths of its prompts hits four fifths; more than that it has seen before."""
    workload = {**SMALL, "shared_prefix": {"tokens": 160}}
    workload["input_len"] = {"kind": "fixed", "tokens": 30}
    workload["output_len"] = {"kind": "fixed", "tokens": 3}
    async with running_stub(Behaviour(itl_s=0.01), prefix_hit_rate=hit_rate) as stub:
        record = (await measure(stub, 4, StageKind.LADDER, workload, max_s=0.6)).record
    assert any("warm cache" in reason for reason in record.invalid_reasons) == (hit_rate > 160 / 190 + 0.01) == is_warm


@pytest.mark.parametrize("tells_ids", [True, False])
async def test_a_chat_in_turns_keeps_its_users(tells_ids: bool) -> None:  # noqa: FBT001 - a table's column
    """Each turn is the history and something new; a server is not asked for ids it does not know of."""
    workload = {**SMALL, "chat": {"turns": 3, "think_time": "10ms"}, "output_len": {"kind": "fixed", "tokens": 4}}
    async with running_stub(Behaviour(itl_s=0.002), tells_ids=tells_ids) as stub:
        record = (await measure(stub, 3, StageKind.LADDER, workload)).record
        bodies = stub.bodies
    assert {len(body["prompt"]) for body in bodies} == {40, 84, 128}
    assert {body.get("return_token_ids", False) for body in bodies if len(body["prompt"]) < 128} == {tells_ids}
    assert not any("return_token_ids" in body for body in bodies if len(body["prompt"]) == 128)
    assert {body["prompt"][40:44] == [77] * 4 for body in bodies if len(body["prompt"]) > 40} == {tells_ids}
    assert record.num_failed == 0
    assert not any("load not held" in reason for reason in record.invalid_reasons)


async def test_an_answer_that_comes_back_as_text_is_counted_by_the_server() -> None:
    """Sixteen tokens of odd characters are forty when they are read again: that is no other workload."""
    workload = {**SMALL, "api": "chat", "chat": {"turns": 3}, "input_len": {"kind": "fixed", "tokens": 60}}
    async with running_stub(Behaviour(itl_s=0.002), tokens_per_message=30, prefix_hit_rate=0.5) as stub:
        record = (await measure(stub, 2, StageKind.LADDER, workload)).record
    assert record.num_failed == 0
    assert not any("prompt length" in reason or "warm" in reason for reason in record.invalid_reasons)


async def test_a_server_that_is_not_there_is_a_stage_of_failures_by_text_too() -> None:
    """What is asked before a stage must not be a crash of its own."""
    async with running_stub(Behaviour()) as stub:
        pass
    for more in ({"api": "chat"}, {"chat": {"turns": 2}}):
        record = (await measure(stub, 2, StageKind.LADDER, {**SMALL, **more})).record
        assert record.ended_by == "failures"


async def test_text_is_calibrated_by_the_servers_own_count() -> None:
    """A tokenizer of five tokens a word and a template of seven: the prompts still have the length asked for."""
    workload = {**SMALL, "api": "chat", "input_len": {"kind": "fixed", "tokens": 100}}
    async with running_stub(Behaviour(itl_s=0.005), tokens_per_word=5.0, tokens_per_message=7) as stub:
        record = (await measure(stub, 2, StageKind.LADDER, workload)).record
        assert all(body["messages"][0]["role"] == "user" for body in stub.bodies)
    assert record.mean_prompt_tokens == pytest.approx(100, rel=0.05)
    assert not any("prompt length" in reason for reason in record.invalid_reasons)


async def test_prompts_that_are_counted_otherwise_are_refused_before_they_are_measured() -> None:
    """A thousand tokens that are five thousand to the server are another workload."""
    async with running_stub(_miscounting) as stub:
        with pytest.raises(WorkloadError, match=r"40 tokens.*counts 205.*5%"):
            await measure(stub, 2, StageKind.LADDER, SMALL)


def _miscounting(_: int) -> Behaviour:
    count = {"prompt_tokens": 205, "completion_tokens": 3}
    frame = {"choices": [{"text": "abc", "finish_reason": "length"}], "usage": count}
    return Behaviour(script=((0.0, f"data: {json.dumps(frame)}\n\ndata: [DONE]\n\n".encode()),))


async def test_every_request_of_a_stage_carries_the_same_sampling() -> None:
    """Warm-up without ignore_eos compiles and caches for other requests than are measured."""
    async with running_stub(Behaviour(itl_s=0.005)) as stub:
        await measure(stub, 4, StageKind.LADDER, {**SMALL, "temperature": 0.7})
        fields = {(body["temperature"], body["ignore_eos"], json.dumps(body["stream_options"])) for body in stub.bodies}
    assert len(fields) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"load": 2.5}, "whole number"),
        ({"load": 0}, "greater than 0"),
        ({"loop": "open"}, "kind ladder has no open loop"),
        ({"kind": "rate"}, "kind rate has no closed loop"),
    ],
)
async def test_a_load_belongs_to_its_loop(change: dict[str, Any], words: str) -> None:
    """Two and a half users, or a ladder's rung in requests per second, cannot get into a record."""
    async with running_stub(Behaviour(itl_s=0.005)) as stub:
        record = (await measure(stub, 2, StageKind.LADDER, SMALL, max_s=0.5)).record
    with pytest.raises(ValueError, match=words):
        StageRecord.model_validate({**record.model_dump(), **change})
    old = record.model_dump(exclude={"loop", "send_slip_p99_ms", "num_left_out"})
    assert StageRecord.model_validate(old).loop == "closed"
