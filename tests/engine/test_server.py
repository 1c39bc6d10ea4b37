"""The server over real HTTP, with a real core process and a made-up executor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import aiohttp
import psutil
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from engine.config import EngineConfig
from engine.frontend import Frontend, NewRequest, NewToken
from engine.models.folder import model_folder
from engine.server import Api
from engine.tokenizer import TextTokenizer
from tests.fakes.executor import fake_resolved
from tests.fakes.serving import ROOT, Serving, core_children, fake_command, json_lines, serving, start, wait_until_gone
from tuner.load.connection import Endpoint
from tuner.load.probe import tells_token_ids


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """One server for all tests that leave it as it was."""
    with serving(fake_command("FakeExecutor", max_num_seqs=32, num_gpu_blocks_override=40)) as running:
        yield running


@pytest.fixture
async def client(server: Serving) -> AsyncIterator[aiohttp.ClientSession]:
    """A session on that server."""
    async with aiohttp.ClientSession(server.url) as session:
        yield session


def data_of(body: str) -> list[Any]:
    """The events of a stream, which must end with [DONE]."""
    *events, done = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


async def metric(session: aiohttp.ClientSession, name: str, **labels: str) -> float:
    """One sample of /metrics."""
    async with session.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    (value,) = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return value


async def until(session: aiohttp.ClientSession, name: str, wanted: float) -> None:
    """Poll a metric until it has a value; the test's own limit is 10 s."""
    async with asyncio.timeout(10):
        while await metric(session, name) != wanted:  # noqa: ASYNC110 - what is awaited happens in another process
            await asyncio.sleep(0.01)


async def test_one_event_a_token_with_running_usage(client: aiohttp.ClientSession) -> None:
    """A load generator counts tokens by events and checks them by usage."""
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with client.post("/v1/completions", json=body) as response:
        assert response.content_type == "text/event-stream"
        *tokens, last = data_of(await response.text())
    assert [event["usage"]["completion_tokens"] for event in tokens] == [1, 2, 3, 4, 5]
    assert [event["choices"][0]["finish_reason"] for event in tokens] == [None] * 4 + ["length"]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


async def test_a_stream_and_a_whole_answer_say_the_same(client: aiohttp.ClientSession) -> None:
    """Text and token ids of a prompt, streamed or not, give one text, and usage counts are exact."""
    body = {"model": "embedded", "prompt": "hello", "max_tokens": 6, "temperature": 0}
    async with client.post("/v1/completions", json=body) as response:
        whole = await response.json()
    async with client.post("/v1/completions", json={**body, "stream": True}) as response:
        events = data_of(await response.text())
    assert whole["choices"][0]["text"] == "".join(event["choices"][0]["text"] for event in events)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == len(events) == 6
    assert "usage" not in events[0]


async def test_completions_tell_token_ids(client: aiohttp.ClientSession) -> None:
    """A client that goes on from an answer can send the very tokens: read back from text they may be others."""
    body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4, "temperature": 0, "n": 2, "ignore_eos": True}
    async with client.post("/v1/completions", json={**body, "return_token_ids": True}) as response:
        choices = (await response.json())["choices"]
    async with client.post("/v1/completions", json={**body, "return_token_ids": True, "stream": True}) as response:
        events = [event["choices"][0] for event in data_of(await response.text())]
    async with client.post("/v1/completions", json=body) as response:
        plain = (await response.json())["choices"]

    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6, 7]] * 2 + [[8, 9]] * 2
    assert all(len(choice["token_ids"]) == 4 for choice in choices)
    for choice in choices:
        chunks = [event for event in events if event["index"] == choice["index"]]
        assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == choice["token_ids"]
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [choice["prompt_token_ids"], None, None, None]
    assert not {"token_ids", "prompt_token_ids"} & set(plain[0])


