"""What the tuner states of the built-in engine without asking it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.__main__ import engine_config, parse_arguments
from engine.config import EngineConfig
from engine.device_ledger import Claim
from engine.memory import DeviceMemory, NotEnoughMemoryError, requested_bytes
from tuner.engine_config import EngineConfig as TunedConfig
from tuner.engines import builtin
from tuner.engines.adapter import Reading, mismatch
from tuner.engines.builtin import BUILTIN
from tuner.engines.device_return import NotFree
from tuner.inputs import InputError
from tuner.job import EngineSpec, load_job


def test_the_defaults_are_those_of_the_engine() -> None:
    """A recommendation is compared with what a user gets unasked; a stale default would misstate the gain."""
    asked = EngineConfig(model="m")
    stated = builtin.DEFAULTS
    assert (stated.max_num_seqs, stated.max_num_batched_tokens, stated.gpu_memory_utilization) == (
        asked.max_num_seqs,
        asked.max_num_batched_tokens,
        asked.gpu_memory_utilization,
    )


def test_a_law_is_simulated_and_nothing_else_is() -> None:
    """A rehearsal is asked for by name; without a law every launch computes."""
    config = TunedConfig(max_num_seqs=8, max_num_batched_tokens=256, gpu_memory_utilization=0.9)

    def command(spec: EngineSpec) -> list[str]:
        return BUILTIN.command("embedded", config, spec, port=1, served_model_name="x")

    assert "--executor" not in command(EngineSpec())
    line = " ".join(command(EngineSpec(law="h100-8b")))
    assert "--executor simulated --law h100-8b" in line


def test_a_law_brings_its_own_device() -> None:
    """128 MiB set aside for a real model would quietly shrink a simulated card."""
    with pytest.raises(InputError, match="law=h100-8b brings a device of its own size: leave device_memory out"):
        load_job("embedded", {"engine": {"law": "h100-8b"}})


_PAGE = """\
vllm:cache_config_info{engine="0",num_gpu_blocks="40",block_size="16"} 1.0
vllm:cache_config_info{engine="1",num_gpu_blocks="30",block_size="16"} 1.0
engine:config_info{version="1",device="cpu",max_model_len="512",executor="torch"} 1.0
"""
_PARTS = {"total": 1000, "requested": 900, "weights": 100, "activation_peak": 50, "kv_cache": 777, "kv_block": 10}


def test_several_cores_are_read_as_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one core's figures a deployment of two would seem to need half the memory."""
    memory = [
        f'engine:memory_bytes{{engine="{rank}",part="{part}"}} {size}' for rank in "01" for part, size in _PARTS.items()
    ]
    answers = {"/v1/models": '{"data": [{"id": "m"}]}', "/metrics": _PAGE + "\n".join(memory)}
    monkeypatch.setattr(builtin, "read_url", lambda url, **_: answers[url.removeprefix("http://x")].encode())
    reading = BUILTIN.read("http://x", log=Path("engine.log"))

    facts = reading.facts
    assert facts is not None
    assert (facts.num_gpu_blocks, facts.kv_block_bytes, facts.memory_total_bytes) == (70, 10, 2000)
    assert (facts.memory_reserved_bytes, facts.weights_bytes, facts.activation_peak_bytes) == (1800, 200, 100)
    # The blocks in force: an override has others than the share leaves room for.
    assert reading.memory.kv_cache_bytes == 700


