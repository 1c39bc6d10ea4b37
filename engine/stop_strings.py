"""Stop strings: where a choice's text ends, whatever the tokens it came in."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one choice's text for the stop string that is complete first; of several, the first that was asked for.

    The text is read a character at a time, so how it was cut into tokens does not matter. What may still become part of
    a stop string is held back, unless stop strings belong to the output.
    """

    def __init__(self, strings: Sequence[str], *, included: bool) -> None:
        """None of `strings` may be empty. `included`: the text ends after the stop string, not before it."""
        self._searches = [_Search(string) for string in strings]
        self._included = included
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Read on; returns the text that is certain now, and the stop string that ended it, if one did.

        Args:
            text: what comes next.
            armed: whether a stop string that ends in it counts.
        """
        known = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            complete = [search.string for search in self._searches if search.step(char)]
            if complete and armed:
                self._held = ""
                return known[: end if self._included else end - len(complete[0])], complete[0]
        num_held = 0 if self._included else max((search.num_matched for search in self._searches), default=0)
        certain = len(known) - num_held
        self._held = known[certain:]
        return known[:certain], None

    def flush(self) -> str:
        """What was held back, once nothing follows that could complete it."""
        held, self._held = self._held, ""
        return held


class _Search:
    """How much of a string the text so far ends with (Knuth, Morris and Pratt 1977, "Fast pattern matching")."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        self._borders = [0]
        """Of each prefix: the length of the longest shorter prefix that it ends with."""

        for char in string[1:]:
            self._borders.append(self._extend(self._borders[-1], char))

    def step(self, char: str) -> bool:
        """Read one character; True when the string is complete."""
        self.num_matched = self._extend(self.num_matched, char)
        if self.num_matched < len(self.string):
            return False
        self.num_matched = self._borders[-1]
        return True

    def _extend(self, length: int, char: str) -> int:
        while length and self.string[length] != char:
            length = self._borders[length - 1]
        return length + (self.string[length] == char)
