"""Answers in the form of Anthropic's Messages API: stream events, and messages made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from typing import Any, TypeAlias

import msgspec

from tinkex.server.inference.answer_events import (
    AnswerEvent,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tinkex.server.inference.generation import Usage

StreamEvent: TypeAlias = Mapping[str, Any]

PING: StreamEvent = {"type": "ping"}
#: Clients return it with the reasoning of earlier turns; it is not checked.
SIGNATURE = "unsigned"
#: Holds the arguments of a tool call that are not a JSON object, such as those of an answer that
#: reached its token limit.
INVALID_JSON_KEY = "INVALID_JSON"

_EMPTY_BLOCKS: Mapping[str, Mapping[str, object]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


def usage_to_json(usage: Usage) -> dict[str, object]:
    """Return the usage of an answer."""
    fields: dict[str, object] = {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
    }
    if usage.num_reasoning_tokens:
        fields["output_tokens_details"] = {"thinking_tokens": usage.num_reasoning_tokens}
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class StopDetails:
    """Why an answer ended."""

    finish_reason: FinishReason
    stop: str | int | None = None
    """The stop text or token that was reached; None for the end of the turn."""
    is_context_full: bool = False
    """Whether the answer ended before `max_tokens` because the context was full."""

    def to_json(self) -> dict[str, object]:
        """Return `stop_reason` and `stop_sequence`."""
        stop_sequence = None
        if self.finish_reason == "tool_calls":
            reason = "tool_use"
        elif self.finish_reason == "length":
            reason = "model_context_window_exceeded" if self.is_context_full else "max_tokens"
        elif isinstance(self.stop, str):
            reason, stop_sequence = "stop_sequence", self.stop
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop_sequence}


class MessageStream:
    """Turns the parts of an answer into stream events with consecutive block indexes."""

    def __init__(self, request_id: str, model: str, *, omits_thinking: bool = False) -> None:
        self._request_id = request_id
        self._model = model
        self._omits_thinking = omits_thinking
        self._num_blocks = 0
        self._open_type: str | None = None
        self._held_space = ""

    def start(self, num_prompt_tokens: int) -> list[StreamEvent]:
        """Return the events before the first block."""
        message: dict[str, object] = {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_to_json(Usage(num_prompt_tokens=num_prompt_tokens)),
        }
        return [{"type": "message_start", "message": message}, PING]

    def feed(self, events: Iterable[AnswerEvent]) -> list[StreamEvent]:
        """Return the stream events of the next parts of the answer."""
        return [stream_event for event in events for stream_event in self._convert(event)]

    def finish(self, stop: StopDetails, usage: Usage) -> list[StreamEvent]:
        """Return the events after the last part of the answer."""
        events = list(self._close_block())
        if self._held_space and not self._num_blocks:
            # The whole answer is white space.
            events = [*self._delta("text", self._take_space()), *self._close_block()]
        ending = {"type": "message_delta", "delta": stop.to_json(), "usage": usage_to_json(usage)}
        return [*events, ending, {"type": "message_stop"}]

    def _convert(self, event: AnswerEvent) -> Iterator[StreamEvent]:
        match event:
            case TextDelta(text):
                yield from self._text(text)
            case ReasoningDelta(text):
                yield from self._delta("thinking", "" if self._omits_thinking else text)
            case ToolCallStart(name=name):
                yield from self._open_block("tool_use", self._tool_use_block(name))
            case ToolCallDelta(arguments=arguments):
                yield from self._delta("tool_use", arguments)
            case ToolCallEnd():
                yield from self._close_block()

    def _text(self, text: str) -> Iterator[StreamEvent]:
        """Yield text; white space between other blocks does not become a block."""
        if self._open_type != "text":
            text = self._take_space() + text
            if not text.strip():
                self._held_space = text
                return
        yield from self._delta("text", text)

    def _take_space(self) -> str:
        held, self._held_space = self._held_space, ""
        return held

    def _delta(self, block_type: str, text: str) -> Iterator[StreamEvent]:
        if self._open_type != block_type:
            yield from self._open_block(block_type, _EMPTY_BLOCKS[block_type])
        if text:
            yield self._block_delta(_DELTA_FIELDS[block_type], text)

    def _open_block(self, block_type: str, block: Mapping[str, object]) -> Iterator[StreamEvent]:
        yield from self._close_block()
        self._held_space = ""
        self._open_type = block_type
        self._num_blocks += 1
        yield {
            "type": "content_block_start",
            "index": self._num_blocks - 1,
            "content_block": block,
        }

    def _close_block(self) -> Iterator[StreamEvent]:
        if self._open_type is None:
            return
        if self._open_type == "thinking":
            yield self._block_delta(("signature_delta", "signature"), SIGNATURE)
        self._open_type = None
        yield {"type": "content_block_stop", "index": self._num_blocks - 1}

    def _block_delta(self, field: tuple[str, str], text: str) -> StreamEvent:
        delta_type, name = field
        return {
            "type": "content_block_delta",
            "index": self._num_blocks - 1,
            "delta": {"type": delta_type, name: text},
        }

    def _tool_use_block(self, name: str) -> Mapping[str, object]:
        # The same request has the same ids, whether it is streamed or not.
        key = f"{self._request_id}:{self._num_blocks}".encode()
        tool_use_id = f"toolu_{blake2s(key, digest_size=12).hexdigest()}"
        return {"type": "tool_use", "id": tool_use_id, "name": name, "input": {}}


#: Type and field of the deltas of a block.
_DELTA_FIELDS: Mapping[str, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def encode_event(event: StreamEvent) -> bytes:
    """Encode a server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (
        str(event["type"]).encode("ascii"),
        msgspec.json.encode(event),
    )


def encode_events(events: Iterable[StreamEvent]) -> bytes:
    """Encode several server-sent events."""
    return b"".join(map(encode_event, events))


def build_message(events: Sequence[StreamEvent]) -> dict[str, object]:
    """Return the message that a client would assemble from the events of a stream."""
    message: dict[str, object] = {}
    content: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = dict(event["message"])
            case "content_block_start":
                content.append(dict(event["content_block"]))
                texts.append([])
            case "content_block_delta" if event["delta"]["type"] != "signature_delta":
                texts[-1].append(event["delta"][_DELTA_FIELDS[content[-1]["type"]][1]])
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    filled = [_fill_block(*pair) for pair in zip(content, map("".join, texts), strict=True)]
    return message | {"content": filled}


def _fill_block(block: Mapping[str, object], text: str) -> dict[str, object]:
    if block["type"] == "tool_use":
        return {**block, "input": _parse_arguments(text)}
    if block["type"] == "thinking":
        return {**block, "thinking": text, "signature": SIGNATURE}
    return {**block, "text": text}


def _parse_arguments(text: str) -> Mapping[str, object]:
    try:
        arguments = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {INVALID_JSON_KEY: text}
