"""The comparison of an fp8 KV cache with the model's own dtype: its figures, and that it compares what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from engine.__main__ import main
from engine.config import EngineConfig
from engine.kv_quality import ANSWER_TOKENS, PROMPT_TOKENS, Answers, Score, _Subject, compare, measure

CONFIG = EngineConfig(model="embedded", device="cpu", max_model_len=512)
OWN = Answers(
    greedy=((1, 2, 3, 4), (5, 6, 7, 8)),
    scores=(Score(math.log(0.5), 1), Score(math.log(0.125), 2)),
)


def test_equal_caches_differ_in_nothing() -> None:
    """Whatever the tool reports is the cache's doing, not its own."""
    quality = compare(OWN, OWN)

    assert (quality.agreement, quality.likeliest_agreement, quality.tokens_alike) == (1.0, 1.0, 4.0)
    assert quality.perplexity == quality.perplexity_fp8 == pytest.approx(4.0)
    assert quality.perplexity_change == 0.0


def test_figures_of_answers_that_differ() -> None:
    """A user decides by these figures."""
    other = Answers(
        greedy=((1, 2, 9, 4), (9, 9, 9, 9)),
        scores=(Score(math.log(0.25), 1), Score(math.log(0.125), 3)),
    )
    quality = compare(OWN, other)

    assert quality.agreement == 3 / 8
    assert quality.tokens_alike == 1.0
    assert quality.likeliest_agreement == 0.5
    assert quality.perplexity_fp8 == pytest.approx(4.0 * math.sqrt(2))
    assert quality.perplexity_change == pytest.approx(math.sqrt(2) - 1)


def test_the_same_cache_answers_and_scores_the_same_again() -> None:
    """The two sides of the comparison see the same prompts, and nothing of what was computed before."""
    subject = _Subject(CONFIG, "auto", 2)
    prompts = [tuple(range(PROMPT_TOKENS)), tuple(range(100, 100 + PROMPT_TOKENS))]
    first = subject.answer(prompts, temperature=0.0)

    assert subject.answer(prompts, temperature=1.0) != first
    assert subject.answer(prompts, temperature=0.0) == first
    assert subject.answer(prompts[::-1], temperature=0.0) == first[::-1]


def test_fp8_is_measured_to_differ_and_to_be_the_same_model() -> None:
    """fp8 is really on, and it is still the model: far better than one that knows nothing."""
    quality = measure(CONFIG, num_prompts=4, texts=None)

    assert quality.num_scored_tokens == 4 * ANSWER_TOKENS
    assert quality.perplexity != quality.perplexity_fp8
    assert abs(quality.perplexity_change) < 0.25
    # Tokens drawn without the prompt would be the likeliest one time in 512.
    assert quality.likeliest_agreement > 0.25


def test_the_command_reads_a_text_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script can gate a deployment on the figures."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    code = main(["kv-quality", "embedded", "--device", "cpu", "--prompts", "1", "--text", str(text), "--json"])
    told = json.loads(capsys.readouterr().out)

    assert code == 0
    assert told["num_scored_tokens"] >= 20 * 45 - 2
    assert told["perplexity_change"] == told["perplexity_fp8"] / told["perplexity"] - 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompts", "0"), "prompts=0 is below 1"),
        (("--text", "nowhere.txt"), "--text nowhere.txt cannot be read"),
        (("--executor", "simulated", "--law", "h100-8b"), "executor='simulated' makes its tokens up"),
    ],
)
def test_bad_input_is_said_to_be(flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 2, not a traceback."""
    assert main(["kv-quality", "embedded", "--device", "cpu", *flags]) == 2
    assert words in capsys.readouterr().err
