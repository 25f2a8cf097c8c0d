"""Events of an answer do not depend on how its tokens arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.answers import Collected, collect
from tinkex.server.inference.answer_events import TextDelta
from tinkex.server.inference.answer_parser import AnswerParser, AnswerSyntax
from tinkex.server.inference.reasoning import KNOWN_MARKS, ReasoningParser
from tinkex.server.inference.token_texts import TokenTexts
from tinkex.server.inference.tool_parsers import FAMILIES, OfferedTools
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


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
ANSWER = (
    "<think>\nWhich time?\n</think>\n\nOne moment \U0001f600.\n"
    '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'
)
FRAGMENTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "now", "arguments": {}}'),
        *("\n", "a", "\U0001f600", "{", "<"),
    ]
)


def new_parser(stops: Sequence[str] = (), **options: Any) -> AnswerParser:
    return AnswerParser(
        TOY,
        stops,
        reasoning=ReasoningParser(KNOWN_MARKS[0]),
        tools=FAMILIES["hermes"].new_parser(OfferedTools.from_tools(TOOLS)),
        **options,
    )


def collect_all(parser: AnswerParser, batches: Iterable[Sequence[int]]) -> Collected:
    events = [event for batch in batches for event in parser.feed(batch)]
    return collect([*events, *parser.finish()])


def test_reasoning_text_and_calls() -> None:
    parser = new_parser()
    answer = collect_all(parser, [[token] for token in ANSWER.encode()])
    assert (answer.reasoning, answer.text) == ("Which time?", "One moment \U0001f600.")
    assert answer.calls == [("now", '{"zone": "UTC"}')] and parser.has_tool_calls
    # From the token that completes the first mark to the one that completes the second.
    assert parser.num_reasoning_tokens == len(">\nWhich time?\n</think>")


def test_nothing_is_parsed_after_a_stop_text() -> None:
    parser = new_parser(["moment"])
    answer = collect_all(parser, [ANSWER.encode()])
    assert answer.text == "One " and not answer.calls and parser.stop_text == "moment"


@given(st.lists(FRAGMENTS, max_size=12), st.lists(st.text("a<{\n", min_size=1), max_size=2))
def test_tokens_in_any_batches_give_the_same_answer(parts: list[str], stops: list[str]) -> None:
    tokens = "".join(parts).encode()
    whole = collect_all(new_parser(stops), [tokens])
    assert collect_all(new_parser(stops), [[token] for token in tokens]) == whole


def test_forced_text_begins_the_answer() -> None:
    parser = new_parser(forced_text='<tool_call>{"name": "now", "arguments":')
    assert collect_all(parser, [b' {"a": 1}}']).calls == [("now", '{"a": 1}')]


def test_special_tokens_that_are_marks_are_parsed() -> None:
    parser = AnswerParser(TOY, syntax=AnswerSyntax(marks=frozenset({"<eos>"})))
    assert collect_all(parser, [[97, 256, 98]]).text == "a<eos>b"


def test_deltas_of_one_batch_are_merged() -> None:
    parser = new_parser()
    kinds = [type(event).__name__ for event in parser.feed(ANSWER.encode())]
    assert kinds == ["ReasoningDelta", "TextDelta", "ToolCallStart", "ToolCallDelta", "ToolCallEnd"]


def test_end_texts_are_not_reported_as_stop_texts() -> None:
    syntax = AnswerSyntax(end_texts=("\nUser:",), strips_start=True)
    parser = AnswerParser(TOY, ["!"], syntax=syntax)
    answer = collect_all(parser, [[token] for token in b"  Hi.\nUser: you!"])
    assert answer.text == "Hi." and parser.is_finished and parser.stop_text is None
