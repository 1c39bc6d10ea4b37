"""Prompts as text, for endpoints that take no token ids: plain words, and how many tokens they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
