"""Answers in the form of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.inference.answer_events import (
    AnswerEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tinkex.server.inference.anthropic_stream import (
    MessageStream,
    StopDetails,
    StreamEvent,
    build_message,
    encode_events,
    usage_to_json,
)
from tinkex.server.inference.generation import Usage

USAGE = Usage(num_prompt_tokens=9, num_cached_tokens=4, num_completion_tokens=7)
END = StopDetails(finish_reason="stop")


def stream(
    *parts: Sequence[AnswerEvent], stop: StopDetails = END, omits_thinking: bool = False
) -> list[StreamEvent]:
    writer = MessageStream("job1", "tinkex/tiny", omits_thinking=omits_thinking)
    events = writer.start(9)
    for part in parts:
        events += writer.feed(part)
    return [*events, *writer.finish(stop, USAGE)]


def content_of(*events: AnswerEvent, stop: StopDetails = END) -> object:
    return build_message(stream(events, stop=stop))["content"]


ANSWER = (
    ReasoningDelta("Let me "),
    ReasoningDelta("see."),
    TextDelta("\n\n"),
    TextDelta("Là, "),
    TextDelta("wait."),
    TextDelta("\n"),
    ToolCallStart(0, "weather"),
    ToolCallDelta(0, '{"city":'),
    ToolCallDelta(0, ' "Paris"}'),
    ToolCallEnd(0),
    TextDelta("\n"),
    ToolCallStart(1, "time"),
    ToolCallEnd(1),
)

GOLDEN = """\
event: message_start
data: {"type":"message_start","message":{"id":"msg_job1","type":"message","role":"assistant",\
"model":"tinkex/tiny","content":[],"stop_reason":null,"stop_sequence":null,"usage":\
{"input_tokens":9,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}}}

event: ping
data: {"type":"ping"}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":\
{"type":"thinking","thinking":"","signature":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":\
{"type":"thinking_delta","thinking":"Let me "}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"see."}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":\
{"type":"signature_delta","signature":"unsigned"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"\\n\\nLà, "}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"wait."}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"\\n"}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: content_block_start
data: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use",\
"id":"toolu_337fe9eaf8e39c6479c82aba","name":"weather","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":\
{"type":"input_json_delta","partial_json":"{\\"city\\":"}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":\
{"type":"input_json_delta","partial_json":" \\"Paris\\"}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":2}

event: content_block_start
data: {"type":"content_block_start","index":3,"content_block":{"type":"tool_use",\
"id":"toolu_e8eb49bfe881be3be152340e","name":"time","input":{}}}

event: content_block_stop
data: {"type":"content_block_stop","index":3}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":\
{"input_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":7}}

event: message_stop
data: {"type":"message_stop"}

"""


def test_the_bytes_of_a_stream() -> None:
    events = stream(ANSWER, stop=StopDetails(finish_reason="tool_calls"))
    assert encode_events(events).decode() == GOLDEN


def test_a_message_of_the_same_events() -> None:
    message = build_message(stream(ANSWER, stop=StopDetails(finish_reason="tool_calls")))
    assert message == {
        "id": "msg_job1",
        "type": "message",
        "role": "assistant",
        "model": "tinkex/tiny",
        "content": [
            {"type": "thinking", "thinking": "Let me see.", "signature": "unsigned"},
            {"type": "text", "text": "\n\nLà, wait.\n"},
            {
                "type": "tool_use",
                "id": "toolu_337fe9eaf8e39c6479c82aba",
                "name": "weather",
                "input": {"city": "Paris"},
            },
            {
                "type": "tool_use",
                "id": "toolu_e8eb49bfe881be3be152340e",
                "name": "time",
                "input": {},
            },
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 7,
        },
    }


def test_an_empty_answer_has_no_blocks() -> None:
    assert content_of() == []
    types = [event["type"] for event in stream()]
    assert types == ["message_start", "ping", "message_delta", "message_stop"]


def test_an_answer_of_white_space_is_kept() -> None:
    assert content_of(TextDelta(" "), TextDelta("\n")) == [{"type": "text", "text": " \n"}]


def test_omitted_reasoning_leaves_an_empty_block() -> None:
    events = stream((ReasoningDelta("a"), ReasoningDelta("b"), TextDelta("c")), omits_thinking=True)
    assert build_message(events)["content"] == [
        {"type": "thinking", "thinking": "", "signature": "unsigned"},
        {"type": "text", "text": "c"},
    ]


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]"])
def test_arguments_that_are_not_an_object_are_kept_as_text(arguments: str) -> None:
    block = content_of(ToolCallStart(0, "f"), ToolCallDelta(0, arguments))
    assert isinstance(block, list)
    assert block[0]["input"] == {"INVALID_JSON": arguments}


@pytest.mark.parametrize(
    ("stop", "reason", "sequence"),
    [
        (StopDetails(finish_reason="stop"), "end_turn", None),
        (StopDetails(finish_reason="stop", stop=7), "end_turn", None),
        (StopDetails(finish_reason="stop", stop="END"), "stop_sequence", "END"),
        (StopDetails(finish_reason="length"), "max_tokens", None),
        (
            StopDetails(finish_reason="length", is_context_full=True),
            "model_context_window_exceeded",
            None,
        ),
        (StopDetails(finish_reason="tool_calls"), "tool_use", None),
    ],
)
def test_stop_reasons(stop: StopDetails, reason: str, sequence: str | None) -> None:
    assert stop.to_json() == {"stop_reason": reason, "stop_sequence": sequence}


def test_reasoning_tokens_are_part_of_the_usage() -> None:
    usage = Usage(num_prompt_tokens=1, num_completion_tokens=5, num_reasoning_tokens=3)
    assert usage_to_json(usage)["output_tokens_details"] == {"thinking_tokens": 3}


def cut(events: Iterable[AnswerEvent], sizes: Sequence[int]) -> list[list[AnswerEvent]]:
    remaining, parts = list(events), []
    for size in sizes:
        parts.append(remaining[:size])
        remaining = remaining[size:]
    return [*parts, remaining]


@given(st.lists(st.integers(0, 5), max_size=8))
def test_the_stream_does_not_depend_on_how_parts_arrive(sizes: list[int]) -> None:
    assert stream(*cut(ANSWER, sizes)) == stream(ANSWER)


def test_indexes_are_consecutive_and_blocks_do_not_overlap() -> None:
    open_index, expected = None, 0
    for event in stream(ANSWER):
        if event["type"] == "content_block_start":
            assert (open_index, event["index"]) == (None, expected)
            open_index, expected = expected, expected + 1
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
    assert (open_index, expected) == (None, 4)
