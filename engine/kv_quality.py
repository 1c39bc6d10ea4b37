"""`python -m engine kv-quality`: what an fp8 KV cache changes in a model's answers, beside its own dtype.

Greedy answers to the same random prompts: how many tokens are the same, and how long answers run alike; after a first
difference two answers are about different things. And texts scored token by token: how often the likeliest next token
is the same, and the model's perplexity with either cache. Where no text is given, the model samples answers at
temperature 1 with its own dtype; the logarithm of the perplexities' ratio is then an estimate of how far the fp8
model's distribution is from its own (the Kullback-Leibler divergence a token).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.config import ConfigError, EngineConfig
from engine.request import SamplingParams
from engine.step import ScheduledRequest, StepPlan

if TYPE_CHECKING:
    from engine.executor.torch import ModelRunner
    from engine.kv_cache import KvCache

PROMPT_TOKENS = 32
ANSWER_TOKENS = 64
TEXT_TOKENS = 512
"""A given text is scored in pieces of at most so many tokens, each from its own beginning."""

Tokens = tuple[int, ...]


class Text(NamedTuple):
    """What is scored."""

    tokens: Tokens
    first_scored: int
    """Tokens before are given; at least 1 is."""


class Score(NamedTuple):
    """One token of a text."""

    logprob: float
    likeliest: int
    """The token that the model would have put there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a model made of prompts and texts with one kind of cache."""

    greedy: tuple[Tokens, ...]
    """For each prompt."""

    scores: tuple[Score, ...]
    """Of every scored token of all texts."""

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log-probability."""
        return math.exp(-sum(score.logprob for score in self.scores) / len(self.scores))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvQuality:
    """The comparison."""

    num_prompts: int
    num_scored_tokens: int
    agreement: float
    """Share of the greedy answers' tokens that are the same at the same place. In [0, 1]."""

    tokens_alike: float
    """Mean length of what two greedy answers have in common from their start. Unit: tokens."""

    likeliest_agreement: float
    """Share of the scored tokens before which the likeliest next token is the same. In [0, 1]."""

    perplexity: float
    """With the model's own dtype."""

    perplexity_fp8: float

    @property
    def perplexity_change(self) -> float:
        """Of the perplexity by fp8; 0.01 is 1 % worse."""
        return self.perplexity_fp8 / self.perplexity - 1

    def lines(self) -> list[str]:
        """For a reader."""
        return [
            f"greedy answers     {self.num_prompts} of {ANSWER_TOKENS} tokens",
            f"same tokens        {self.agreement:.1%}",
            f"alike from start   {self.tokens_alike:.1f} tokens",
            f"scored             {self.num_scored_tokens} tokens",
            f"same likeliest     {self.likeliest_agreement:.1%}",
            f"perplexity         {self.perplexity:.4f} with the model's own dtype",
            f"                   {self.perplexity_fp8:.4f} with fp8 ({self.perplexity_change:+.2%})",
        ]

    def json(self) -> str:
        """For a program."""
        figures = {name: getattr(self, name) for name in (*self.__slots__, "perplexity_change")}
        return json.dumps(figures, indent=1)


def kv_quality(config: EngineConfig, *, num_prompts: int, text: Path | None, as_json: bool) -> int:
    """Compare and write the outcome to stdout; returns the exit code, 0.

    Raises:
        ConfigError: for a simulated engine, a model that cannot be loaded, a text that cannot be read or is too short.
    """
    if config.executor != "torch":
        raise ConfigError(
            f"executor={config.executor!r} makes its tokens up, so there is nothing to compare: leave out --executor "
            "and --law"
        )
    texts = None if text is None else _read_text(config, text)
    quality = measure(config, num_prompts=num_prompts, texts=texts)
    sys.stdout.write((quality.json() if as_json else "\n".join(quality.lines())) + "\n")
    return 0


def measure(config: EngineConfig, *, num_prompts: int, texts: Sequence[Text] | None) -> KvQuality:
    """Answer and score with the model's own dtype, then with fp8; one model is loaded at a time."""
    if num_prompts < 1:
        raise ConfigError(f"prompts={num_prompts} is below 1")
    own = _Subject(config, "auto", num_prompts)
    generator = np.random.Generator(np.random.PCG64(config.seed))
    prompts = [tuple(row) for row in generator.integers(own.vocab_size, size=(num_prompts, PROMPT_TOKENS)).tolist()]
    if texts is None:
        drawn = own.answer(prompts, temperature=1.0)
        texts = [Text(prompt + answer, PROMPT_TOKENS) for prompt, answer in zip(prompts, drawn, strict=True)]
    first = own.answers(prompts, texts)
    del own
    return compare(first, _Subject(config, "fp8", num_prompts).answers(prompts, texts))


