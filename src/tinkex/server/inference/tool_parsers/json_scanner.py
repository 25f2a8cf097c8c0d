"""Finds the end of a JSON value in a text that arrives in pieces, and reads values."""

from __future__ import annotations

import json
import re

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]]")


def read_json(text: str) -> object:
    """Return the value of a JSON text; raises ValueError if it is not valid."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def write_json(value: object) -> str:
    """Return a value as JSON text."""
    return json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class JsonScanner:
    """Scans one value by its strings and brackets; its syntax is not checked otherwise."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._is_scalar = False
        self._is_started = False

    def feed(self, text: str) -> int | None:
        """Add a piece; returns the number of characters up to the end of the value, else None.

        A number or literal ends before the character after it. The text must begin with the value.
        """
        if not text:
            return None
        if not self._is_started:
            self._is_started = True
            self._is_scalar = text[0] not in '"{['
        if self._is_scalar:
            end = _SCALAR_END.search(text)
            return end.start() if end else None
        return self._scan(text)

    def _scan(self, text: str) -> int | None:
        position = 0
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            found = (_IN_STRING if self._is_in_string else _STRUCTURE).search(text, position)
            if found is None:
                return None
            position = found.end()
            if self._take(found[0]):
                return position
        return None

    def _take(self, character: str) -> bool:
        """Handle a quote, bracket or backslash; returns whether it ends the value."""
        if character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = not self._is_in_string
            return not self._is_in_string and self._depth == 0
        else:
            self._depth += 1 if character in "{[" else -1
            return self._depth <= 0
        return False