SETTINGS = [
    ({"max_model_len": 2048}, "--max-model-len 2048"),
    ({"enable_chunked_prefill": False}, "--no-enable-chunked-prefill"),
    ({"enable_prefix_caching": True}, "--enable-prefix-caching"),
    ({"dtype": "bfloat16"}, "--dtype bfloat16"),
    ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    ({"long_prefill_token_threshold": 0}, "--long-prefill-token-threshold 0"),
    ({"max_num_active_seqs": 4}, "--max-num-active-seqs 4"),
    ({"max_num_scheduled_tokens": 128}, "--max-num-scheduled-tokens 128"),
    ({"watermark": 0.0123456789}, "--watermark 0.0123456789"),
    ({"max_num_queued_reqs": 9}, "--max-num-queued-reqs 9"),
    ({"max_num_queued_tokens": 9000}, "--max-num-queued-tokens 9000"),
    ({"block_size": 32}, "--block-size 32"),
    ({"num_gpu_blocks_override": 64}, "--num-gpu-blocks-override 64"),
    ({"data_parallel_size": 2}, "--data-parallel-size 2"),
    ({"scheduler_reserve_full_isl": True}, "--scheduler-reserve-full-isl"),
    ({"scheduler_reserve_full_isl": False}, "--no-scheduler-reserve-full-isl"),
]


@pytest.mark.parametrize(("setting", "flags"), SETTINGS)
def test_every_parameter_that_is_set_reaches_the_engine(setting: dict[str, object], flags: str) -> None:
    """The engine's own parser reads each flag to the value that was asked for; what is not set is left to it."""
    three = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.9}
    config = TunedConfig.model_validate(three | setting)
    line = BUILTIN.command("embedded", config, EngineSpec(), port=1, served_model_name="x")
    assert f" {flags} " in " ".join(line)
    serve = line[line.index("serve") :]
    asked = engine_config(parse_arguments(serve))
    for name, value in config.model_dump(exclude={"pipeline_parallel_size", "extra_args"}, exclude_none=True).items():
        assert getattr(asked, name) == value
    unset = EngineConfig(model="embedded")
    for name, value in config.model_dump().items():
        if value is None:
            assert getattr(asked, name, None) == getattr(unset, name, None)


def test_further_arguments_are_handed_on_as_they_are() -> None:
    """What we have no name for can be set all the same."""
    three = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.9}
    config = TunedConfig.model_validate(three | {"extra_args": ["--seed", "7"]})
    line = BUILTIN.command("embedded", config, EngineSpec(), port=1, served_model_name="x")
    assert engine_config(parse_arguments(line[line.index("serve") :])).seed == 7


@pytest.mark.parametrize("setting", [setting for setting, _ in SETTINGS])
def test_a_parameter_in_force_that_was_not_asked_for_is_seen(setting: dict[str, object]) -> None:
    """A launch that runs with another value than its record says would teach the study a falsehood."""
    three = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.9}
    config = TunedConfig.model_validate(three | setting)
    labels = {name: str(value) for name, value in config.model_dump(exclude_none=True).items()}

    def reading(**over: str) -> Reading:
        return Reading(model_name="x", in_force=labels | over)

    others = reading(watermark="0.5") if config.watermark is None else reading()
    assert mismatch(BUILTIN, config, others) is None
    (name,) = setting
    told = mismatch(BUILTIN, config, reading(**{name: "other"}))
    assert told == f"{name}: asked for {setting[name]}, the engine runs with other"


@pytest.mark.parametrize(("total", "unit"), [(8 * 2**30, 2**30), (96 * 2**20, 2**20), (64 * 2**10, 2**10), (500, 1)])
def test_what_a_start_was_short_of_is_read_in_the_engines_own_words(total: int, unit: int) -> None:
    """A retry waits for what is missing; for words it cannot read it would not wait at all."""
    claims = (Claim(12, "x", total // 2), Claim(34, "y", 1))
    with pytest.raises(NotEnoughMemoryError) as caught:
        requested_bytes(DeviceMemory(total_bytes=total, free_bytes=total // 4, claims=claims), 0.9, least_bytes=0)
    missing = BUILTIN.not_free(str(caught.value))
    assert missing is not None
    assert missing.holders == (12, 34)
    assert abs(missing.requested_bytes - int(0.9 * total)) <= 0.01 * unit
    assert BUILTIN.not_free("cannot bind 127.0.0.1:80: in use") is None
    alone = "gpu_memory_utilization=0.9 asks for 7.20 GiB of 8.00 GiB, but 2.00 GiB is free now: free some"
    assert BUILTIN.not_free(alone) == NotFree(requested_bytes=round(7.2 * 2**30))
