"""A choice: its tokens become the text a client reads, and say why it ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.choice import Choice, Piece, TextStop
from engine.frontend import NewToken
from engine.request import FinishReason, SamplingParams
from engine.step import TokenLogprobs
from engine.tokenizer import TextTokenizer
from tests.engine.test_tokenizer import write_byte_tokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """One token a byte."""
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def _tokens(tokenizer: TextTokenizer, text: str, reason: FinishReason | None = None) -> list[NewToken]:
    """The text's tokens, the last with a reason."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [NewToken(token_id, None, None) for token_id in ids[:-1]] + [NewToken(ids[-1], reason, None)]


def _read(choice: Choice, tokens: list[NewToken]) -> list[Piece]:
    """Pieces up to the one that ends the choice."""
    pieces: list[Piece] = []
    for token in tokens:
        pieces.append(choice.take(token))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


def _choice(tokenizer: TextTokenizer, *stop: str, included: bool = False, **sampling: object) -> Choice:
    asked = SamplingParams(max_tokens=100, **sampling)  # type: ignore[arg-type]
    return Choice(tokenizer, asked, TextStop(stop, included), eos_token_ids=(0,))


@given(text=st.text(min_size=1, max_size=30), stop=st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_a_choice_is_the_text_up_to_its_stop_string(tokenizer: TextTokenizer, text: str, stop: list[str]) -> None:
    """Whole or streamed, one piece a token: characters of many tokens and stop strings of many characters."""
    tokens = _tokens(tokenizer, text, LENGTH)
    pieces = _read(_choice(tokenizer, *stop), tokens)
    shown = "".join(piece.text for piece in pieces)

    if pieces[-1].finish_reason is STOP:
        assert pieces[-1].stop_reason in stop
        assert text.startswith(shown + str(pieces[-1].stop_reason))
    else:
        assert (shown, pieces[-1].finish_reason, len(pieces)) == (text, LENGTH, len(tokens))
    assert not any(string in shown for string in stop)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_half_a_stop_string_is_shown_in_the_end(tokenizer: TextTokenizer) -> None:
    """What was held back for nothing is not lost with the last token."""
    pieces = _read(_choice(tokenizer, "xyz"), _tokens(tokenizer, "axy", LENGTH))
    assert [piece.text for piece in pieces] == ["a", "", "xy"]


@pytest.mark.parametrize(("included", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_named_and_shown_where_asked_for(tokenizer: TextTokenizer, included: bool, text: str) -> None:  # noqa: FBT001 - a case
    """As in vLLM: `stop_reason` is the token, and its text follows `include_stop_str_in_output`."""
    (token,) = tokenizer.encode("b", add_special_tokens=False)
    choice = _choice(tokenizer, included=included, stop_token_ids=(token,))
    pieces = _read(choice, _tokens(tokenizer, "ab", STOP))

    assert "".join(piece.text for piece in pieces) == text
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (STOP, token)


@pytest.mark.parametrize(("ignore_eos", "named"), [(False, None), (True, 0)])
def test_the_end_of_sequence_goes_unnamed(tokenizer: TextTokenizer, ignore_eos: bool, named: int | None) -> None:  # noqa: FBT001 - a case
    """A client tells the model's own end from a stop token it asked for; with `ignore_eos` it asked for this one."""
    choice = _choice(tokenizer, stop_token_ids=(0,), ignore_eos=ignore_eos)
    assert choice.take(NewToken(0, STOP, None)) == Piece(0, "", STOP, named, None)


def test_half_a_character_before_the_end_is_shown(tokenizer: TextTokenizer) -> None:
    """What an end of sequence cuts off is a replacement character, not silence."""
    half = tokenizer.encode("é", add_special_tokens=False)[0]
    choice = _choice(tokenizer)
    assert choice.take(NewToken(half, None, None)).text == ""
    assert choice.take(NewToken(0, STOP, None)).text == "\ufffd"


def test_a_stop_string_within_min_tokens_is_text(tokenizer: TextTokenizer) -> None:
    """`min_tokens` keeps an answer from ending early by its text too."""
    pieces = _read(_choice(tokenizer, "b", min_tokens=3), _tokens(tokenizer, "abcab", LENGTH))
    assert ("".join(piece.text for piece in pieces), pieces[-1].stop_reason) == ("abca", "b")


def test_offsets_point_into_the_text(tokenizer: TextTokenizer) -> None:
    """A client lays log-probabilities over the text, held back or not."""
    choice = _choice(tokenizer, "zzz")
    ids = tokenizer.encode("aéz!", add_special_tokens=False)
    pieces = [choice.take(NewToken(token, None, TokenLogprobs(-0.5, ((ids[0], -0.25),)))) for token in ids]
    reports = [piece.report for piece in pieces if piece.report]

    assert [report.text_offset for report in reports] == [0, 1, 1, 2, 3]
    assert [report.token for report in reports] == ["a", "\ufffd", "\ufffd", "z", "!"]
    assert {report.top for report in reports} == {(("a", -0.25),)}


def test_an_offset_is_behind_a_character_that_stayed_half(tokenizer: TextTokenizer) -> None:
    """Bytes that never become a character are shown with the next token, and are not that token's text."""
    choice = _choice(tokenizer)
    half, letter = (
        tokenizer.encode("é", add_special_tokens=False)[0],
        tokenizer.encode("z", add_special_tokens=False)[0],
    )
    pieces = [choice.take(NewToken(token, None, TokenLogprobs(-0.5, ()))) for token in (half, letter, letter)]

    assert [piece.text for piece in pieces] == ["", "\ufffdz", "z"]
    assert [piece.report.text_offset for piece in pieces if piece.report] == [0, 1, 2]
