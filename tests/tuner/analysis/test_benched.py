"""What the stages of a running server answer, and what is said of what it does not tell."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.fakes.records import CHOSEN, estimate, ladder, stage
from tuner.analysis.benched import Asked, conclude
from tuner.answer import LadderVerdict
from tuner.engine_config import EngineConfig
from tuner.records import StageRecord


def _without(stages: Sequence[StageRecord], *names: str) -> list[StageRecord]:
    """The same stages as a server shows them that does not tell these figures."""
    return [each.model_copy(update=dict.fromkeys(names)) for each in stages]


def test_a_told_fence_a_knee_and_the_point_left_of_it() -> None:
    """The whole answer: where to stand, under limits derived from load 1."""
    found = conclude(ladder(CHOSEN), Asked(fence=CHOSEN.fence, fence_source="told", config=CHOSEN))
    assert found.finding.verdict is LadderVerdict.KNEE
    assert found.slo is not None
    assert found.slo.derived
    assert found.operating_point is not None
    assert found.finding.load is not None
    assert found.operating_point.load < found.finding.load
    assert found.finding.binding is not None or found.because


def test_given_limits_are_kept_and_one_that_was_not_given_is_derived() -> None:
    """Who names one limit still gets an operating point."""
    both = conclude(ladder(CHOSEN), Asked(slo_ttft_p95_ms=300.0, slo_itl_p95_ms=60.0, fence=64, fence_source="told"))
    assert both.slo is not None
    assert (both.slo.ttft_p95_ms, both.slo.itl_p95_ms, both.slo.derived) == (300.0, 60.0, False)
    one = conclude(ladder(CHOSEN), Asked(slo_itl_p95_ms=60.0, fence=64, fence_source="told"))
    assert one.slo is not None
    assert (one.slo.itl_p95_ms, one.slo.derived) == (60.0, True)


def test_without_metrics_there_is_an_answer_and_every_gap_is_named() -> None:
    """A server without a page of metrics is measured from outside; nobody reads its silence as health."""
    mute = ("mean_running", "mean_waiting", "peak_running", "num_preemptions", "kv_cache_usage_peak")
    found = conclude(_without([each for each in ladder(CHOSEN) if not each.fenced], *mute), Asked())
    said = " ".join(found.warnings)
    assert found.finding.verdict is LadderVerdict.KNEE
    assert found.operating_point is not None
    assert found.operating_point.num_preemptions is None
    assert (found.fence, found.fence_source) == (None, None)
    assert "--fence" in said
    assert "preemptions are not known" in said
    assert "headroom of load" in said


def test_known_preemptions_are_no_headroom() -> None:
    """What is unknown is let pass and said; what is known to be bad is not."""
    preempting = [each.model_copy(update={"num_preemptions": 3}) for each in ladder(CHOSEN)]
    assert conclude(preempting, Asked(fence=64, fence_source="told")).operating_point is None


def test_a_load_past_the_fence_is_said_to_queue_from_there_on() -> None:
    """512 streams on 256 seats are a queue of 256: who takes that for the engine's own bend caps it for nothing."""
    config = CHOSEN.model_copy(update={"max_num_seqs": 256})
    stages = [stage(config, load, index=index) for index, load in enumerate((128, 256, 512))]
    assert [each.fenced for each in stages] == [False, False, True]
    for source in ("told", "given"):
        said = conclude(stages, Asked(fence=256, fence_source=source, config=config)).warnings
        assert any("load 512 is past the fence: max_num_seqs lets 256 requests run at once" in each for each in said)
    below = conclude(stages[:2], Asked(fence=256, fence_source="told", config=config)).warnings
    on_purpose = conclude(ladder(CHOSEN), Asked(fence=CHOSEN.fence, fence_source="told", config=CHOSEN)).warnings
    assert not any("past the fence" in each for each in (*below, *on_purpose))


def test_a_fence_nobody_told_of_is_recognised_and_said() -> None:
    """The answer does not call a hidden limit the engine's knee."""
    config = EngineConfig(max_num_seqs=12, max_num_batched_tokens=4096, gpu_memory_utilization=0.9)
    loads = (1, 2, 3, 4, 6, 8, 12, 16, 32)
    stages = [stage(config, load, index=i).model_copy(update={"fenced": False}) for i, load in enumerate(loads)]
    linear = [
        each.model_copy(update={"output_throughput": estimate(50.0 * min(each.load, 12)), "kv_cache_usage_peak": 0.2})
        for each in stages
    ]
    found = conclude(linear, Asked())
    assert (found.fence, found.fence_source) == (12, "recognised")
    assert found.finding.verdict is LadderVerdict.FENCED
    assert [each.load for each in found.stages if each.fenced] == [16, 32]
    assert "12 ran at once" in " ".join(found.warnings)


@pytest.mark.parametrize("num_stages", [0, 2, 4])
def test_a_short_ladder_says_so_and_nothing_else_breaks(num_stages: int) -> None:
    """An interruption after any stage leaves an answer that can be written down."""
    found = conclude(ladder(CHOSEN)[:num_stages], Asked(fence=64, fence_source="told"))
    assert found.finding.verdict is LadderVerdict.TOO_FEW_STAGES
