"""What ran out of memory is not launched again, and is not recommended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import records
from tuner.engine_config import EngineConfig
from tuner.oom_lessons import ruled_out, share_ceiling
from tuner.records import Failed, FailureKind, Measured, TrialRecord

K = FailureKind


def _config(share: float, seqs: int = 64, budget: int = 2048, length: int | None = 4096) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=seqs, max_num_batched_tokens=budget, gpu_memory_utilization=share, max_model_len=length
    )


def _failed(number: int, kind: FailureKind, config: EngineConfig) -> TrialRecord:
    return records.trial(number, config, outcome=Failed(kind=kind, detail="out of memory"))


def _passed(number: int, config: EngineConfig) -> TrialRecord:
    return records.trial(number, config, outcome=Measured(facts=records.facts(config), stages=()))


_GRAPHS = (_passed(0, _config(0.95)), _passed(1, _config(0.97)), _failed(2, K.OOM_GRAPH_CAPTURE, _config(0.98)))
_SAMPLER = (_failed(4, K.OOM_SAMPLER_WARMUP, _config(0.95, seqs=1024)),)


@pytest.mark.parametrize("share", [0.98, 0.985, 0.99, 1.0])
@pytest.mark.parametrize("seqs", [16, 64, 1024])
def test_after_graph_capture_ran_out_nothing_of_that_share_is_launched_again(share: float, seqs: int) -> None:
    """0.98 fails at the capture of graphs: no further launch is spent at or above it, whatever else is asked for."""
    known = ruled_out(_config(share, seqs=seqs), _GRAPHS)
    assert known is not None
    assert known.kind is K.OOM_GRAPH_CAPTURE
    for figure in ("trial 2", "oom_graph_capture", "0.98", f"max_num_seqs={seqs}"):
        assert figure in known.detail


def test_below_the_share_that_failed_everything_stays_open() -> None:
    """One failure does not end the search for the share that works."""
    assert ruled_out(_config(0.97, seqs=1024), _GRAPHS) is None


def test_the_recommended_share_keeps_its_distance_from_the_one_that_failed() -> None:
    """0.97 passed and 0.98 did not: 0.95 is recommended, with both named, and another margin is honoured."""
    ceiling = share_ceiling(_GRAPHS, margin=0.02)
    assert ceiling is not None
    assert ceiling.gpu_memory_utilization == 0.95
    for figure in ("0.97", "0.98", "oom_graph_capture", "0.02"):
        assert figure in ceiling.reason
    wider = share_ceiling(_GRAPHS, margin=0.05)
    assert wider is not None
    assert wider.gpu_memory_utilization == 0.92


def test_without_a_higher_share_that_failed_there_is_no_ceiling() -> None:
    """A share is not lowered for failures that say nothing of it, nor where nothing passed."""
    below = _failed(3, K.OOM_SAMPLER_WARMUP, _config(0.9, seqs=2048))
    other = _failed(3, K.CRASHED, _config(0.99))
    too_small = _failed(3, K.NO_KV_MEMORY, _config(0.99))
    for failure in (below, other, too_small):
        assert share_ceiling([*_GRAPHS[:2], failure], margin=0.02) is None
    assert share_ceiling(_GRAPHS[2:], margin=0.02) is None


@pytest.mark.parametrize(
    ("share", "seqs", "is_out"),
    [
        (0.95, 1024, True),
        (0.95, 2048, True),
        (0.97, 1024, True),
        (0.97, 256, True),  # the share is never raised
        (0.95, 512, False),
        (0.9, 1024, False),
    ],
)
def test_after_the_samplers_warm_up_ran_out_sequences_or_share_go_down(share: float, seqs: int, is_out: bool) -> None:  # noqa: FBT001 - a case
    """1024 sequences at 0.95 fail: neither they nor a higher share is launched again."""
    assert (ruled_out(_config(share, seqs=seqs, budget=4096), _SAMPLER) is not None) is is_out


@pytest.mark.parametrize(
    ("kind", "change", "is_out"),
    [
        (K.OOM_RUNTIME, {}, True),
        (K.OOM_RUNTIME, {"share": 0.91}, True),
        (K.OOM_RUNTIME, {"seqs": 128}, True),
        (K.OOM_RUNTIME, {"budget": 4096}, True),
        (K.OOM_RUNTIME, {"budget": 512}, False),
        (K.OOM_RUNTIME, {"share": 0.89}, False),
        (K.OOM_RUNTIME, {"seqs": 32}, False),
        (K.OOM_STARTUP, {}, True),
        (K.OOM_STARTUP, {"share": 0.95, "seqs": 128, "budget": 4096, "length": None}, True),
        (K.OOM_STARTUP, {"share": 0.89}, False),
        (K.OOM_STARTUP, {"seqs": 32}, False),
        (K.OOM_STARTUP, {"budget": 1024}, False),
        (K.OOM_STARTUP, {"length": 2048}, False),
        (K.NO_KV_MEMORY, {}, True),
        (K.NO_KV_MEMORY, {"share": 0.85}, True),
        (K.NO_KV_MEMORY, {"share": 0.5, "seqs": 128, "budget": 4096, "length": None}, True),
        (K.NO_KV_MEMORY, {"share": 0.91}, False),
        (K.NO_KV_MEMORY, {"seqs": 32}, False),
        (K.NO_KV_MEMORY, {"budget": 1024}, False),
        (K.NO_KV_MEMORY, {"length": 2048}, False),
        (K.CRASHED, {}, False),
        (K.INFRASTRUCTURE, {}, False),
        (K.INVALID_MEASUREMENT, {}, False),
    ],
)
def test_a_failure_rules_out_what_demands_no_less(kind: FailureKind, change: dict[str, int], is_out: bool) -> None:  # noqa: FBT001 - a case
    """A launch is spared where the same must happen, and spent where it may not."""
    failure = _failed(7, kind, _config(0.9))
    proposed = _config(**{"share": 0.9, **change})  # type: ignore[arg-type]
    assert (ruled_out(proposed, [failure]) is not None) is is_out


def test_what_was_refused_without_a_launch_teaches_nothing() -> None:
    """Only what an engine did rules anything out; guesses do not breed guesses."""
    failure = _failed(7, K.OOM_RUNTIME, _config(0.9)).model_copy(update={"launched": False})
    assert ruled_out(_config(0.9), [failure]) is None
    assert share_ceiling([_passed(0, _config(0.8)), failure], margin=0.02) is None


_CONFIGS = st.builds(
    _config,
    share=st.sampled_from([0.5, 0.88, 0.9, 0.95, 0.98]),
    seqs=st.sampled_from([16, 64, 1024]),
    budget=st.sampled_from([1024, 2048]),
    length=st.sampled_from([2048, None]),
)


@given(_CONFIGS, _CONFIGS, st.sampled_from([K.OOM_GRAPH_CAPTURE, K.OOM_SAMPLER_WARMUP, K.OOM_RUNTIME, K.OOM_STARTUP]))
def test_a_setting_is_never_ruled_out_for_more_memory_than_a_lower_share(
    proposed: EngineConfig, failed: EngineConfig, kind: FailureKind
) -> None:
    """Whatever failed for taking too much, the same at a lower share stays open; the failed setting itself does not."""
    trials = [_failed(0, kind, failed)]
    assert ruled_out(failed, trials) is not None
    if proposed.gpu_memory_utilization < failed.gpu_memory_utilization:
        assert ruled_out(proposed, trials) is None


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"max_num_active_seqs": 8}])
def test_a_lesson_holds_only_for_what_keeps_the_same_things_in_memory(change: dict[str, object]) -> None:
    """Half the bytes a weight may start where full ones did not: that launch is worth its time."""
    assert ruled_out(_config(0.98), _GRAPHS) is not None
    assert ruled_out(_config(0.98).model_copy(update=change), _GRAPHS) is None
    assert ruled_out(_config(0.98).model_copy(update={"watermark": 0.1}), _GRAPHS) is not None