def compare(own: Answers, fp8: Answers) -> KvQuality:
    """Figures of two models' answers to the same prompts and texts. Pure."""
    pairs = list(zip(own.greedy, fp8.greedy, strict=True))
    return KvQuality(
        num_prompts=len(pairs),
        num_scored_tokens=len(own.scores),
        agreement=_share(ours == theirs for pair in pairs for ours, theirs in zip(*pair, strict=True)),
        tokens_alike=sum(_common_start(*pair) for pair in pairs) / len(pairs),
        likeliest_agreement=_share(
            ours.likeliest == theirs.likeliest for ours, theirs in zip(own.scores, fp8.scores, strict=True)
        ),
        perplexity=own.perplexity,
        perplexity_fp8=fp8.perplexity,
    )


def _share(truths: Iterable[bool]) -> float:
    known = list(truths)
    return sum(known) / len(known)


def _common_start(ours: Tokens, theirs: Tokens) -> int:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            return index
    return len(ours)


def _read_text(config: EngineConfig, path: Path) -> list[Text]:
    from engine.models.folder import model_folder
    from engine.tokenizer import TextTokenizer

    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from error
    tokens = TextTokenizer(model_folder(config.model)).encode(content, add_special_tokens=True)
    pieces = [tokens[first : first + TEXT_TOKENS] for first in range(0, len(tokens), TEXT_TOKENS)]
    long_enough = [Text(piece, 1) for piece in pieces if len(piece) > 1]
    if not long_enough:
        raise ConfigError(f"--text {path} is {len(tokens)} tokens: give at least 2")
    return long_enough


class _Subject:
    """A loaded model with one kind of cache, room for all prompts' answers in it."""

    def __init__(self, config: EngineConfig, kv_cache_dtype: str, num_prompts: int) -> None:
        from engine.executor.blueprint import blueprint
        from engine.executor.torch import ModelRunner

        longest = max(TEXT_TOKENS, num_prompts * PROMPT_TOKENS)
        asked = replace(config, kv_cache_dtype=kv_cache_dtype, max_num_seqs=num_prompts, max_num_batched_tokens=longest)
        plan = blueprint(asked)
        self.vocab_size = plan.model.vocab_size
        self._runner: ModelRunner = ModelRunner(plan)
        self._blocks_each = -(-(PROMPT_TOKENS + ANSWER_TOKENS) // config.block_size)
        blocks = max(num_prompts * self._blocks_each, -(-TEXT_TOKENS // config.block_size))
        self._cache: KvCache = self._runner.allocate_kv(blocks)

    def answers(self, prompts: Sequence[Tokens], texts: Iterable[Text]) -> Answers:
        """Greedy answers to the prompts, and the texts' scores."""
        scores = tuple(score for text in texts for score in self._score(text))
        return Answers(greedy=tuple(self.answer(prompts, temperature=0.0)), scores=scores)

    def answer(self, prompts: Sequence[Tokens], *, temperature: float) -> list[Tokens]:
        """`ANSWER_TOKENS` tokens after each prompt, all prompts together."""
        news, start = list(prompts), 0
        answers: list[Tokens] = [()] * len(prompts)
        for index in range(ANSWER_TOKENS):
            items = tuple(
                self._item(row, new, start, index, SamplingParams(max_tokens=1, temperature=temperature, seed=row))
                for row, new in enumerate(news)
            )
            drawn = self._runner.step(StepPlan(scheduled=items), self._cache).sampled_token_ids
            start += len(news[0])
            news = [(drawn[str(row)],) for row in range(len(prompts))]
            answers = [answer + new for answer, new in zip(answers, news, strict=True)]
        return answers

    def _item(self, row: int, tokens: Tokens, start: int, index: int, sampling: SamplingParams) -> ScheduledRequest:
        first = row * self._blocks_each
        return ScheduledRequest(
            request_id=str(row),
            token_ids=tokens,
            start=start,
            block_ids=tuple(range(first, first + self._blocks_each)),
            samples=True,
            output_index=index,
            sampling=sampling,
        )

    def _score(self, text: Text) -> list[Score]:
        blocks = tuple(range(self._cache.data.shape[2]))
        item = replace(self._item(0, text.tokens, 0, 0, SamplingParams(max_tokens=1)), block_ids=blocks)
        logprobs = self._runner.logits(StepPlan(scheduled=(item,)), self._cache).log_softmax(-1)
        likeliest: list[int] = logprobs.argmax(-1).tolist()
        scored = range(text.first_scored, len(text.tokens))
        return [Score(float(logprobs[index - 1, text.tokens[index]]), likeliest[index - 1]) for index in scored]
