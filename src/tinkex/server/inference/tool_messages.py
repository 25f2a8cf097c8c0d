"""Messages with tools, for chat templates that cannot write them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from tinkex.server.inference.tool_parsers.hermes import END, START
from tinkex.server.inference.tool_parsers.json_scanner import write_json

Message = Mapping[str, object]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_INSTRUCTION = (
    "You may call functions to answer. Their signatures, as JSON:\n<tools>\n{tools}\n</tools>\n"
    "To call one, write a JSON object with its name and arguments between these tags:\n"
    f'{START}\n{{{{"name": <name>, "arguments": <object>}}}}\n{END}'
)


def describe_tools(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """Describe tools in the system message, and write calls and their results as text."""
    written = [_write_as_text(message) for message in messages]
    if not tools:
        return written
    instruction = _INSTRUCTION.format(tools="\n".join(map(write_json, tools)))
    if written and written[0].get("role") == "system":
        first = f"{written[0].get('content') or ''}\n\n{instruction}"
        return [{**written[0], "content": first}, *written[1:]]
    return [{"role": "system", "content": instruction}, *written]


def _write_as_text(message: Message) -> Message:
    if message.get("role") == "tool":
        content = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or not calls:
        return message
    parts = [str(message.get("content") or ""), *map(_write_call, calls)]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(part for part in parts if part)}


def _write_call(call: Mapping[str, object]) -> str:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    value = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"{START}\n{write_json(value)}\n{END}"


def adapt_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Replace ids of calls by ids of nine letters and digits, which Mistral's templates need."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Message) -> Message:
    changed = dict(message)
    if isinstance(own := message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short_id(own)
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence):
        changed["tool_calls"] = [
            {**call, "id": _short_id(str(call.get("id", "")))} for call in calls
        ]
    return changed


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]
