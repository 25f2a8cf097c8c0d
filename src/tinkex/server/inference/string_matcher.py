"""Finds strings and expects marks in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """The first string that was completed."""

    string: str
    before: str
    """The text before it that was not returned yet."""
    rest: str
    """The part of the piece after it."""


class StringMatcher:
    """Finds the string that is completed first; of several, the longest.

    Takes time linear in the length of the text (Knuth, Morris and Pratt), and the result does not
    depend on how the text is divided.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        # The longest first: it wins if several end at the same character.
        self._strings = sorted({string for string in strings if string}, key=len, reverse=True)
        self._failures = [_failure_table(string) for string in self._strings]
        self._first_characters = {string[0] for string in self._strings}
        self._num_matched = [0] * len(self._strings)
        self._held = ""

    def feed(self, text: str) -> str | Match:
        """Add a piece; returns the text that cannot belong to a string, or the first match.

        After a match, the matcher starts again; feed it `rest`.
        """
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        for position, character in enumerate(text):
            found = self._advance(character)
            if found is not None:
                whole = self._held + text[: position + 1]
                self._reset()
                return Match(found, whole[: len(whole) - len(found)], text[position + 1 :])
        whole = self._held + text
        num_held = max(self._num_matched, default=0)
        self._held = whole[len(whole) - num_held :]
        return whole[: len(whole) - num_held]

    def finish(self) -> str:
        """Return the text that was held back."""
        held = self._held
        self._reset()
        return held

    def _advance(self, character: str) -> str | None:
        found = None
        for index, string in enumerate(self._strings):
            count, failures = self._num_matched[index], self._failures[index]
            while count and string[count] != character:
                count = failures[count - 1]
            count += string[count] == character
            self._num_matched[index] = count
            if count == len(string) and found is None:
                found = string
        return found

    def _reset(self) -> None:
        self._held = ""
        self._num_matched = [0] * len(self._strings)


class Expected(NamedTuple):
    """What came instead of, or as, an expected mark."""

    mark: str | None
    """None if other text came."""
    skipped: str
    """White space before it."""
    rest: str
    """The part of the text after the mark, or the other text."""


class ExpectedMarks:
    """Skips white space and then expects one of some marks, none of which begins another."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self._spaces: list[str] = []
        self._head = ""

    def feed(self, text: str) -> Expected | None:
        """Add a piece; returns what came, or None if that is not known yet."""
        if not self._head:
            stripped = text.lstrip()
            self._spaces.append(text[: len(text) - len(stripped)])
            text = stripped
        self._head += text
        if not self._head or any(
            mark != self._head and mark.startswith(self._head) for mark in self._marks
        ):
            return None
        mark = next((mark for mark in self._marks if self._head.startswith(mark)), None)
        rest = self._head[len(mark or "") :]
        return Expected(mark, "".join(self._spaces), rest)

    def finish(self) -> str:
        """Return all text so far."""
        return "".join([*self._spaces, self._head])


def _failure_table(string: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix of the string."""
    table = [0] * len(string)
    count = 0
    for position in range(1, len(string)):
        while count and string[count] != string[position]:
            count = table[count - 1]
        count += string[count] == string[position]
        table[position] = count
    return table
