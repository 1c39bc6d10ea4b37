"""What a server understands, asked with a request or two before the load: how long words are, whether it tells ids.

A server that does not answer is not judged here: the stage's own requests say what is wrong with it.
"""

from __future__ import annotations

import asyncio
import json
from time import perf_counter
from typing import Any

from tuner.load.connection import Endpoint, connect
from tuner.load.text import GUESSED_SCALE, WORDS, TextScale, as_text

_WORDS = (16, 272)
_TIMEOUT_S = 60.0


async def calibrate(endpoint: Endpoint, model: str) -> TextScale:
    """How many tokens words are: from the server's count of two texts; a guess where it does not count."""
    counts = []
    for num_words in _WORDS:
        text = as_text(number * 7 % len(WORDS) for number in range(num_words))
        answer = await _ask(endpoint, model, "/v1/chat/completions", messages=[{"role": "user", "content": text}])
        counts.append(_at(answer, "usage", "prompt_tokens"))
    short, long = counts
    if not isinstance(short, int) or not isinstance(long, int) or long <= short:
        return GUESSED_SCALE
    per_word = (long - short) / (_WORDS[1] - _WORDS[0])
    return TextScale(tokens_per_word=per_word, overhead_tokens=max(0.0, short - per_word * _WORDS[0]))


async def tells_token_ids(endpoint: Endpoint, model: str, *, token_ids: range) -> bool:
    """Whether a completion says the ids of its tokens when asked to (vLLM's `return_token_ids`)."""
    prompt = list(token_ids[:8])
    answer = await _ask(endpoint, model, "/v1/completions", prompt=prompt, return_token_ids=True)
    return isinstance(_at(answer, "choices", 0, "token_ids"), list)


async def _ask(endpoint: Endpoint, model: str, path: str, **asked: Any) -> object:
    """The JSON of a one-token answer; None where there is none."""
    body = {"model": model, "max_tokens": 1, "temperature": 0.0, **asked}
    try:
        connection = await connect(endpoint)
    except OSError:
        return None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            exchange, done = connection.start(
                endpoint.post_json(path, json.dumps(body).encode()), intended_s=perf_counter()
            )
            await done
        return json.loads(exchange.body)
    except (OSError, ValueError):
        return None
    finally:
        connection.abort()


def _at(value: object, *path: str | int) -> object:
    """What stands at a place in JSON; None where nothing does."""
    for step in path:
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, dict) else None
        else:
            value = value[step] if isinstance(value, list) and len(value) > step else None
    return value
