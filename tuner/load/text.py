"""Prompts as text, for endpoints that take no token ids: plain words, and how many tokens they make."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

from tuner.load.connection import Endpoint, connect

_WORDS = """
able about above act add after again age air all also and any area arm art ask away baby back bad ball bank base bed
best big bird black blood blue board boat body book born both box boy bring build burn bus buy call came car care
case cause cell chance child city class clear close cold color come cook copy corn cost could count course cover
cross cry cut dance dark day dead deal deep did door down draw dream drive drop dry ear early earth east easy eat
edge else end even ever every eye face fact fall farm fast father fear feel feet field fight fill final find fine
fire fish fit floor fly food foot form forward free fresh friend from front full game garden gas gave get girl give
glass go gold gone good got grand grass great green ground group grow had hair half hand happy hard hat head hear
heart heat heavy held help here high hill history hold home horse hot hour house huge human idea inch iron island
job join jump just keep key kind king knew know lady lake land large last late laugh law lay lead learn
"""
WORDS = tuple(_WORDS.split())
"""Common short words: most vocabularies of tens of thousands have each, with the space before it, as one token."""

_PROBE_WORDS = (16, 272)
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScale:
    """How many tokens a text of these words is to a server."""

    tokens_per_word: float
    overhead_tokens: float = 0.0
    """What its chat template adds to a message."""

    def num_words(self, num_tokens: float) -> int:
        """Words that make about so many tokens; never none."""
        return max(1, round(num_tokens / self.tokens_per_word))


GUESSED_SCALE = TextScale(tokens_per_word=sum(len(word) + 1 for word in WORDS) / len(WORDS) / 4)
"""Characters over four, for a server that does not count."""


def as_text(ids: Iterable[int]) -> str:
    """The words of these numbers."""
    return " ".join(WORDS[each] for each in ids)


async def calibrate(endpoint: Endpoint, model: str) -> TextScale:
    """Ask the server how many tokens two texts are, a short one and a long one; a guess where it does not tell.

    Raises:
        OSError: where it cannot be reached.
    """
    counts = [await _count(endpoint, model, num_words) for num_words in _PROBE_WORDS]
    short, long = counts
    if short is None or long is None or long <= short:
        return GUESSED_SCALE
    per_word = (long - short) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
    return TextScale(tokens_per_word=per_word, overhead_tokens=max(0.0, short - per_word * _PROBE_WORDS[0]))


async def _count(endpoint: Endpoint, model: str, num_words: int) -> int | None:
    text = as_text(number * 7 % len(WORDS) for number in range(num_words))
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0.0}
    connection = await connect(endpoint)
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            payload = endpoint.post_json("/v1/chat/completions", json.dumps(body).encode())
            exchange, done = connection.start(payload, intended_s=perf_counter())
            await done
    finally:
        connection.abort()
    try:
        usage = json.loads(exchange.body).get("usage") or {}
        tokens = usage.get("prompt_tokens")
    except (ValueError, AttributeError):
        return None
    return tokens if isinstance(tokens, int) else None
