"""Requests as clients write them: what they mean, and what is refused with field, value and limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.choice import TextStop
from engine.protocol import ApiError, ChatRequest, CompletionRequest, parse_body
from engine.request import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


def _completion(**fields: object) -> CompletionRequest:
    return parse_body(CompletionRequest, json.dumps({"prompt": "a", **fields}).encode())


def _chat(**fields: object) -> ChatRequest:
    return parse_body(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode())


def _sampling(request: CompletionRequest | ChatRequest) -> SamplingParams:
    return request.sampling(default_max_tokens=16, vocab_size=100)


def test_every_field_reaches_the_sampler() -> None:
    """Nothing a client asks for is lost on the way."""
    asked: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": -2,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
        "stop_token_ids": [7, 8],
        "seed": 0,
        "ignore_eos": True,
    }
    expected = SamplingParams(**{**asked, "stop_token_ids": (7, 8), "num_logprobs": 5})

    assert _sampling(_completion(**asked, logprobs=5)) == expected
    assert _sampling(_chat(**asked, logprobs=True, top_logprobs=5)) == expected


def test_a_stop_token_said_often_is_kept_once() -> None:
    """A body of stop tokens, with 128 choices of which each has its own, would fill the memory and slow every step."""
    assert _sampling(_completion(stop_token_ids=[8, 7, 8] * 1000)).stop_token_ids == (8, 7)


@pytest.mark.parametrize("kind", [_completion, _chat])
def test_null_and_defaults_ask_for_nothing(kind: Any) -> None:
    """Clients that spell out what they do not want are served."""
    fields = {
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "logprobs", "ignore_eos"),
        *("include_stop_str_in_output", "n", "best_of", "stream", "stream_options", "model", "echo", "tools", "user"),
    }
    nothing = kind(**dict.fromkeys(fields))
    defaults = kind(top_p=1, top_k=-1, min_p=0, presence_penalty=0, repetition_penalty=1, n=1, best_of=1, stop=[])

    assert _sampling(nothing) == _sampling(defaults) == SamplingParams(max_tokens=16)
    assert nothing.text_stop() == defaults.text_stop() == TextStop()
    assert nothing.num_choices == defaults.num_choices == 1
    assert not nothing.stream


def test_stop_is_one_string_or_up_to_four() -> None:
    """Both of OpenAI's forms."""
    assert _completion(stop="\n").text_stop() == TextStop(("\n",))
    assert _chat(stop=list("abcd"), include_stop_str_in_output=True).text_stop() == TextStop(("a", "b", "c", "d"), True)  # noqa: FBT003


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "bc"], ["a", "bc"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([], [[]]),
        ([[]], [[]]),
    ],
)
def test_a_prompt_comes_in_four_forms(prompt: object, expected: object) -> None:
    """One text, one list of token ids, or a batch of either."""
    assert _completion(prompt=prompt).prompts() == expected


def test_a_seed_of_minus_one_is_none() -> None:
    """As in vLLM: who sends it wants another answer every time."""
    assert _sampling(_completion(seed=-1)).seed is None
    assert _sampling(_completion(seed=-2)).seed == -2
    assert _sampling(_completion(seed=0)).seed == 0


def test_chat_says_logprobs_its_own_way() -> None:
    """True alone reports the token drawn and no others."""
    assert _sampling(_chat(logprobs=True)).num_logprobs == 0
    assert _sampling(_chat(logprobs=False, top_logprobs=0)).num_logprobs is None
    assert _sampling(_completion(logprobs=0)).num_logprobs == 0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", 0, "greater than or equal to 1"),
        ("min_tokens", -1, "greater than or equal to 0"),
        ("min_tokens", 17, "above max_tokens=16"),
        ("temperature", -0.1, "greater than or equal to 0"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.5, "less than or equal to 1"),
        ("top_k", -2, "greater than or equal to -1"),
        ("min_p", 1.1, "less than or equal to 1"),
        ("presence_penalty", 2.1, "less than or equal to 2"),
        ("frequency_penalty", -2.1, "greater than or equal to -2"),
        ("repetition_penalty", 0, "greater than or equal to 0.01"),
        ("repetition_penalty", float("inf"), "finite"),
        ("temperature", float("nan"), "finite"),
        ("seed", 2**63, "less than"),
        ("stop", "", "at least 1 character"),
        ("stop", ["a", ""], "at least 1 character"),
        ("stop", ["a"] * 5, "at most 4 items"),
        ("stop", 5, "valid string"),
        ("stop_token_ids", [100], "outside the vocabulary [0, 100)"),
        ("stop_token_ids", [-1], "outside the vocabulary [0, 100)"),
        ("n", 0, "greater than or equal to 1"),
        ("n", 129, "less than or equal to 128"),
        ("best_of", 2, "n=1"),
        ("logprobs", 21, "less than or equal to 20"),
        ("logprobs", True, "valid integer"),
        ("prompt", [1, "a"], "valid integer"),
        ("prompt", ["a", 1], "valid string"),
        ("prompt", [[1], "a"], "valid array"),
        ("prompt", [[True]], "valid integer"),
        ("prompt", None, "valid string"),
        ("prompt", ["a"] * 2049, "at most 2048 items"),
        ("echo", True, "not supported"),
        ("suffix", "b", "not supported"),
        ("logit_bias", {"5": 1}, "not supported"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": ["x" * 50] * 50}}, "not supported"),
        ("tools", [{}], "not supported"),
        ("tempreature", 1, "not a field"),
    ],
)
def test_what_is_out_of_range_is_refused_with_field_value_and_limit(field: str, value: object, words: str) -> None:
    """A client that reads the error knows what to send instead."""
    with pytest.raises(ApiError) as refused:
        _sampling(_completion(**{field: value}))
    error = refused.value.body()["error"]

    assert isinstance(error, dict)
    assert (refused.value.status, error["param"]) == (400, field)
    assert field in error["message"]
    assert words in error["message"]
    assert len(error["message"]) < 200


def test_top_logprobs_need_logprobs() -> None:
    """Neither endpoint drops half of a question."""
    with pytest.raises(ApiError, match="top_logprobs=3 needs logprobs"):
        _chat(top_logprobs=3)
    with pytest.raises(ApiError, match="top_logprobs is not a field"):
        _completion(top_logprobs=3)


def test_more_answers_than_one_can_be_the_best_of_as_many() -> None:
    """`best_of` is accepted where it changes nothing."""
    assert _completion(n=3, best_of=3).num_choices == 3
    with pytest.raises(ApiError, match="best_of=5 with n=3"):
        _completion(n=3, best_of=5)
