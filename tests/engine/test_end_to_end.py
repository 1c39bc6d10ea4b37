"""The whole engine: torch, the embedded model, the official client."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import aiohttp
import pytest
from openai import BadRequestError, OpenAI

from engine import LLM
from engine.request import SamplingParams
from tests.fakes.serving import Serving, serving

_FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--gpu-memory-utilization", "0.5")
_SMALL = ("--device-memory", "512M", "--max-model-len", "512", "--port", "0")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """The engine as a user starts it."""
    with serving([sys.executable, "-m", "engine", "serve", "embedded", *_FLAGS, *_SMALL]) as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[OpenAI]:
    """The official client."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def test_the_official_client_streams_the_same_as_it_gets_whole(client: OpenAI) -> None:
    """Greedy text, streamed over several prefill chunks or not; final usage is exact."""
    prompt = "knee " * 60
    whole = client.completions.create(model="embedded", prompt=prompt, max_tokens=12, temperature=0)
    stream = client.completions.create(
        model="embedded",
        prompt=prompt,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert last.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(chunks)
    assert whole.usage.prompt_tokens > 64


def test_the_official_client_chats(client: OpenAI) -> None:
    """The embedded model has a chat template, and the same seed says the same."""
    answers = [
        client.chat.completions.create(
            model="embedded", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=8, seed=0
        )
        for _ in range(2)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].choices[0].message.role == "assistant"


def test_choices_differ_by_their_seeds_and_come_prompt_by_prompt(client: OpenAI) -> None:
    """Choice k of a prompt is what the seed plus k gives alone, in a batch of prompts too; greedy ones are equal."""
    asked = {"model": "embedded", "max_tokens": 8, "temperature": 1.0}
    together = client.completions.create(prompt=["knee", "elbow"], n=2, seed=7, **asked)
    alone = [
        client.completions.create(prompt=prompt, seed=seed, **asked).choices[0].text
        for prompt in ("knee", "elbow")
        for seed in (7, 8)
    ]
    greedy = client.completions.create(prompt="knee", n=3, **{**asked, "temperature": 0})

    assert [choice.text for choice in together.choices] == alone
    assert len(set(alone)) == 4
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in greedy.choices}) == 1


def test_the_official_client_reads_log_probabilities(client: OpenAI) -> None:
    """Both endpoints' shapes; greedy tokens are the likeliest, and a distribution adds up to at most 1."""
    completion = client.completions.create(model="embedded", prompt="knee", max_tokens=4, temperature=0, logprobs=5)
    chat = client.chat.completions.create(
        model="embedded",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
    )
    told = completion.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert [len(values) for values in (told.tokens or [], told.token_logprobs, told.text_offset or [])] == [4, 4, 4]
    for drawn, top in zip(told.token_logprobs, told.top_logprobs, strict=True):
        assert drawn == max(top.values())
        assert sum(math.exp(value) for value in top.values()) < 1.0001
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content.content)
    assert all(len(token.top_logprobs) == 5 for token in content.content)


def test_the_official_client_cuts_and_stops(client: OpenAI) -> None:
    """Every way to cut the distribution down to one token is greedy, and a stop string ends a stream."""
    asked = {"model": "embedded", "prompt": "knee", "max_tokens": 12}
    greedy = client.completions.create(temperature=0, **asked).choices[0].text
    for only_one in ({"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}):
        assert client.completions.create(seed=3, **only_one, **asked).choices[0].text == greedy
    stop = greedy[4:6]
    chunks = list(client.completions.create(temperature=0, stop=[stop], stream=True, **asked))

    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy[: greedy.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_min_tokens_and_penalties_change_a_greedy_answer(client: OpenAI) -> None:
    """What the greedy answer would repeat or end with becomes impossible while it is asked to."""
    asked = {"model": "embedded", "prompt": "knee", "max_tokens": 30, "temperature": 0, "logprobs": 0}
    plain = client.completions.create(**asked).choices[0].logprobs
    varied = client.completions.create(presence_penalty=2.0, extra_body={"repetition_penalty": 100}, **asked)
    told = varied.choices[0].logprobs
    assert plain is not None
    assert told is not None
    assert len(set(told.tokens or [])) > len(set(plain.tokens or []))


def test_the_official_client_understands_a_refusal(client: OpenAI) -> None:
    """Both numbers reach the user."""
    with pytest.raises(BadRequestError, match="600 tokens, max_model_len is 512"):
        client.completions.create(model="embedded", prompt=[1] * 600)


def test_a_batch_without_a_server_says_the_same(client: OpenAI) -> None:
    """Whoever prepares data offline gets what the server would have answered: text, tokens and reason."""
    prompts = ["knee " * 60, "the tail", "a"]
    llm = LLM("embedded", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, device_memory_bytes=2**29)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0))
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = client.completions.create(model="embedded", prompt=prompt, max_tokens=12, temperature=0)
        assert output.text == answer.choices[0].text
        assert answer.usage is not None
        assert len(output.token_ids) == answer.usage.completion_tokens
        assert len(output.prompt_token_ids) == answer.usage.prompt_tokens


async def test_metrics_give_back_the_three_values(server: Serving) -> None:
    """What is in force is what was asked for."""
    async with aiohttp.ClientSession(server.url) as session, session.get("/metrics") as response:
        text = await response.text()
    (line,) = [line for line in text.splitlines() if line.startswith("engine:config_info{")]
    for label in ('max_num_seqs="4"', 'max_num_batched_tokens="64"', 'gpu_memory_utilization="0.5"'):
        assert label in line
    for label in (
        'max_num_active_seqs="4"',
        'max_num_scheduled_tokens="64"',
        'watermark="0.0"',
        'kv_cache_dtype="auto"',
    ):
        assert label in line  # not asked for, and said as they are in force