async def test_chats_tell_token_ids(client: aiohttp.ClientSession) -> None:
    """The prompt that a template made of the messages is told once, beside the choices."""
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with client.post("/v1/chat/completions", json=body) as response:
        whole = await response.json()
    async with client.post("/v1/chat/completions", json={**body, "stream": True}) as response:
        role, *events = data_of(await response.text())

    told = [token_id for event in events for token_id in event["choices"][0]["token_ids"]]
    assert len(told) == 4
    assert told == whole["choices"][0]["token_ids"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert role["prompt_token_ids"] == whole["prompt_token_ids"]
    assert "prompt_token_ids" not in events[0]


async def test_the_tuner_is_told_token_ids(server: Serving) -> None:
    """Turns of a chat repeat what was really said, so that a prefix cache knows it."""
    assert await tells_token_ids(Endpoint.from_url(server.url), "embedded", token_ids=range(256))


async def test_chat_opens_with_the_role(client: aiohttp.ClientSession) -> None:
    """Chat clients expect the role first, then content."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3}
    async with client.post("/v1/chat/completions", json={**body, "stream": True}) as response:
        role, *tokens = data_of(await response.text())
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(tokens) == 3
    parts = [{"type": "text", "text": "hi"}]
    body["messages"] = [{"role": "user", "content": parts}]
    async with client.post("/v1/chat/completions", json=body) as response:
        whole = await response.json()
    text = "".join(event["choices"][0]["delta"]["content"] for event in tokens)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": [1] * 256}, 400, ["256 tokens", "max_model_len is 256"]),
        ({"prompt": []}, 400, ["empty"]),
        ({"prompt": [1, 259]}, 400, ["259"]),
        ({"prompt": [1, -1]}, 400, ["-1"]),
        ({"prompt": ["a", "b" * 300]}, 400, ["max_model_len is 256"]),
        ({"prompt": [[5], [1, 259]]}, 400, ["259"]),
        ({"prompt": "a", "model": "other"}, 404, ["other", "embedded"]),
        ({"prompt": "a", "max_tokens": 0}, 400, ["max_tokens"]),
        ({"prompt": "a", "top_p": 1.1}, 400, ["top_p", "1.1", "less than or equal to 1"]),
        ({"prompt": "a", "stop": list("abcde")}, 400, ["stop", "at most 4"]),
        ({"prompt": "a", "logprobs": 21}, 400, ["logprobs", "21", "20"]),
        ({"prompt": "a", "n": 129}, 400, ["n=129", "128"]),
        ({"prompt": "a", "stop_token_ids": [259]}, 400, ["stop_token_ids", "[0, 259)"]),
        ({"prompt": "a", "tempreature": 0}, 400, ["tempreature"]),
        ({"prompt": "a", "temperature": -1}, 400, ["temperature"]),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, ["stream_options"]),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    client: aiohttp.ClientSession, body: dict[str, object], status: int, words: list[str]
) -> None:
    """Nothing that would change the output is ignored in silence, and the error has OpenAI's shape."""
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(word in error["message"] for word in words)


async def test_messages_that_the_template_cannot_take_are_refused(client: aiohttp.ClientSession) -> None:
    """A message without content is the client's mistake, said in OpenAI's shape."""
    body = {"messages": [{"role": "assistant", "content": None}]}
    async with client.post("/v1/chat/completions", json=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
    assert "chat template" in error["message"]


async def test_text_beyond_the_vocabulary_harms_nobody() -> None:
    """A tokenizer with more tokens than the model costs one client a 400, and the engine goes on."""
    with serving(fake_command("SmallVocabularyExecutor")) as running:
        async with aiohttp.ClientSession(running.url) as session:
            for path, asked in (
                ("completions", {"prompt": "z"}),
                ("chat/completions", {"messages": [{"role": "user", "content": "z"}]}),
            ):
                async with session.post(f"/v1/{path}", json=asked) as response:
                    assert response.status == 400
                    message = (await response.json())["error"]["message"]
                assert "outside the vocabulary [0, 110)" in message
            async with session.post("/v1/completions", json={"prompt": "a"}) as response:
                assert response.status == 200


async def test_the_newer_name_of_max_tokens_wins(client: aiohttp.ClientSession) -> None:
    """A client that sends both gets the length it asked for under the current name."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "max_completion_tokens": 4}
    async with client.post("/v1/chat/completions", json=body) as response:
        assert (await response.json())["usage"]["completion_tokens"] == 4


async def test_neutral_and_harmless_fields_are_accepted(client: aiohttp.ClientSession) -> None:
    """Clients that spell out the defaults are served."""
    body = {"prompt": "a", "top_p": 1.0, "top_k": -1, "n": 1, "stop": None, "user": "me", "logprobs": None}
    body |= {"echo": False, "suffix": None, "tools": [], "response_format": {"type": "text"}, "stream": None}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200


@pytest.mark.parametrize("included", [False, True])
async def test_a_stop_string_ends_an_answer(client: aiohttp.ClientSession, included: bool) -> None:  # noqa: FBT001 - a case
    """Across tokens, whole and streamed: the text ends there, and the usage counts every token that was generated."""
    body = {"prompt": "a", "max_tokens": 20, "stop": ["xyz", "def"], "include_stop_str_in_output": included}
    text = "abcdef" if included else "abc"
    async with client.post("/v1/completions", json=body) as response:
        whole = await response.json()
    options = {"include_usage": True}
    async with client.post("/v1/completions", json={**body, "stream": True, "stream_options": options}) as response:
        *events, last = data_of(await response.text())
    (choice,) = whole["choices"]

    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "def")
    assert whole["usage"] == last["usage"]
    assert last["usage"]["completion_tokens"] == len(events) == 6
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert "de" not in "".join(event["choices"][0]["text"] for event in events[:-1]) or included
    assert events[-1]["choices"][0]["stop_reason"] == "def"


async def test_a_stop_token_ends_an_answer(client: aiohttp.ClientSession) -> None:
    """Not before `min_tokens`; named in `stop_reason`, and no part of the text."""
    body = {"prompt": "a", "max_tokens": 60, "stop_token_ids": [ord("c")]}
    for asked, text in (({}, "ab"), ({"min_tokens": 4}, "abcdefghijklmnopqrstuvwxyzab")):
        async with client.post("/v1/completions", json={**body, **asked}) as response:
            (choice,) = (await response.json())["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", ord("c"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_work_at_once(stream: bool) -> None:  # noqa: FBT001 - a case
    """The engine does not go on generating what nobody will read, and the request counts as stopped."""
    body = {"prompt": "a", "max_tokens": 4000, "stop": "c", "stream": stream}  # over a minute, if nobody stops it
    command = fake_command("SlowExecutor", max_model_len=4096, num_gpu_blocks_override=600)
    with serving(command) as running:
        async with aiohttp.ClientSession(running.url) as session, asyncio.timeout(20):
            async with session.post("/v1/completions", json=body) as response:
                assert '"stop_reason":"c"' in await response.text()
            await until(session, "vllm:num_requests_running", 0)
            assert await metric(session, "vllm:kv_cache_usage_perc") == 0
            assert await metric(session, "vllm:request_success_total", finished_reason="stop") == 1
            assert await metric(session, "vllm:request_success_total", finished_reason="abort") == 0


async def test_choices_share_an_answer(client: aiohttp.ClientSession) -> None:
    """`n` answers to each of two prompts, in one body; a prompt counts once, every generated token counts."""
    body = {"prompt": [[5, 6, 7], [8]], "n": 3, "max_tokens": 4}
    async with client.post("/v1/completions", json=body) as response:
        whole = await response.json()

    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert {choice["text"] for choice in whole["choices"]} == {"abcd"}
    assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_stream_carries_its_choices(client: aiohttp.ClientSession, path: str) -> None:
    """Every choice comes as it is generated, one event a token, and running usage counts them all."""
    body: dict[str, object] = (
        {"prompt": "a"} if path == "completions" else {"messages": [{"role": "u", "content": "a"}]}
    )
    body |= {"n": 3, "max_tokens": 5, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    async with client.post(f"/v1/{path}", json=body) as response:
        *events, last = data_of(await response.text())
    roles = [event for event in events if "role" in event["choices"][0].get("delta", {})]
    tokens = events[len(roles) :]
    indexes = [event["choices"][0]["index"] for event in tokens]

    assert [event["choices"][0]["index"] for event in roles] == ([] if path == "completions" else [0, 1, 2])
    assert sorted(indexes) == [0] * 5 + [1] * 5 + [2] * 5
    assert [event["usage"]["completion_tokens"] for event in tokens] == list(range(1, 16))
    assert last["usage"]["completion_tokens"] == 15
    for index in range(3):
        reasons = [e["choices"][0]["finish_reason"] for e in tokens if e["choices"][0]["index"] == index]
        assert reasons == [None] * 4 + ["length"]


async def test_a_client_that_leaves_ends_all_its_choices() -> None:
    """Running and seen side by side, or waiting, streamed or not: nothing is generated for nobody."""
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 4000, "ignore_eos": True}
    command = fake_command("SlowExecutor", max_num_seqs=3, max_model_len=4096, num_gpu_blocks_override=900)
    with serving(command) as running:
        async with aiohttp.ClientSession(running.url) as watcher:
            async with aiohttp.ClientSession(running.url) as leaver:
                stream = await leaver.post("/v1/completions", json={**body, "stream": True})
                lines = [await stream.content.readline() for _ in range(2 * 6)]
                events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.strip()]
                assert {event["choices"][0]["index"] for event in events} == {0, 1, 2}
                whole = asyncio.create_task(leaver.post("/v1/completions", json=body))
                await until(watcher, "vllm:num_requests_waiting", 5)
                whole.cancel()
                stream.close()
            for name in ("running", "waiting"):
                await until(watcher, f"vllm:num_requests_{name}", 0)
            assert await metric(watcher, "vllm:kv_cache_usage_perc") == 0
            assert await metric(watcher, "vllm:request_success_total", finished_reason="abort") == 8


async def test_completions_tell_log_probabilities(client: aiohttp.ClientSession) -> None:
    """In the shape of OpenAI's completions, the same whole and in pieces."""
    body = {"prompt": "a", "max_tokens": 2, "logprobs": 1}
    async with client.post("/v1/completions", json=body) as response:
        whole = (await response.json())["choices"][0]["logprobs"]
    async with client.post("/v1/completions", json={**body, "stream": True}) as response:
        events = [event["choices"][0]["logprobs"] for event in data_of(await response.text())]

    assert whole == {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{"a": -1.0, "`": 0.0}, {"b": -1.0, "a": 0.0}],
        "text_offset": [0, 1],
    }
    assert {name: [event[name][0] for event in events] for name in whole} == whole


async def test_chat_tells_log_probabilities(client: aiohttp.ClientSession) -> None:
    """In the shape of OpenAI's chat, the same whole and in pieces; without `top_logprobs` only of the token drawn."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    async with client.post("/v1/chat/completions", json=body) as response:
        whole = (await response.json())["choices"][0]["logprobs"]["content"]
    async with client.post("/v1/chat/completions", json={**body, "stream": True}) as response:
        _, *events = data_of(await response.text())
    async with client.post("/v1/chat/completions", json={**body, "top_logprobs": None}) as response:
        bare = (await response.json())["choices"][0]["logprobs"]["content"]

    drawn, likeliest = {"token": "a", "logprob": -1.0, "bytes": [97]}, {"token": "`", "logprob": 0.0, "bytes": [96]}
    assert whole[0] == {**drawn, "top_logprobs": [likeliest, drawn]}
    assert whole == [event["choices"][0]["logprobs"]["content"][0] for event in events]
    assert bare[0] == {**drawn, "top_logprobs": []}


async def test_requests_that_are_no_requests_get_json_errors(client: aiohttp.ClientSession) -> None:
    """Broken JSON and unknown paths answer in the same shape."""
    async with client.post("/v1/completions", data=b"{") as response:
        assert (response.status, "error" in await response.json()) == (400, True)
    async with client.get("/v1/nothing") as response:
        assert (response.status, "error" in await response.json()) == (404, True)
    async with client.put("/v1/completions") as response:
        assert (response.status, response.headers["Allow"], "error" in await response.json()) == (405, "POST", True)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_cannot_be_decoded_is_the_clients_fault(client: aiohttp.ClientSession, encoding: str) -> None:
    """Whoever watches for errors of the server is not called for a client's damaged body."""
    packed = {"Content-Encoding": encoding}
    async with client.post("/v1/completions", data=b"damaged", headers=packed) as response:
        assert response.status == 400
        assert encoding in await response.text()


class CountingTokenizer(TextTokenizer):
    """Says in which thread each text was encoded."""

    def __init__(self) -> None:
        """The embedded model's."""
        super().__init__(model_folder("embedded"))
        self.threads: list[threading.Thread] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The same token ids."""
        self.threads.append(threading.current_thread())
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_long_text_holds_up_nobody(chat: bool) -> None:  # noqa: FBT001 - a case
    """Everybody's streams stand still for minutes over a text no context holds, and shortly over one that might."""
    tokenizer = CountingTokenizer()
    resolved = fake_resolved(EngineConfig(model="embedded", max_model_len=1024))
    api = Api(cast("Frontend", FaultyFrontend()), tokenizer, resolved)
    async with TestClient(TestServer(api.application())) as server:
        for num_characters in (500_000, 8000, 5):
            text = "x" * num_characters
            asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
            response = await server.post("/v1/chat/completions" if chat else "/v1/completions", json=asked)
            error = (await response.json())["error"]
            assert (error["code"] == "context_length_exceeded") == (num_characters > 5)
            assert ("characters" in error["message"]) == (num_characters == 500_000)
    assert [thread is threading.main_thread() for thread in tokenizer.threads] == [False, True]


async def test_models_and_config_in_force_can_be_read_back(client: aiohttp.ClientSession) -> None:
    """A tuner checks that it talks to the config it asked for."""
    async with client.get("/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert (card["id"], card["max_model_len"]) == ("embedded", 256)
    asked = {"max_num_seqs": "32", "max_num_batched_tokens": "2048", "gpu_memory_utilization": "0.92"}
    assert await metric(client, "engine:config_info", **asked) == 1
    assert await metric(client, "vllm:cache_config_info", num_gpu_blocks="40", block_size="16") == 1
    assert await metric(client, "engine:memory_bytes", part="weights") == 10_000


async def test_one_reader_serves_this_engine_and_vllm(client: aiohttp.ClientSession) -> None:
    """Every metric a study reads is there before the first request, under vLLM's name: missing would mean unknown."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    counters = ("num_preemptions_total", "prompt_tokens_total", "generation_tokens_total")
    timings = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
    others = ("request_queue_time_seconds", "iteration_tokens_total")
    names = [*gauges, *counters, *(f"{name}_count" for name in timings + others)]
    for name in names:
        assert await metric(client, f"vllm:{name}", model_name="embedded", engine="0") >= 0
    for reason in ("stop", "length", "abort"):
        assert await metric(client, "vllm:request_success_total", finished_reason=reason) >= 0


async def test_preemptions_and_tokens_are_counted(client: aiohttp.ClientSession) -> None:
    """20 requests of 160 tokens in a cache of 640 preempt, all finish, and every token is on /metrics."""
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:num_preemptions_total")
    before = [await metric(client, name) for name in names]

    async def ask(index: int) -> int:
        body = {"prompt": [index + 1] * 60, "max_tokens": 100, "ignore_eos": True}
        async with client.post("/v1/completions", json=body) as response:
            counted: int = (await response.json())["usage"]["completion_tokens"]
            return counted

    assert await asyncio.gather(*map(ask, range(20))) == [100] * 20
    after = [await metric(client, name) for name in names]
    assert after[0] - before[0] == 20 * 100
    assert after[1] - before[1] == 20 * 60
    assert after[2] > before[2]
    await until(client, "vllm:kv_cache_usage_perc", 0)


async def test_a_client_that_leaves_frees_its_blocks() -> None:
    """Running and waiting requests of clients that went away stop at once, streamed or not."""
    body = {"prompt": [1] * 20, "max_tokens": 4000, "ignore_eos": True}  # over a minute, if nobody stops it
    command = fake_command("SlowExecutor", max_num_seqs=2, max_model_len=4096, num_gpu_blocks_override=600)
    with serving(command) as running:
        async with aiohttp.ClientSession(running.url) as watcher:
            async with aiohttp.ClientSession(running.url) as leaver:
                streams = [await leaver.post("/v1/completions", json={**body, "stream": True}) for _ in range(3)]
                await streams[0].content.readline()
                whole = asyncio.create_task(leaver.post("/v1/completions", json=body))
                await until(watcher, "vllm:num_requests_waiting", 2)
                assert await metric(watcher, "vllm:kv_cache_usage_perc") > 0
                whole.cancel()
                for stream in streams:
                    stream.close()
            for name in ("running", "waiting"):
                await until(watcher, f"vllm:num_requests_{name}", 0)
            assert await metric(watcher, "vllm:kv_cache_usage_perc") == 0
            assert await metric(watcher, "vllm:request_success_total", finished_reason="abort") == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_ends_streams_with_an_error_and_leaves_nothing(number: signal.Signals) -> None:
    """Exit code 0, no process left, and no client takes a cut stream for a whole one."""
    with serving(fake_command("SlowExecutor")) as running:
        family = [psutil.Process(running.process.pid), *psutil.Process(running.process.pid).children(recursive=True)]
        async with aiohttp.ClientSession(running.url) as session:
            body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
            async with session.post("/v1/completions", json=body) as response:
                await response.content.readline()
                running.process.send_signal(number)
                text = (await response.read()).decode()
        assert "[DONE]" not in text
        assert "error" in json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert running.events() == []
        assert running.process.returncode == 0
        wait_until_gone(family)


def test_a_stop_while_loading_is_clean() -> None:
    """Whoever changes their mind during a long load waits for nothing: exit code 0, no core left."""
    process = start(fake_command("load_for_ever"))
    while not (cores := core_children(process.pid)):
        assert process.poll() is None
    process.terminate()
    _, stderr = process.communicate(timeout=10)
    assert (json_lines(stderr), process.returncode) == ([], 0)
    wait_until_gone(cores)


@pytest.mark.parametrize(
    ("executor", "kind", "word"),
    [
        ("SlowExecutor", "crashed", "killed by signal 9, probably for memory"),
        ("CrashingExecutor", "crashed", "made-up fault"),
        ("OutOfMemoryExecutor", "oom_runtime", "no memory for the step"),
    ],
)
async def test_a_core_that_dies_is_noticed(executor: str, kind: str, word: str) -> None:
    """Streams end with an error, the reason is the last line of JSON, and the process does not linger."""
    with serving(fake_command(executor)) as running:
        async with aiohttp.ClientSession(running.url) as session:
            body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
            async with session.post("/v1/completions", json=body) as response:
                await response.content.readline()
                if executor == "SlowExecutor":
                    running.core().kill()
                text = (await response.read()).decode()
        assert "error" in json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        (event,) = running.events()
        assert (event["event"], event["kind"]) == ("core_died", kind)
        assert word in str(event["message"])
        assert running.process.returncode == 1


def test_the_core_dies_with_its_parent() -> None:
    """A server killed outright leaves no core that holds the device's memory, not even one that is still loading."""
    process = start(fake_command("load_for_ever"))
    while not (cores := core_children(process.pid)):
        assert process.poll() is None
    assert process.stderr is not None
    with process.stderr as stderr:
        assert "loading" in stderr.readline()
        process.kill()
        process.wait()
        wait_until_gone(cores)


@pytest.mark.parametrize(
    ("executor", "kind"),
    [
        ("refuse_config", "invalid_config"),
        ("refuse_for_no_kv_memory", "no_kv_memory"),
        ("refuse_for_too_much_memory", "infrastructure"),
        ("run_out_of_memory", "oom_startup"),
        ("fail_to_load", "crashed"),
    ],
)
def test_a_failed_start_says_its_kind_in_one_line(executor: str, kind: str) -> None:
    """A study records why a config did not start, without reading prose."""
    process = start(fake_command(executor))
    _, stderr = process.communicate(timeout=30)
    (event,) = json_lines(stderr)
    assert (event["event"], event["kind"], process.returncode) == ("start_failed", kind, 1)
    assert "made" in str(event["message"])


def test_a_port_in_use_is_noticed_before_loading() -> None:
    """A neighbour's port says nothing about the config: `infrastructure`."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "engine", "serve", "embedded", "--port", str(port)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    (event,) = json_lines(done.stderr)
    assert (event["event"], event["kind"], done.returncode) == ("start_failed", "infrastructure", 1)
    assert str(port) in str(event["message"])


async def test_a_burst_of_connections_is_not_dropped() -> None:
    """A level of 1024 streams opens them at once; the server takes as many files as the system allows."""
    with open_files_at_most(512) as hard, serving(fake_command("FakeExecutor")) as running:
        server = psutil.Process(running.process.pid)
        assert server.rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
        address = ("127.0.0.1", int(running.url.rsplit(":", 1)[1]))
        server.suspend()
        try:
            with contextlib.ExitStack() as opened:
                for _ in range(300):
                    opened.enter_context(socket.create_connection(address, timeout=2))
        finally:
            server.resume()


@contextlib.contextmanager
def open_files_at_most(count: int) -> Iterator[int]:
    """Start with few open files allowed, as many systems do; gives how many may be asked for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class FaultyFrontend:
    """Stands for a fault nobody foresaw: one token, then an error."""

    @contextlib.contextmanager
    def admit(self, requests: Sequence[NewRequest]) -> Iterator[list[AsyncIterator[NewToken]]]:
        """Let everyone in."""
        yield [self._tokens() for _ in requests]

    async def _tokens(self) -> AsyncIterator[NewToken]:
        yield NewToken(100, None, None)
        raise RuntimeError("made-up fault in the frontend")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unforeseen_fault_is_told_and_logged(stream: bool, caplog: pytest.LogCaptureFixture) -> None:  # noqa: FBT001 - a case
    """The client reads an error where it expects one, and whoever runs the server finds the trace."""
    config = EngineConfig(model="embedded")
    api = Api(cast("Frontend", FaultyFrontend()), TextTokenizer(model_folder("embedded")), fake_resolved(config))
    async with TestClient(TestServer(api.application())) as faulty:
        response = await faulty.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert response.status == (200 if stream else 500)
        *_, last = (await response.text()).strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "made-up fault in the frontend" in caplog.text


def test_the_frontend_never_imports_torch() -> None:
    """Serving starts, and refuses, without the seconds that torch takes."""
    code = "import sys, engine.__main__; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
