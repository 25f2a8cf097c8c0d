"""Strings are found in pieces of text as in the whole text."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.inference.string_matcher import Match, StringMatcher

TEXTS = st.text(alphabet="ab<", max_size=30)
STRINGS = st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=4)


def search(pieces: Sequence[str], strings: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first match, and the match."""
    matcher, shown = StringMatcher(strings), ""
    for piece in pieces:
        found = matcher.feed(piece)
        if isinstance(found, Match):
            return shown + found.before, found.string
        shown += found
    return shown + matcher.finish(), None


def expected(text: str, strings: Sequence[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        completed = [string for string in strings if text[:end].endswith(string)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [*pieces, text[start:]]


@given(TEXTS, STRINGS, st.lists(st.integers(0, 5), max_size=10))
def test_first_completed_string_is_found(text: str, strings: list[str], sizes: list[int]) -> None:
    assert search(cut(text, sizes), strings) == expected(text, strings)


@given(TEXTS, STRINGS, st.lists(st.integers(0, 5), max_size=10))
def test_only_possible_beginnings_are_held_back(
    text: str, strings: list[str], sizes: list[int]
) -> None:
    matcher, seen, shown = StringMatcher(strings), "", ""
    for piece in cut(text, sizes):
        found = matcher.feed(piece)
        seen += piece
        if isinstance(found, Match):
            assert found.rest == seen[len(shown + found.before + found.string) :]
            return
        shown += found
        held = seen[len(shown) :]
        longest = max(
            (n for s in strings for n in range(len(s)) if seen.endswith(s[:n])), default=0
        )
        assert len(held) == longest


def test_time_is_linear_for_hostile_texts() -> None:
    matcher = StringMatcher(["a" * 999 + "b"] * 16 + ["<tool_call>"])
    before = time.process_time()
    for _ in range(20_000):
        matcher.feed("a")
    for _ in range(1000):
        matcher.feed("<" * 1000)
    # A naive search needs minutes.
    assert time.process_time() - before < 20
