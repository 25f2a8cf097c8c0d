"""Reasoning at the beginning of an answer is separated from its text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.answers import collect, cut
from tinkex.server.inference.reasoning import (
    KNOWN_MARKS,
    ReasoningParser,
    ends_in_reasoning,
    find_reasoning_marks,
)

THINK = KNOWN_MARKS[0]
PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "think>", "\n", " ", "a", "b\n", "</"]),
    max_size=12,
).map("".join)
SIZES = st.lists(st.integers(1, 5), max_size=20)


def parse(pieces: list[str], *, is_inside: bool = False) -> tuple[str, str]:
    """The reasoning and the text of an answer."""
    parser = ReasoningParser(THINK, starts_in_reasoning=is_inside)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    answer = collect([*parts, *parser.finish()])
    assert [kind for kind, _ in answer.order] in (
        [],
        ["TextDelta"],
        ["ReasoningDelta"],
        ["ReasoningDelta", "TextDelta"],
    )
    return answer.reasoning, answer.text


@pytest.mark.parametrize(
    ("answer", "is_inside", "reasoning", "text"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        ("\n<think>why</think>so", False, "why", "so"),
        ("why\n\nnot\n</think>\n\nso", True, "why\n\nnot", "so"),
        ("<think>why</think>so", True, "why", "so"),
        ("<think>\n\n</think>\n\nso", False, "", "so"),
        ("<think>never ends\n", False, "never ends\n", ""),
        ("never ends </thi", True, "never ends </thi", ""),
        ("no <think>reasoning</think>", False, "", "no <think>reasoning</think>"),
        ("  <thin", False, "", "  <thin"),
        ("a</think>b", False, "", "a</think>b"),
        ("<think>a</think>b</think>", False, "a", "b</think>"),
        ("", True, "", ""),
    ],
)
def test_reasoning_and_text(answer: str, is_inside: bool, reasoning: str, text: str) -> None:
    assert parse([answer], is_inside=is_inside) == (reasoning, text)
    assert parse(list(answer), is_inside=is_inside) == (reasoning, text)


@given(PIECES, SIZES, st.booleans())
def test_pieces_do_not_change_the_result(answer: str, sizes: list[int], is_inside: bool) -> None:
    assert parse(cut(answer, sizes), is_inside=is_inside) == parse([answer], is_inside=is_inside)


@given(PIECES, st.booleans())
def test_nothing_but_marks_and_newlines_is_lost(answer: str, is_inside: bool) -> None:
    reasoning, text = parse([answer], is_inside=is_inside)
    remaining = (reasoning + text).replace("\n", "")
    rest = answer.replace("\n", "")
    candidates = {rest, rest.replace("</think>", "", 1)}
    without_start = rest.lstrip().removeprefix("<think>")
    candidates |= {without_start, without_start.replace("</think>", "", 1)}
    assert remaining in candidates


def test_marks_are_those_of_the_template() -> None:
    assert find_reasoning_marks("{{ messages }}") == THINK
    assert find_reasoning_marks("x [THINK] y [/THINK]").start == "[THINK]"
    assert ends_in_reasoning("<|assistant|><think>\n", THINK)
    assert not ends_in_reasoning("what is <think>?\nassistant:", THINK)
    assert not ends_in_reasoning("<think>\n\n</think>\n\n", THINK)
