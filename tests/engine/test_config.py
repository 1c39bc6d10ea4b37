"""What a config refuses, and how sizes are read."""

import pytest

from engine.config import (
    ConfigError,
    EngineConfig,
    check_against_model,
    check_tensor_parallel,
    device_of_rank,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "value"), [("16k", 16_000), ("16K", 16_384), ("25.6k", 25_600), ("512", 512), ("1G", 2**30), ("1g", 10**9)]
)
def test_lower_case_is_decimal_and_upper_case_binary(text: str, value: int) -> None:
    """A size written for vLLM means the same here."""
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["25.6K", "16 K", "", "k", "-1", "1.5", "1e3", "10kb", "1.0005k"])
def test_what_is_no_whole_size_is_refused_by_name(text: str) -> None:
    """A typing error never becomes another number."""
    with pytest.raises(ConfigError) as refused:
        parse_size(text)
    assert text in str(refused.value)


def test_a_budget_below_the_sequences_is_refused_with_both_numbers() -> None:
    """256 sequences in 128 tokens can never decode together."""
    with pytest.raises(ConfigError, match=r"(?s)128.*256"):
        EngineConfig(model="m", max_num_seqs=256, max_num_batched_tokens=128)
    assert EngineConfig(model="m", max_num_seqs=512, max_num_batched_tokens=512).max_num_seqs == 512


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", -1),
        ("max_num_seqs", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.2),
        ("gpu_memory_utilization", float("nan")),
        ("max_model_len", 0),
        ("block_size", 0),
        ("num_gpu_blocks_override", -5),
        ("seed", -1),
        ("dtype", "int8"),
        ("device", "gpu"),
        ("device", "cpu:"),
        ("device", "cpu:-1"),
        ("device", "cuda:one"),
        ("load_format", "pickled"),
    ],
)
def test_values_that_can_never_work_are_refused_by_key_and_value(name: str, value: object) -> None:
    """The message says which setting to change."""
    with pytest.raises(ConfigError) as refused:
        EngineConfig(model="m", **{name: value})  # type: ignore[arg-type]
    assert name in str(refused.value)
    assert str(value) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("cpu", ["cpu", "cpu:1", "cpu:2"]),
        ("cpu:0", ["cpu", "cpu:1", "cpu:2"]),
        ("cpu:3", ["cpu:3", "cpu:4", "cpu:5"]),
        ("cuda:1", ["cuda:1", "cuda:2", "cuda:3"]),
        ("auto", ["auto", "auto:1", "auto:2"]),
    ],
)
def test_every_rank_has_a_device_of_its_own(name: str, devices: list[str]) -> None:
    """Cores behind one server do not take memory from each other."""
    found = [device_of_rank(name, rank) for rank in range(3)]
    assert found == devices
    for device in found:
        assert EngineConfig(model="m", device=device).device == device


def test_a_budget_above_what_a_step_can_hold_is_a_warning_only() -> None:
    """4 sequences of 2048 tokens in a budget of 16384 start, with exactly one warning naming 16384 and 8192."""
    config = EngineConfig(model="m", max_num_seqs=4, max_num_batched_tokens=16384)
    (warning,) = check_against_model(config, max_model_len=2048)
    assert "16384" in warning
    assert "8192" in warning


def test_a_prefill_threshold_above_the_longest_request_is_refused() -> None:
    """It would never apply, and vLLM, where the config may be deployed, does not start with it."""
    config = EngineConfig(model="m", long_prefill_token_threshold=2049)
    with pytest.raises(ConfigError, match="long_prefill_token_threshold=2049 is above max_model_len=2048"):
        check_against_model(config, max_model_len=2048)
    assert check_against_model(config, max_model_len=2049) == []


def test_chunked_prefill_off_needs_a_budget_of_one_whole_prompt() -> None:
    """With chunking off, 16k of context fits a budget of 16K, and 16K of context does not fit 16k."""
    fits = EngineConfig(model="m", max_num_batched_tokens=parse_size("16K"), enable_chunked_prefill=False)
    assert check_against_model(fits, max_model_len=parse_size("16k")) == []
    short = EngineConfig(model="m", max_num_batched_tokens=parse_size("16k"), enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match=r"(?s)16000.*16384"):
        check_against_model(short, max_model_len=parse_size("16K"))
    narrowed = EngineConfig(
        model="m", max_num_batched_tokens=4096, max_num_scheduled_tokens=1000, enable_chunked_prefill=False
    )
    with pytest.raises(ConfigError, match="max_num_scheduled_tokens=1000 is below max_model_len=2048"):
        check_against_model(narrowed, max_model_len=2048)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "refused"),
    [
        (40, 40, 6, "40 attention heads .* tensor_parallel_size=6"),
        (40, 10, 8, "10 key/value heads .*tensor_parallel_size=8"),
        (40, 40, 8, None),
        (40, 8, 8, None),
        (40, 1, 8, None),
        (40, 2, 8, None),
        (7, 7, 1, None),
    ],
)
def test_heads_must_divide_over_devices(heads: int, kv_heads: int, size: int, refused: str | None) -> None:
    """A parallel size that can never work is refused with both numbers, before weights load."""
    if refused is None:
        check_tensor_parallel(size, num_heads=heads, num_kv_heads=kv_heads)
        return
    with pytest.raises(ConfigError, match=refused):
        check_tensor_parallel(size, num_heads=heads, num_kv_heads=kv_heads)
