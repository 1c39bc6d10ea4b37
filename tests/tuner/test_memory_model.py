"""One launch tells enough to spare the hopeless ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tuner.engine_config import EngineConfig
from tuner.memory_model import MemoryModel
from tuner.records import EngineFacts

MIB = 2**20


def _config(share: float, budget: int = 2048) -> EngineConfig:
    return EngineConfig(max_num_seqs=128, max_num_batched_tokens=budget, gpu_memory_utilization=share)


def _facts(blocks: int | None = 923) -> EngineFacts:
    return EngineFacts(
        engine="builtin",
        version="0",
        device="cpu",
        num_gpu_blocks=blocks,
        block_size=16,
        max_model_len=2048,
        kv_block_bytes=MIB // 8,
        memory_total_bytes=192 * MIB,
        memory_reserved_bytes=int(0.92 * 192 * MIB),
        weights_bytes=25 * MIB,
        activation_peak_bytes=37 * MIB,
    )


def _model() -> MemoryModel:
    model = MemoryModel.calibrated(_config(0.92), _facts())
    assert model is not None
    return model


def test_the_calibrating_launch_is_predicted_exactly() -> None:
    """A prediction that misses what was measured would refuse working settings."""
    assert abs(_model().num_blocks(_config(0.92)) - 923) <= 1


def test_a_share_without_room_for_one_request_is_refused_with_its_figures() -> None:
    """The user reads which share, how many blocks, and how many one request needs."""
    reason = _model().refusal(_config(0.36))
    assert reason is not None
    assert "gpu_memory_utilization=0.36" in reason
    assert "128" in reason
    assert _model().refusal(_config(0.6)) is None


@given(st.floats(0.05, 1.0), st.floats(0.05, 1.0), st.integers(128, 2048))
def test_more_share_never_means_fewer_blocks(one: float, other: float, budget: int) -> None:
    """A setting is not refused while a smaller share passes."""
    low, high = sorted((one, other))
    model = _model()
    assert model.num_blocks(_config(low, budget)) <= model.num_blocks(_config(high, budget))


def test_an_engine_that_does_not_say_gives_no_model() -> None:
    """Unknown is not guessed: without figures nothing is refused."""
    assert MemoryModel.calibrated(_config(0.92), _facts(blocks=None)) is None


def test_requests_that_fit() -> None:
    """77088 tokens of cache hold 73 requests of 1050 tokens: a fence of 256 would preempt."""
    model = MemoryModel(
        total_bytes=77088,
        block_bytes=16,
        block_size=16,
        max_model_len=2048,
        fixed_bytes=0,
        activation_bytes_per_token=0.0,
        held=_model().held,
    )
    assert model.requests_that_fit(_config(1.0), 1050) == 73


OVERRIDE: dict[str, object] = {"num_gpu_blocks_override": 200}


def test_nothing_is_predicted_from_a_launch_whose_blocks_the_share_did_not_make() -> None:
    """Blocks that were asked for say nothing of what a share leaves: working settings would be refused."""
    assert MemoryModel.calibrated(_config(0.92).model_copy(update=OVERRIDE), _facts()) is None


def test_nothing_is_predicted_for_other_types_and_a_length_of_its_own_is_heeded() -> None:
    """A smaller type may fit where the measured one does not, and a shorter request needs fewer blocks."""
    hopeless = _config(0.35)
    assert _model().refusal(hopeless) is not None
    for change in ({"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"max_model_len": 16}, OVERRIDE):
        assert _model().refusal(hopeless.model_copy(update=change)) is None
