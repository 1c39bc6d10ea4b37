"""Stop strings: the same end however the text was cut into tokens, and nothing held back longer than it must."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.stop_strings import StopStrings

# A small alphabet, so that strings overlap themselves and each other.
STRINGS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
PIECES = st.lists(st.tuples(st.text("abc", max_size=6), st.booleans()), max_size=12)


def _slow(strings: list[str], pieces: list[tuple[str, bool]], *, included: bool) -> tuple[str, str | None]:
    """Read a character at a time and look back at every one."""
    text = ""
    for piece, armed in pieces:
        for char in piece:
            text += char
            for string in strings:
                if armed and text.endswith(string):
                    return text if included else text.removesuffix(string), string
    return text, None


@given(strings=STRINGS, pieces=PIECES, included=st.booleans())
def test_the_text_ends_where_a_slow_reading_ends_it(
    strings: list[str],
    pieces: list[tuple[str, bool]],
    included: bool,  # noqa: FBT001 - a case
) -> None:
    """A stop string is found across token boundaries, and its text is shown only where it was asked for."""
    watch = StopStrings(strings, included=included)
    given_text, stopped_by = "", None
    for piece, armed in pieces:
        text, stopped_by = watch.push(piece, armed=armed)
        given_text += text
        if stopped_by is not None:
            break
    given_text += watch.flush()

    assert (given_text, stopped_by) == _slow(strings, pieces, included=included)


@given(strings=STRINGS, pieces=PIECES)
def test_only_what_may_become_a_stop_string_is_held_back(strings: list[str], pieces: list[tuple[str, bool]]) -> None:
    """A stream is no later than it must be, and what it has shown never turns out to be part of a stop string."""
    watch = StopStrings(strings, included=False)
    seen = shown = ""
    for piece, _ in pieces:
        text, stopped_by = watch.push(piece, armed=True)
        if stopped_by is not None:
            return
        seen, shown = seen + piece, shown + text
        beginnings = {string[:length] for string in strings for length in range(len(string))}
        assert seen.removeprefix(shown) == max((each for each in beginnings if seen.endswith(each)), key=len)


def test_where_the_stop_string_is_shown_nothing_is_held_back() -> None:
    """With `include_stop_str_in_output` every token's text comes with its token."""
    watch = StopStrings(["abc"], included=True)
    assert [watch.push(char) for char in "xab"] == [("x", None), ("a", None), ("b", None)]
    assert watch.push("cd") == ("c", "abc")


def test_the_string_that_is_complete_first_wins() -> None:
    """The same string ends a text whether it came as one token or letter by letter; of two, the first asked for."""
    for pieces in (["abcd"], list("abcd")):
        watch = StopStrings(["abcd", "bc", "c"], included=False)
        results = [watch.push(piece) for piece in pieces]
        assert "".join(text for text, _ in results) == "a"
        assert next(string for _, string in results if string) == "bc"
