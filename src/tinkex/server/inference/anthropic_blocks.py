"""Content blocks of Anthropic's Messages API as messages of a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from tinkex.errors import InvalidInput
from tinkex.server.inference.anthropic_request import Block, Message

TemplateMessage = dict[str, object]

_ROLES = ("user", "assistant", "system")


def to_template_messages(
    system: str | Sequence[Block] | None, messages: Sequence[Message]
) -> list[TemplateMessage]:
    """Return the messages of a chat template; consecutive turns of one role are one message."""
    converted: list[TemplateMessage] = []
    if system:
        converted.append({"role": "system", "content": _join_texts("system", _blocks_of(system))})
    for index, message in enumerate(messages):
        if message.role not in _ROLES:
            raise InvalidInput(
                f"messages.{index}.role: must be user, assistant or system, got {message.role!r}"
            )
    tool_names: dict[str, str] = {}
    for role, turns in groupby(enumerate(messages), key=lambda turn: turn[1].role):
        blocks = list(_located_blocks(turns))
        if role == "assistant":
            converted.append(_assistant_message(blocks, tool_names))
        elif role == "user":
            converted += _user_messages(blocks, tool_names)
        else:
            converted.append({"role": "system", "content": _join_located(blocks)})
    return converted


LocatedBlock = tuple[str, Block]


def _located_blocks(turns: Iterable[tuple[int, Message]]) -> Iterator[LocatedBlock]:
    for index, message in turns:
        for position, block in enumerate(_blocks_of(message.content)):
            yield f"messages.{index}.content.{position}", block


def _blocks_of(content: str | Sequence[Block]) -> Sequence[Block]:
    return [Block(type="text", text=content)] if isinstance(content, str) else content


def _user_messages(
    blocks: Sequence[LocatedBlock], tool_names: Mapping[str, str]
) -> Iterator[TemplateMessage]:
    """Yield the tool results of a turn, then its text."""
    texts = [located for located in blocks if located[1].type != "tool_result"]
    for where, block in blocks:
        if block.type == "tool_result":
            yield _tool_message(where, block, tool_names)
    if texts or not blocks:
        yield {"role": "user", "content": _join_located(texts)}


def _tool_message(where: str, block: Block, tool_names: Mapping[str, str]) -> TemplateMessage:
    if not block.tool_use_id:
        raise InvalidInput(f"{where}.tool_use_id: a tool_result names the tool_use it belongs to")
    text = _join_texts(f"{where}.content", _blocks_of(block.content or ""))
    message: TemplateMessage = {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }
    if block.tool_use_id in tool_names:
        message["name"] = tool_names[block.tool_use_id]
    return message


def _assistant_message(
    blocks: Sequence[LocatedBlock], tool_names: dict[str, str]
) -> TemplateMessage:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[TemplateMessage] = []
    for where, block in blocks:
        if block.type == "tool_use":
            call = _tool_call(where, block)
            tool_names[str(call["id"])] = block.name or ""
            calls.append(call)
        elif block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            texts.append(_text_of(where, block))
    # Exactly as it was generated, so that the prefix cache finds the earlier answer.
    message: TemplateMessage = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(where: str, block: Block) -> TemplateMessage:
    if not block.id or not block.name or block.input is None:
        raise InvalidInput(f"{where}: a tool_use needs id, name and input")
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _join_located(blocks: Iterable[LocatedBlock]) -> str:
    return "\n".join(_text_of(where, block) for where, block in blocks)


def _join_texts(where: str, blocks: Iterable[Block]) -> str:
    return _join_located((f"{where}.{index}", block) for index, block in enumerate(blocks))


def _text_of(where: str, block: Block) -> str:
    if block.type != "text":
        raise InvalidInput(
            f"{where}.type: {block.type!r} blocks are not supported here; send text instead"
        )
    if block.text is None:
        raise InvalidInput(f"{where}.text: a text block needs a text")
    return block.text
