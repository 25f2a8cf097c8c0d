"""Tool calls of all families: streamed in pieces, with errors, and hostile answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.answers import Collected, collect, cut
from tinkex.server.inference.answer_events import ToolCallDelta
from tinkex.server.inference.tool_parsers import FAMILIES, OfferedTools, detect_family

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array"},
        "deep": {"type": ["boolean", "number"]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "now", "arguments": ', "<tool_", "\n"],
    "qwen-xml": [
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "weather>",
        "now>",
        "</function>",
        "<parameter=city>",
        "<parameter=days>",
        "</parameter>",
        "\n",
        "<parameter",
    ],
    "llama3": ["<|python_tag|>", '{"name": "now", "parameters": ', ";", "<|python"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "now", "[", "]", '{"name": "now", '],
}
SHARED = [
    "{",
    "}",
    "{}",
    '{"a": "}\\""}',
    '"',
    "\\",
    " ",
    ",",
    "text",
    '{"name": "other", "arguments": {}}',
    '{"arguments": {"x": 1}, "name": "now"}',
    '{"name": "weather", "arguments": {"city": "\U0001f600"}}',
    '"arguments": [1]}',
    "1",
]


def parse(family: str, pieces: list[str], *, is_parallel: bool = True) -> Collected:
    tools = OfferedTools.from_tools(TOOLS, has_parallel_calls=is_parallel)
    parser = FAMILIES[family].new_parser(tools)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    answer = collect(events)
    assert parser.num_calls == len(answer.calls)
    return answer


def call(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


CALL = call("weather", city="Rome", days=2)
ARGUMENTS = '{"city": "Rome", "days": 2}'
XML = (
    "<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
)


@pytest.mark.parametrize(
    ("family", "answer", "text", "calls"),
    [
        ("hermes", "hello ", "hello ", []),
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", ARGUMENTS)]),
        ("hermes", f"Sure.\n<tool_call>{CALL}</tool_call>\n", "Sure.", [("weather", ARGUMENTS)]),
        (
            "hermes",
            f"<tool_call>{CALL}</tool_call>\n<tool_call>{call('now')}</tool_call>",
            "",
            [("weather", ARGUMENTS), ("now", "{}")],
        ),
        ("hermes", f"<tool_call>{CALL}", "", [("weather", ARGUMENTS)]),
        ("hermes", f"<tool_call>{CALL[:-1]}", "", [("weather", ARGUMENTS)]),
        ("hermes", f"<tool_call>{CALL}</tool", "", [("weather", ARGUMENTS)]),
        ("hermes", f"<tool_call>{CALL} and more", " and more", [("weather", ARGUMENTS)]),
        (
            "hermes",
            '<tool_call>{"arguments": {"x": [1]}, "name": "now"}</tool_call>',
            "",
            [("now", '{"x": [1]}')],
        ),
        (
            "hermes",
            '<tool_call>{"type": "function", "function": {"name": "now"}}</tool_call>',
            "",
            [("now", "{}")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": "{\\"x\\": 1}"}</tool_call>',
            "",
            [("now", '{"x": 1}')],
        ),
        ("hermes", "<tool_call> not JSON</tool_call>", "<tool_call> not JSON</tool_call>", []),
        ("hermes", f"<tool_call>{call('rm')}", f"<tool_call>{call('rm')}", []),
        ("hermes", '<tool_call>\n{"name": ', '<tool_call>\n{"name": ', []),
        (
            "hermes",
            f"<tool_call>{{]</tool_call><tool_call>{CALL}</tool_call>",
            "<tool_call>{]</tool_call>",
            [("weather", ARGUMENTS)],
        ),
        ("qwen-xml", f"<tool_call>\n{XML}</function>\n</tool_call>", "", [("weather", ARGUMENTS)]),
        ("qwen-xml", f"Sure.\n{XML}</function>", "Sure.", [("weather", ARGUMENTS)]),
        ("qwen-xml", f"<tool_call>{XML}", "", [("weather", ARGUMENTS)]),
        ("qwen-xml", "<tool_call><function=now></function></tool_call>", "", [("now", "{}")]),
        ("qwen-xml", "<function=rm></function>", "<function=rm></function>", []),
        ("qwen-xml", "<tool_call><function=no", "<tool_call><function=no", []),
        ("qwen-xml", "<function=now>oops", "oops", [("now", "{}")]),
        (
            "qwen-xml",
            '<function=weather><parameter=city>a\n"b"\n\n</parameter>'
            "<parameter=units>null</parameter><parameter=tags>[1, {}]</parameter>"
            "<parameter=deep>True</parameter><parameter=days>many</parameter>"
            "<parameter=unknown>7</parameter></function>",
            "",
            [
                (
                    "weather",
                    '{"city": "a\\n\\"b\\"\\n", "units": null, "tags": [1, {}], "deep": true, '
                    '"days": "many", "unknown": "7"}',
                )
            ],
        ),
        ("llama3", "Hello {", "Hello {", []),
        ("llama3", CALL, "", [("weather", ARGUMENTS)]),
        (
            "llama3",
            '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
            "",
            [("now", "{}"), ("now", "{}")],
        ),
        ("llama3", '{"answer": {"name": 1}}', '{"answer": {"name": 1}}', []),
        ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("llama3", f"{CALL}; done", "; done", [("weather", ARGUMENTS)]),
        ("mistral", f"[TOOL_CALLS][{CALL}]", "", [("weather", ARGUMENTS)]),
        (
            "mistral",
            f"Sure.[TOOL_CALLS] [{CALL}, {call('now')}]",
            "Sure.",
            [("weather", ARGUMENTS), ("now", "{}")],
        ),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "", [("weather", ARGUMENTS)]),
        ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}", "", [("weather", ARGUMENTS)]),
        (
            "mistral",
            "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]now[ARGS]{}",
            "",
            [("now", "{}"), ("now", "{}")],
        ),
        ("mistral", "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
        ("mistral", "[TOOL_CALLS]it is now", "[TOOL_CALLS]it is now", []),
        ("mistral", "[TOOL_CALLS]now [", "[TOOL_CALLS]now [", []),
        ("qwen-xml", "<function=now \n", "<function=now \n", []),
        ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]x", "[TOOL_CALLS]now[CALL_ID]x", []),
    ],
)
def test_text_and_calls(family: str, answer: str, text: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([answer], list(answer)):
        parsed = parse(family, pieces)
        assert (parsed.text, parsed.calls) == (text, calls)
        assert parsed.ended == list(range(len(calls)))


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), sizes=st.lists(st.integers(1, 9), max_size=30))
def test_pieces_do_not_change_the_answer(
    family: str, data: st.DataObject, sizes: list[int]
) -> None:
    fragments = st.sampled_from([*FRAGMENTS[family], *SHARED])
    answer = "".join(data.draw(st.lists(fragments, max_size=12)))
    whole = parse(family, [answer])
    assert parse(family, cut(answer, sizes)) == whole
    assert parse(family, list(answer)) == whole
    if not whole.calls:
        assert whole.text == answer


@pytest.mark.parametrize(
    ("family", "answer", "begin"),
    [
        ("hermes", f"<tool_call>{CALL}</tool_call>", '{"city"'),
        ("llama3", CALL, '{"city"'),
        ("mistral", f"[TOOL_CALLS][{CALL}]", '{"city"'),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", '{"city"'),
        ("qwen-xml", XML, "Rome"),
    ],
)
def test_arguments_are_streamed(family: str, answer: str, begin: str) -> None:
    """All arguments up to the last character arrive without the rest of the answer."""
    parser = FAMILIES[family].new_parser(OfferedTools.from_tools(TOOLS))
    end = answer.index(begin) + len(begin)
    events = parser.feed(answer[:end])
    sent = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    assert ARGUMENTS.startswith(sent) and len(sent) >= len('{"city"')


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("hermes", f"a <tool_call>{CALL}</tool_call> b <tool_call>{CALL}</tool_call>"),
        ("qwen-xml", f"a {XML}</function> b {XML}</function>"),
        ("llama3", f"{CALL}; {CALL}"),
        ("mistral", f"a [TOOL_CALLS][{CALL}, {CALL}]"),
    ],
)
def test_answer_ends_after_the_only_call(family: str, answer: str) -> None:
    parsed = parse(family, list(answer), is_parallel=False)
    assert parsed.calls == [("weather", ARGUMENTS)] and parsed.ended == [0]
    assert parsed.text in {"a", ""}


def test_incomplete_arguments_have_no_end() -> None:
    parsed = parse("hermes", ['<tool_call>{"name": "now", "arguments": {"x": '])
    assert parsed.calls == [("now", '{"x": ')] and parsed.ended == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["weather", None])
def test_opening_begins_a_call(family: str, name: str | None) -> None:
    opening = FAMILIES[family].opening(name, "")
    rest = {
        "hermes": " {}}" if name else CALL,
        "llama3": " {}}" if name else 'weather", "parameters": {}}',
        "mistral": " {}}]" if name else f"[{CALL}]",
        "qwen-xml": "</function>" if name else "weather></function>",
    }[family]
    parsed = parse(family, [opening, rest])
    assert [called for called, _ in parsed.calls] == ["weather"] and parsed.ended == [0]
    assert parsed.text == ""


HOSTILE: dict[str, Callable[[str, int], str]] = {
    "marks": lambda mark, count: mark * (count // 16),
    "open marks": lambda mark, count: (mark + "{") * (count // 16),
    "angles": lambda mark, count: "<" * count,
    "brackets": lambda mark, count: mark + "{" * count,
    "spaces": lambda mark, count: mark + " " * count,
    "nested": lambda mark, count: (mark + "{") * (count // 32) + "}" * (count // 32),
    "quotes": lambda mark, count: mark + '{"name": "' + '\\"' * (count // 2),
    "names": lambda mark, count: mark + "n" * count,
}


@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", HOSTILE)
def test_time_is_linear_for_hostile_answers(family: str, kind: str, count: int) -> None:
    answer = HOSTILE[kind](FRAGMENTS[family][0], count)
    before = time.process_time()
    assert parse_quickly(family, answer, 5) == answer
    # A quadratic parser needs minutes for a million characters.
    assert time.process_time() - before < count / 30_000


def parse_quickly(family: str, answer: str, size: int) -> str:
    """The text of an answer that has no calls."""
    parser = FAMILIES[family].new_parser(OfferedTools.from_tools(TOOLS))
    events = []
    for start in range(0, len(answer), size):
        events += parser.feed(answer[start : start + size])
    events += parser.finish()
    return "".join(event.text for event in events)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% if tools %}<tool_call>{{ tool_call.arguments | tojson }}", "hermes"),
        ("<tool_call>\n<function=name>\n<parameter=x>", "qwen-xml"),
        ('{% for t in tools %}{"name": ..., "parameters": ...}', "llama3"),
        ("<|python_tag|>", "llama3"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ message.content }}", None),
    ],
)
def test_family_is_detected(template: str, family: str | None) -> None:
    found = detect_family(template)
    assert (found.name if found else None) == family
