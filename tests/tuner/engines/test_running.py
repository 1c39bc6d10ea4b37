"""A server somebody else started: what it tells is taken as told, and what it does not is unknown."""

from __future__ import annotations

import json

import pytest

from tests.fakes.server import Behaviour, StubEngine, running_stub
from tuner.engines.running import discover, reset_prefix_cache
from tuner.inputs import InputError
from tuner.load.connection import Endpoint

VLLM_METRICS = """
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.1
vllm:num_preemptions_total{engine="0"} 0.0
vllm:cache_config_info{engine="0",num_gpu_blocks="100",block_size="16"} 1.0
"""
SERVER_INFO = {
    "vllm_config": {
        "model_config": {"max_model_len": 4096, "dtype": "torch.bfloat16"},
        "cache_config": {"gpu_memory_utilization": 0.9, "enable_prefix_caching": True, "cache_dtype": "auto"},
        "parallel_config": {"tensor_parallel_size": 1, "data_parallel_size": 2},
        "scheduler_config": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_num_active_seqs": None},
    }
}


def _models(*names: str, **more: object) -> tuple[int, str]:
    return 200, json.dumps({"data": [{"id": name, **more} for name in names]})


async def test_vllm_tells_its_config_in_development_mode() -> None:
    """The fence of a server with two cores is that of both together, and its length bounds the workload."""
    async with running_stub(Behaviour()) as stub:
        stub.pages = {
            "/v1/models": _models("llama", owned_by="vllm", max_model_len=4096),
            "/metrics": (200, VLLM_METRICS),
            "/version": (200, '{"version": "0.33.0"}'),
            "/server_info?config_format=json": (200, json.dumps(SERVER_INFO)),
        }
        facts = (await discover(stub.endpoint, model=None)).facts
    assert (facts.engine, facts.version, facts.model, facts.max_model_len) == ("vllm", "0.33.0", "llama", 4096)
    assert facts.fence == 128
    assert facts.config is not None
    assert (facts.config.dtype, facts.config.max_num_seqs) == ("bfloat16", 64)
    assert facts.has_metrics
    assert facts.num_in_flight == 4


async def test_a_server_that_tells_nothing_is_measured_all_the_same() -> None:
    """No metrics, no version, no length: each is unknown, none is made up."""
    async with running_stub(Behaviour()) as stub:
        stub.pages = {"/v1/models": _models("m"), "/metrics": (404, "")}
        facts = (await discover(stub.endpoint, model=None)).facts
        not_reset = await reset_prefix_cache(stub.endpoint)
    assert (facts.engine, facts.version, facts.max_model_len, facts.fence, facts.config) == ("unknown",) + 4 * (None,)
    assert not facts.has_metrics
    assert facts.num_in_flight is None
    assert not_reset == "HTTP 404"


async def _error(stub: StubEngine, model: str | None = None) -> str:
    with pytest.raises(InputError) as raised:
        await discover(stub.endpoint, model=model)
    return str(raised.value)


async def test_of_several_models_one_has_to_be_named() -> None:
    """Measuring whichever comes first would measure another model than the user means."""
    async with running_stub(Behaviour()) as stub:
        stub.pages = {"/v1/models": _models("base", "lora")}
        assert "--model: base, lora" in await _error(stub)
        assert "does not serve --model other: it has base, lora" in await _error(stub, "other")
        assert (await discover(stub.endpoint, model="lora")).facts.model == "lora"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((401, ""), "--api-key-env"),
        ((404, "not here"), "no OpenAI-compatible server"),
        ((200, "<html>"), "no OpenAI-compatible server"),
        ((200, '{"data": []}'), "no OpenAI-compatible server"),
        ((200, '{"data": [1, {"name": "x"}]}'), "no OpenAI-compatible server"),
        ((200, "[]"), "no OpenAI-compatible server"),
    ],
)
async def test_what_is_no_server_of_ours_is_said_at_once(answer: tuple[int, str], told: str) -> None:
    """A wrong address or a missing key is an error that names the way out, not ten stages of failures."""
    async with running_stub(Behaviour()) as stub:
        stub.pages = {"/v1/models": answer}
        assert told in await _error(stub)


async def test_nobody_at_the_address() -> None:
    """A server that was not started yet is named by its address."""
    async with running_stub(Behaviour()) as stub:
        endpoint = stub.endpoint
    with pytest.raises(InputError, match=rf"http://127.0.0.1:{endpoint.port}/v1/models: no answer"):
        await discover(endpoint, model=None)


async def test_a_key_goes_with_every_request_and_is_shown_nowhere() -> None:
    """A key in a log or a record is a key lost."""
    async with running_stub(Behaviour()) as stub:
        stub.pages = {"/v1/models": _models("m"), "/reset_prefix_cache": (200, "")}
        endpoint = stub.endpoint.with_key("sk-very-secret")
        server = await discover(endpoint, model=None)
        assert await reset_prefix_cache(endpoint) is None
    assert stub.authorizations == {"Bearer sk-very-secret"}
    assert "secret" not in repr(endpoint) + repr(server) + server.facts.model_dump_json()


async def test_a_cache_in_use_is_not_reset() -> None:
    """Our engine answers 200 and says that it could not: that is no reset."""
    async with running_stub(Behaviour()) as stub:
        stub.pages = {"/reset_prefix_cache": (200, '{"success": false}')}
        assert await reset_prefix_cache(stub.endpoint) == "the server had requests in flight"


async def test_requests_that_were_hung_up_on_are_waited_for() -> None:
    """A reset right after a stage meets its last requests: asked once, it would never be done."""

    class _Draining(dict[str, tuple[int, str]]):
        left = 2

        def __getitem__(self, path: str) -> tuple[int, str]:
            self.left -= 1
            return 200, json.dumps({"success": self.left < 0})

    async with running_stub(Behaviour()) as stub:
        stub.pages = _Draining({"/reset_prefix_cache": (200, "")})
        assert await reset_prefix_cache(stub.endpoint, patience_s=60.0) is None


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://host/v1", "ssh -L"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://", "http://127.0.0.1:8000"),
    ],
)
def test_an_address_that_is_not_spoken_names_one_that_is(url: str, told: str) -> None:
    """Whoever has https in front of a server is told how to get behind it."""
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        Endpoint.from_url(url)


def test_an_address_is_written_back_without_its_version_path() -> None:
    """IPv6 hosts keep their brackets, so that the address can be used again."""
    assert Endpoint.from_url("http://[::1]:8000/v1").url == "http://[::1]:8000"
    assert Endpoint.from_url("http://host/proxy/v1/").url == "http://host:80/proxy"
