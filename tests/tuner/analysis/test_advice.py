"""Advice on each parameter follows what saturates, and carries the figure it rests on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import records
from tests.tuner.analysis.steps import BANDWIDTH, COMPUTE, Law
from tuner.analysis.advice import advise
from tuner.analysis.diagnosis import diagnose
from tuner.answer import Advice, KneeFinding, LadderVerdict, Slo
from tuner.engine_config import EngineConfig
from tuner.records import StepFigures

KNEE = KneeFinding(verdict=LadderVerdict.KNEE, load=16.0)
NAMES = (
    *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_model_len"),
    *("kv_cache_dtype", "tensor_parallel_size"),
)


def _advice(
    law: Law, *, knee: KneeFinding = KNEE, config: EngineConfig = records.CHOSEN, device: str = "cuda", **change: Any
) -> dict[str, Advice]:
    ladder = [stage.model_copy(update=change) if stage.load == 32 else stage for stage in law.ladder()]
    facts = law.facts().model_copy(update={"device": device})
    given = advise(diagnose(ladder, knee, config, facts), ladder, knee, config, facts)
    assert tuple(each.parameter for each in given) == NAMES
    return {each.parameter: each for each in given}


@pytest.mark.parametrize(
    ("law", "change", "helps"),
    [
        (COMPUTE, {}, {"tensor_parallel_size"}),
        (BANDWIDTH, {}, {"tensor_parallel_size", "kv_cache_dtype"}),
        (
            COMPUTE,
            {"kv_cache_usage_peak": 1.0, "num_preemptions": 9},
            {"gpu_memory_utilization", "kv_cache_dtype", "tensor_parallel_size"},
        ),
        (
            COMPUTE,
            {"mean_running": 12.0, "mean_waiting": 9.0, "steps": StepFigures(mean_tokens=1000, per_s=9)},
            {"max_num_batched_tokens"},
        ),
        (COMPUTE, {"process_cpu_cores": (1.0, 0.4)}, set()),
    ],
)
def test_what_can_help_follows_what_saturates(law: Law, change: dict[str, Any], helps: set[str]) -> None:
    """Nobody turns a parameter that cannot help: more sequences do not cure a full device."""
    given = _advice(law, **change)
    assert {name for name, each in given.items() if each.effect == "can_help"} == helps


def test_each_reason_carries_its_figure() -> None:
    """Advice without its figure would have to be believed."""
    given = _advice(COMPUTE)
    assert given["max_num_seqs"].effect == "would_hurt"
    assert "load 16 to 32 buys +2% throughput" in given["max_num_seqs"].why
    assert "32%" in given["gpu_memory_utilization"].why
    assert "320 a request" in given["max_model_len"].why
    assert "16% of the budget of 1024 tokens" in given["max_num_batched_tokens"].why
    assert all(any(character.isdigit() for character in each.why) for each in given.values())


def test_a_gain_past_the_knee_is_not_called_harmful() -> None:
    """A stage that contradicts the knee by noise is shown with its figure, not turned into advice."""
    better = records.estimate(2 * COMPUTE.stage(16).output_throughput.value)
    given = _advice(COMPUTE, output_throughput=better)
    assert given["max_num_seqs"].effect == "unknown"
    assert "+100% throughput" in given["max_num_seqs"].why


def test_a_fence_can_be_raised_and_nothing_else_helps() -> None:
    """Where our own limit stops the curve, that limit is the one to move."""
    given = _advice(COMPUTE, knee=KneeFinding(verdict=LadderVerdict.FENCED))
    assert given["max_num_seqs"].effect == "can_help"
    assert "the fence of 64" in given["max_num_seqs"].why
    assert {each.effect for name, each in given.items() if name != "max_num_seqs"} <= {"cannot_help", "unknown"}


def test_a_cpu_has_no_second_device_and_fp8_is_not_advised_twice() -> None:
    """Advice that the engine cannot follow is none."""
    assert _advice(COMPUTE, device="cpu")["tensor_parallel_size"].effect == "cannot_help"
    fp8 = records.CHOSEN.model_copy(update={"kv_cache_dtype": "fp8"})
    assert _advice(BANDWIDTH, config=fp8)["kv_cache_dtype"].effect == "cannot_help"


def test_where_the_cause_is_unknown_only_what_the_figures_rule_out_is_said() -> None:
    """An open diagnosis still knows that a third of the KV cache was in use."""
    given = _advice(COMPUTE, mean_waiting=None)
    assert given["gpu_memory_utilization"].effect == "cannot_help"
    assert given["tensor_parallel_size"].effect == given["kv_cache_dtype"].effect == "unknown"


def test_a_fence_that_the_limits_forbid_already_is_not_raised() -> None:
    """More requests at once do not help where as many as there are break the SLO."""
    fenced = KneeFinding(verdict=LadderVerdict.FENCED)
    ladder, config = COMPUTE.ladder(), records.CHOSEN
    finding = diagnose(ladder, fenced, config)
    for limit_ms, effect in ((1e-3, "cannot_help"), (1e6, "can_help")):
        slo = Slo(ttft_p95_ms=1e6, itl_p95_ms=limit_ms)
        (first, *_) = advise(finding, ladder, fenced, config, None, slo)
        assert (first.parameter, first.effect) == ("max_num_seqs", effect)
    assert "p95 ITL" in advise(finding, ladder, fenced, config, None, Slo(ttft_p95_ms=1e6, itl_p95_ms=1e-3))[0].why


def test_an_engine_without_share_and_blocks_gets_no_advice_that_rests_on_them() -> None:
    """llama.cpp reserves the whole length for every slot: that blocks are taken by tokens in use is not true of it."""
    config = records.CHOSEN.model_copy(update={"gpu_memory_utilization": None})
    none = {"kv_cache_usage_peak": None, "num_preemptions": None}
    without = {**none, "not_applicable": ("kv_cache_usage_peak", "num_preemptions")}
    ladder = [stage.model_copy(update=without) for stage in COMPUTE.ladder()]
    given = {each.parameter: each for each in advise(diagnose(ladder, KNEE, config), ladder, KNEE, config)}
    assert "gpu_memory_utilization" not in given
    assert given["max_model_len"].effect == "unknown"
    assert "no KV blocks" in given["max_model_len"].why
