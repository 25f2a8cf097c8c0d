"""Rows of a JSONL file: checked once from front to back, then read again by their number."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from tinkex.errors import InvalidInput

Messages: TypeAlias = tuple[Mapping[str, Any], ...]
#: Plain text, or a conversation that the model is to go on with.
Prompt: TypeAlias = str | Messages
RowT = TypeVar("RowT")

_BOM = b"\xef\xbb\xbf"
_SHOWN_LETTERS = 80
_CHAT = '{"messages": [{"role": ..., "content": ...}, ...]}'
_TEXT = '{"prompt": text, "completion": text}'
_PAIR = '{"prompt": text or messages, "chosen": text, "rejected": text}'
_ASK = '{"prompt": text or messages, ...}'


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation; what the assistant says is learned."""

    messages: Messages


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text and how it goes on; the completion is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """Two answers to a prompt, of which the first is the better one."""

    prompt: Prompt
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt to be answered, and all that the reward function may look at."""

    prompt: Prompt
    fields: Mapping[str, Any]


class RowFile(Generic[RowT]):
    """The rows of one file; only their places are held in memory."""

    def __init__(self, path: Path, parse: Callable[[Any], RowT]) -> None:
        self.path = path
        self._parse = parse
        self._starts = array("q")
        self._lines = array("q")
        self.digest = self._scan()
        """The SHA-256 of the file's content."""

    def __len__(self) -> int:
        return len(self._starts)

    def take(self, numbers: Iterable[int]) -> list[RowT]:
        """The rows with these numbers, counted from 0, in this order."""
        with _opened(self.path) as file:
            found = []
            for number in numbers:
                file.seek(self._starts[number])
                found.append(self._read(self._lines[number], file.readline()))
        return found

    def place(self, number: int) -> str:
        """Where a row stands, for messages."""
        return f"{self.path}, line {self._lines[number]}"

    def _scan(self) -> str:
        digest = hashlib.sha256()
        start = 0
        with _opened(self.path) as file:
            for line_number, line in enumerate(file, start=1):
                digest.update(line)
                if _content(line, line_number):
                    self._read(line_number, line)
                    self._starts.append(start)
                    self._lines.append(line_number)
                start += len(line)
        if not self._starts:
            raise InvalidInput(f"{self.path} has no rows; expected one JSON object per line")
        return digest.hexdigest()

    def _read(self, line_number: int, line: bytes) -> RowT:
        where = f"{self.path}, line {line_number}"
        try:
            value = msgspec.json.decode(_content(line, line_number))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(
                f"{where} is not JSON ({error}): {_shown(line)}; expected one object per line"
            ) from error
        try:
            return self._parse(value)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error.message}") from None


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}") from error


def _content(line: bytes, line_number: int) -> bytes:
    bare = line.removeprefix(_BOM) if line_number == 1 else line
    return bare.strip()


# --- what a row must look like ------------------------------------------------------------


def parse_sft(value: Any) -> ChatRow | TextRow:
    """A row to learn from: a conversation, or a prompt and its completion."""
    expected = f"{_CHAT} or {_TEXT}"
    row = _mapping(value, expected)
    if "messages" in row:
        messages = _messages("messages", row["messages"], _CHAT)
        if not any(message["role"] == "assistant" for message in messages):
            raise InvalidInput("no message has the role 'assistant', so there is nothing to learn")
        return ChatRow(messages)
    prompt, completion = _text(row, "prompt", expected), _text(row, "completion", expected)
    if not completion:
        raise InvalidInput("completion is empty, so there is nothing to learn")
    return TextRow(prompt, completion)


def parse_preference(value: Any) -> PreferenceRow:
    """A row with two answers to compare."""
    row = _mapping(value, _PAIR)
    prompt = _prompt(row, _PAIR)
    chosen, rejected = (_answer(row, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise InvalidInput(f"chosen and rejected are the same: {_shown(chosen)}")
    return PreferenceRow(prompt, chosen, rejected)


def parse_prompt(value: Any) -> PromptRow:
    """A row to be answered and rewarded."""
    row = _mapping(value, _ASK)
    return PromptRow(_prompt(row, _ASK), row)


def _mapping(value: Any, expected: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"found {_shown(value)}; expected {expected}")
    return value


def _text(row: Mapping[str, Any], name: str, expected: str) -> str:
    if name not in row:
        raise InvalidInput(f"there is no {name!r} among {_keys(row)}; expected {expected}")
    if not isinstance(row[name], str):
        raise InvalidInput(f"{name} is {_shown(row[name])}; expected text")
    return str(row[name])


def _prompt(row: Mapping[str, Any], expected: str) -> Prompt:
    if isinstance(row.get("prompt"), list):
        return _messages("prompt", row["prompt"], expected)
    prompt = _text(row, "prompt", expected)
    if not prompt:
        raise InvalidInput("prompt is empty; expected text or messages")
    return prompt


def _answer(row: Mapping[str, Any], name: str) -> str:
    """An answer as text; a list of one assistant message is taken too, as many data sets have."""
    given = row.get(name)
    if isinstance(given, list) and len(given) == 1:
        given = _messages(name, given, _PAIR)[0].get("content")
    if name in row and not isinstance(given, str):
        raise InvalidInput(f"{name} is {_shown(row[name])}; expected text")
    answer = given if isinstance(given, str) else _text(row, name, _PAIR)
    if not answer:
        raise InvalidInput(f"{name} is empty; expected an answer")
    return answer


def _messages(name: str, given: Any, expected: str) -> Messages:
    if not isinstance(given, list) or not given:
        raise InvalidInput(f"{name} is {_shown(given)}; expected {expected}")
    for index, message in enumerate(given):
        where = f"{name}[{index}]"
        if not isinstance(message, dict):
            raise InvalidInput(f"{where} is {_shown(message)}; expected a role and a content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidInput(f"{where} has no role such as 'user' or 'assistant'")
        has_calls = content is None and bool(message.get("tool_calls"))
        if not has_calls and not isinstance(content, str | list):
            raise InvalidInput(f"{where} has the content {_shown(content)}; expected text")
    return tuple(given)


def _keys(row: Mapping[str, Any]) -> str:
    return _shown(", ".join(row)) if row else "nothing"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}..."
