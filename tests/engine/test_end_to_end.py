"""The whole engine: torch, the embedded model, the official client."""

from __future__ import annotations

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
