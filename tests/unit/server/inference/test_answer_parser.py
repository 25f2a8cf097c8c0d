"""Events of an answer do not depend on how its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.inference.answer_events import TextDelta
from tinkex.server.inference.answer_parser import AnswerParser
from tinkex.server.inference.token_texts import TokenTexts
from tinkex.testing import ToyTokenizer

TOY = TokenTexts(ToyTokenizer())
TOKENS = st.lists(st.sampled_from([*b"abe \n\xf0\x9f\x98\x80", 256, 300]), max_size=30)
STOPS = st.lists(st.text(alphabet="abe \n", min_size=1, max_size=3), max_size=3)


def parse(
    texts: TokenTexts, batches: Sequence[Sequence[int]], stops: Sequence[str] = ()
) -> tuple[str, str | None]:
    """The text and the stop text of an answer."""
    parser = AnswerParser(texts, stops)
    events = [event for batch in batches for event in parser.feed(batch)] + parser.finish()
    return "".join(e.text for e in events if isinstance(e, TextDelta)), parser.stop_text


@given(TOKENS, STOPS, st.integers(1, 5))
def test_batches_do_not_change_the_answer(tokens: list[int], stops: list[str], size: int) -> None:
    whole = parse(TOY, [tokens], stops)
    batches = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    assert parse(TOY, batches, stops) == whole
    assert not any(stop in whole[0] for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stop"),
    [
        ("hello", [], "hello", None),
        ("one two three", ["two"], "one ", "two"),
        ("abc", ["abc", "b"], "a", "b"),
        ("xab", ["b", "ab"], "x", "ab"),
        ("unfinished tw", ["two"], "unfinished tw", None),
        ("\U0001f600!", ["!"], "\U0001f600", "!"),
    ],
)
def test_text_ends_before_the_stop_text(
    text: str, stops: list[str], shown: str, stop: str | None
) -> None:
    tokens = list(text.encode())
    assert parse(TOY, [[token] for token in tokens], stops) == (shown, stop)


def test_special_tokens_are_not_shown_but_may_be_stop_texts() -> None:
    end = 256
    assert parse(TOY, [[97, end, 98]]) == ("ab", None)
    assert parse(TOY, [[97, end, 98]], ["<eos>"]) == ("a", "<eos>")


def test_tokens_after_the_stop_text_are_ignored() -> None:
    parser = AnswerParser(TOY, ["b"])
    assert parser.feed(b"a") == [TextDelta("a")]
    assert parser.feed(b"bc") == [] and parser.is_finished
    assert parser.feed(b"d") == [] and parser.finish() == []
