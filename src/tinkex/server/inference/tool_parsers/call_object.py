"""Parses a call that is written as a JSON object with a name and arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto

from tinkex.server.inference.tool_parsers.call_parts import CallWriter
from tinkex.server.inference.tool_parsers.json_scanner import JsonScanner, read_json, write_json

_STRING = r'"((?:[^"\\]|\\.){0,256})"'
#: The beginning of a call up to its arguments, which are an object or a list.
_HEAD = re.compile(
    rf'\{{\s{{0,64}}"name"\s{{0,64}}:\s{{0,64}}{_STRING}\s{{0,64}},\s{{0,64}}'
    r'"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=[{\[])'
)
_FIRST_KEY = re.compile(rf"\{{\s{{0,64}}{_STRING}")
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})
#: The beginning of a call is found within this many characters.
_MAX_HEAD_CHARS = 1024


class _State(Enum):
    HEAD = auto()  #: before the arguments, which are not written yet
    ARGUMENTS = auto()  #: the arguments are written as they arrive
    TAIL = auto()  #: after the arguments


class CallObject:
    """One object; its arguments are written as soon as its name is known.

    Other objects are buffered until they end, because their name may come last.
    """

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._state = _State.HEAD
        self._buffer: list[str] = []
        self._head = ""
        self._object_scanner = JsonScanner()
        self._arguments_scanner = JsonScanner()
        self.raw: str | None = None
        """The text of the object if it is not a call; None if it is one or is incomplete."""

    def feed(self, text: str) -> str | None:
        """Add a piece, which begins with the object; returns the rest after it, else None.

        If `raw` is then set, the object was not a call.
        """
        if self._state is _State.HEAD:
            return self._feed_head(text)
        if self._state is _State.ARGUMENTS:
            return self._feed_arguments(text)
        return self._feed_tail(text)

    def finish(self) -> str:
        """End the answer; returns text that is not a call. Arguments may be incomplete."""
        if self._state is _State.TAIL:
            # Only closing brackets are missing.
            self._writer.end_call()
        return "".join(self._buffer)

    def _feed_head(self, text: str) -> str | None:
        before = len(self._head)
        if before < _MAX_HEAD_CHARS:
            self._head = (self._head + text)[:_MAX_HEAD_CHARS]
            if head := _HEAD.match(self._head):
                return self._start_call(head, text[head.end() - before :])
            first_key = _FIRST_KEY.match(self._head)
            if first_key and first_key[1] not in _CALL_KEYS:
                return self._refuse(first_key, text[first_key.end() - before :])
        self._buffer.append(text)
        end = self._object_scanner.feed(text)
        if end is None:
            return None
        whole = "".join(self._buffer)
        rest = text[end:]
        self._buffer = []
        self._read_whole(whole[: len(whole) - len(rest)])
        return rest

    def _start_call(self, head: re.Match[str], rest: str) -> str | None:
        name = _unquote(head[1])
        if name is None or not self._writer.is_offered(name):
            return self._refuse(head, rest)
        self._buffer = []
        self._writer.start_call(name)
        self._state = _State.ARGUMENTS
        return self._feed_arguments(rest)

    def _refuse(self, head: re.Match[str], rest: str) -> str:
        """End after the head, because the object is not a call."""
        self.raw = head[0]
        self._buffer = []
        return rest

    def _feed_arguments(self, text: str) -> str | None:
        end = self._arguments_scanner.feed(text)
        if end is None:
            self._writer.add_arguments(text)
            return None
        self._writer.add_arguments(text[:end])
        self._state = _State.TAIL
        self._object_scanner = JsonScanner()
        self._object_scanner.feed("{")
        return self._feed_tail(text[end:])

    def _feed_tail(self, text: str) -> str | None:
        end = self._object_scanner.feed(text)
        if end is None:
            return None
        self._writer.end_call()
        return text[end:]

    def _read_whole(self, whole: str) -> None:
        """Write a complete object as a call, or set `raw`."""
        call = read_call(whole)
        if call is None or not self._writer.is_offered(call[0]):
            self.raw = whole
        else:
            self._writer.add_call(*call)


def read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call; None if the text is not a call."""
    try:
        value = read_json(text)
    except ValueError:
        return None
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        # Some models write the arguments as a string that contains JSON.
        return value["name"], arguments
    return value["name"], write_json({} if arguments is None else arguments)


def _unquote(content: str) -> str | None:
    """Return the text of a JSON string without its quotes."""
    try:
        return str(read_json(f'"{content}"'))
    except ValueError:
        return None
