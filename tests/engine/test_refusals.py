"""What can never work is refused before anything loads, by key and value: every setting, alone and in pairs."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.__main__ import main
from engine.config import ConfigError, EngineConfig, check_against_model
from engine.scheduler import refusal
from tests.fakes.executor import fake_resolved

_BELOW_ONE = (0, -1, -(2**40))
_NO_COUNT = (*_BELOW_ONE, 2**31, 10**23)
_NO_SHARE = (0.0, -0.1, 1.0001, 1.2, 90, math.nan, math.inf)

BAD: dict[str, tuple[object, ...]] = {
    "max_num_seqs": _NO_COUNT,
    "max_num_batched_tokens": _NO_COUNT,
    "gpu_memory_utilization": _NO_SHARE,
    "max_model_len": _NO_COUNT,
    "max_num_scheduled_tokens": _NO_COUNT,
    "long_prefill_token_threshold": (-1, -(2**40)),
    "max_num_active_seqs": _NO_COUNT,
    "watermark": (-0.01, 1.0, 1.5, math.nan, math.inf),
    "max_num_queued_reqs": _NO_COUNT,
    "max_num_queued_tokens": _NO_COUNT,
    "data_parallel_size": (*_BELOW_ONE, 65, 100_000),
    "tensor_parallel_size": _NO_COUNT,
    "block_size": _NO_COUNT,
    "kv_cache_dtype": ("", "int4", "FP8"),
    "num_gpu_blocks_override": _NO_COUNT,
    "device_memory_bytes": (*_BELOW_ONE, 2**63),
    "dtype": ("", "int8", "float64"),
    "device": ("", "gpu", "cpu:", "cpu:-1", "cpu:1.5", "cuda:one", "cpu:99999"),
    "load_format": ("", "pickle"),
    "executor": ("", "numpy"),
    "law": ("a law without the executor it is for",),
    "seed": (-1, 2**63),
}
"""For each setting, values that can never work."""

ANY_VALUE = {
    "model",
    "served_model_name",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "scheduler_reserve_full_isl",
}
"""Names, and switches both of whose positions work."""

CHECKED_LATER = {"cpu_omp_threads_bind"}
"""Against the machine: `test_core.py`."""


def test_no_setting_is_left_out() -> None:
    """A new knob comes with the values it refuses."""
    assert {field.name for field in fields(EngineConfig)} - BAD.keys() - ANY_VALUE - CHECKED_LATER == set()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_every_bad_value_is_refused_by_key_and_value(name: str, value: Any) -> None:
    """The message says which setting to change, and what was asked, on every path to the engine."""
    with pytest.raises(ConfigError) as refused:
        EngineConfig(model="m", **{name: value})
    assert name in str(refused.value)
    assert (repr(value) if isinstance(value, str) else str(value)) in str(refused.value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        (f"--{name.removesuffix('_bytes').replace('_', '-')}", value)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "gpu_memory_utilization", "block_size")
        for value in BAD[name]
    ],
)
@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_bad_value_on_the_command_line_ends_before_anything_loads(
    command: str, flag: str, value: object, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both numbers of the mistake, the key and the value, stand in what the user sees."""
    try:
        code = main([command, "embedded", f"{flag}={value}"])
    except SystemExit as ended:  # argparse's way for what is no number at all
        code = int(str(ended.code))
    error = capfd.readouterr().err
    assert code in (1, 2)
    assert flag.lstrip("-") in error.replace("_", "-")
    assert str(value) in error


@given(seqs=st.integers(1, 2048), budget=st.integers(1, 20000))
def test_a_budget_needs_a_token_for_each_sequence(seqs: int, budget: int) -> None:
    """Whatever the pair: below, it is refused with both numbers; at or above, it is not."""
    if budget >= seqs:
        assert EngineConfig(model="m", max_num_seqs=seqs, max_num_batched_tokens=budget).max_num_seqs == seqs
        return
    with pytest.raises(ConfigError, match=rf"max_num_batched_tokens={budget} is below max_num_seqs={seqs}:"):
        EngineConfig(model="m", max_num_seqs=seqs, max_num_batched_tokens=budget)


@given(
    budget=st.integers(256, 200_000), length=st.integers(1, 200_000), seqs=st.integers(1, 256), chunked=st.booleans()
)
def test_a_whole_prompt_must_fit_one_step_only_without_chunking(
    budget: int, length: int, seqs: int, *, chunked: bool
) -> None:
    """Refused with both numbers where chunking is off; with it on the same numbers start, with one warning at most."""
    config = EngineConfig(model="m", max_num_seqs=seqs, max_num_batched_tokens=budget, enable_chunked_prefill=chunked)
    if not chunked and budget < length:
        with pytest.raises(ConfigError, match=rf"={budget} is below max_model_len={length} with chunked prefill off"):
            check_against_model(config, max_model_len=length)
        return
    warnings = check_against_model(config, max_model_len=length)
    assert len(warnings) == (budget > seqs * length)
    for warning in warnings:
        assert str(budget) in warning
        assert str(seqs * length) in warning


@pytest.mark.parametrize(("budget", "length"), [(8192, 131072), (2048, 40960)])
def test_reported_budgets_below_the_context_are_right_with_chunking_and_wrong_without(budget: int, length: int) -> None:
    """A wrapper's default budget on a long-context model aborts nothing with chunking on; off, it is explained."""
    on = EngineConfig(model="m", max_num_batched_tokens=budget)
    assert check_against_model(on, max_model_len=length) == []
    assert on.max_num_batched_tokens == budget
    off = EngineConfig(model="m", max_num_batched_tokens=budget, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match=rf"(?s){budget}.*{length}"):
        check_against_model(off, max_model_len=length)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_num_active_seqs": 65, "max_num_seqs": 64}, "max_num_active_seqs=65 is above max_num_seqs=64"),
        (
            {"max_num_scheduled_tokens": 4096, "max_num_batched_tokens": 2048},
            "max_num_scheduled_tokens=4096 is above max_num_batched_tokens=2048",
        ),
    ],
)
def test_a_limit_that_narrows_another_is_not_above_it(settings: dict[str, Any], told: str) -> None:
    """A narrower limit above the wider one would silently do nothing: both are named."""
    with pytest.raises(ConfigError, match=re.escape(told)):
        EngineConfig(model="m", **settings)


def test_a_prompt_larger_than_the_whole_cache_is_refused_at_once_with_both_numbers() -> None:
    """A prompt of 200 tokens in 8 blocks of 16 blocks nobody: 13 needed, 8 present."""
    config = fake_resolved(EngineConfig(model="m", num_gpu_blocks_override=8, max_model_len=256))
    reason = refusal(config, 200)
    assert reason is not None
    assert "needs 13 KV blocks" in reason
    assert "the cache has 8" in reason
    assert refusal(config, 16) is None
