"""What is the same for every engine: a job it cannot be told, a server that is not as asked, figures it cannot tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes import records
from tuner.analysis.slo import keeps_headroom
from tuner.engine_config import EngineConfig
from tuner.engines.adapter import Reading, check_job, mismatch, recognised
from tuner.engines.builtin import BUILTIN
from tuner.inputs import InputError
from tuner.job import load_job
from tuner.records import Failed, FailureKind

CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, gpu_memory_utilization=0.9)
PLAIN = replace(
    BUILTIN,
    name="plain",
    settable=frozenset({"max_num_seqs", "max_model_len"}),
    not_applicable=frozenset({"num_preemptions", "kv_cache_usage_peak", "max_model_len"}),
    own_keys=frozenset(),
)
"""An engine that can be told little and tells less."""

SMALL = {
    "why": "One share, so that the size of the KV cache may be fixed.",
    "parameters": {
        "max_num_seqs": {"choices": [4, 8], "why": "x"},
        "max_num_batched_tokens": {"choices": [256], "why": "x"},
        "gpu_memory_utilization": {"choices": [0.9], "why": "x"},
    },
    "cautious_start": {"max_num_seqs": 4, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.9},
}


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"device_memory": "128M", "fixed": {}}, "engine.device_memory"),
        ({"device_memory": None, "cpus": 1, "fixed": {}}, "engine.cpus"),
        ({"device_memory": None, "cpus": None, "fixed": {"watermark": 0.1}}, "engine.fixed.watermark"),
        ({"device_memory": None, "cpus": None, "fixed": {}}, "search_space.parameters.max_num_batched_tokens"),
    ],
)
def test_what_an_engine_cannot_be_told_is_an_error_before_anything_is_launched(
    engine: dict[str, object], told: str
) -> None:
    """A setting that never reaches the engine would be searched, and recommended, for nothing."""
    job = load_job("embedded", {"engine": engine})
    check_job(BUILTIN, job)
    with pytest.raises(InputError, match=f"the engine plain cannot be told .*{told}"):
        check_job(PLAIN, job)


def test_the_share_of_memory_is_left_out_only_where_the_engine_has_none() -> None:
    """An engine that takes a share would take its own default for it, and no answer would say which that was."""
    space = load_job("embedded").search_space.model_dump(mode="json", exclude_none=True)
    for part in ("parameters", "cautious_start"):
        del space[part]["gpu_memory_utilization"]
    engine = {"device_memory": None, "cpus": None, "fixed": {}}
    job = load_job("embedded", {"engine": engine, "search_space": space})
    with pytest.raises(InputError, match=r"gpu_memory_utilization is missing: the engine builtin"):
        check_job(BUILTIN, job)
    has_both = replace(PLAIN, settable=frozenset({"max_num_seqs", "max_num_batched_tokens", "max_model_len"}))
    check_job(has_both, job)


def test_an_engine_that_comes_with_the_tuner_is_started_by_no_other_command() -> None:
    """A command that is silently ignored would have a user measure an engine that is not theirs."""
    job = load_job(
        "embedded", {"engine": {"command": ["/opt/other/bin/serve"], "environment": {"OMP_NUM_THREADS": "2"}}}
    )
    with pytest.raises(InputError, match="the engine builtin cannot be told engine"):
        check_job(BUILTIN, job)


@pytest.mark.parametrize(
    ("name", "value"), [("HF_TOKEN", "hf_x"), ("HTTPS_PROXY", "http://user:pass@proxy:1"), ("VLLM_API_KEY", "k")]
)
def test_a_job_keeps_no_secrets(name: str, value: str) -> None:
    """A job is written into its run's directory, which may be shown to anyone."""
    with pytest.raises(InputError, match=f"{name} is a secret"):
        load_job("embedded", {"engine": {"environment": {name: value}}})


def test_what_cannot_be_read_back_is_not_held_against_the_server() -> None:
    """An engine without a word on its length is measured; one that runs with another number of requests is not."""
    config = CONFIG.model_copy(update={"max_model_len": 512})
    assert mismatch(PLAIN, config, Reading(model_name="x", in_force={"max_num_seqs": 8})) is None
    told = mismatch(PLAIN, config, Reading(model_name="x", in_force={"max_num_seqs": 256}))
    assert told == "max_num_seqs: asked for 8, the engine runs with 256"


@pytest.mark.parametrize(
    ("reading", "kind"),
    [
        (Reading(model_name="stranger", in_force={"max_num_seqs": 8}), FailureKind.INFRASTRUCTURE),
        (Reading(model_name="ours", in_force={"max_num_seqs": 8}), FailureKind.CONFIG_MISMATCH),
        (Reading(model_name="ours"), FailureKind.CONFIG_MISMATCH),
    ],
)
def test_a_server_that_is_not_known_to_be_ours_gets_no_load(reading: Reading, kind: FailureKind) -> None:
    """Figures of another server, or of another config, are worse than none."""
    found = recognised(PLAIN, reading, CONFIG, served_model_name="ours", url="http://127.0.0.1:1")
    assert isinstance(found, Failed)
    assert found.kind is kind


def test_a_figure_that_cannot_be_told_is_not_an_unknown_one() -> None:
    """What an engine should have told and did not fails closed; what it has no counter for rules nothing out."""
    known = records.stage(CONFIG, 8)
    silent = known.model_copy(update={"num_preemptions": None, "kv_cache_usage_peak": None})
    declared = silent.model_copy(update={"not_applicable": ("kv_cache_usage_peak", "num_preemptions")})
    half = silent.model_copy(update={"not_applicable": ("num_preemptions",)})
    assert [keeps_headroom(stage) for stage in (known, silent, half, declared)] == [True, False, False, True]


@pytest.mark.parametrize(
    "name", ["kv_cache_memory_bytes", "quantization", "tensor_parallel_size", "pipeline_parallel_size"]
)
def test_a_parameter_the_engine_does_not_have_is_named_with_the_engine(name: str) -> None:
    """Dropped in silence, a job would answer for a setting that no launch had."""
    value: object = {"quantization": "fp8"}.get(name, 2)
    job = load_job("embedded", {"engine": {"fixed": {name: value}}, "search_space": SMALL})
    with pytest.raises(InputError, match=f"the engine builtin cannot be told engine.fixed.{name}"):
        check_job(BUILTIN, job)
