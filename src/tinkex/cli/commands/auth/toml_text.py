"""Changing a TOML text by hand: what is not asked for stays, comments and order included."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from tinkex.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def set_toml_values(text: str, table: tuple[str, ...], values: Mapping[str, str | None]) -> str:
    """The text with these values in a table, () for the top; None takes a value away.

    A text that is written in a way that cannot be changed line by line is refused.
    """
    before = tomllib.loads(text)
    lines = _TomlLines(text)
    for key, value in values.items():
        lines.set_value(table, key, value)
    changed = lines.text()
    try:
        found = tomllib.loads(changed)
    except tomllib.TOMLDecodeError:
        found = {}
    if found != _apply_values(before, table, values):
        name = ".".join(table) or "the top"
        raise ConfigError(f"{name} is written in a way that cannot be changed automatically")
    return changed


def _apply_values(
    before: Mapping[str, Any], table: tuple[str, ...], values: Mapping[str, str | None]
) -> dict[str, Any]:
    found = copy.deepcopy(dict(before))
    place = found
    for part in table:
        place = place.setdefault(part, {})
    for key, value in values.items():
        place.pop(key, None)
        if value is not None:
            place[key] = value
    return found


class _TomlLines:
    """A text as lines."""

    def __init__(self, text: str) -> None:
        self._end = "\r\n" if "\r\n" in text else "\n"
        # Not splitlines(), which knows line breaks that TOML does not.
        self._lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
        if not text:
            self._lines = []

    def text(self) -> str:
        return self._end.join([*self._lines, ""]) if self._lines else ""

    def set_value(self, table: tuple[str, ...], key: str, value: str | None) -> None:
        """Set a value, or take it away."""
        begin, end = self._table_bounds(table)
        if begin is None:
            if value is None:
                return
            self._lines += ["", _format_header(table)] if self._lines else [_format_header(table)]
            begin = end = len(self._lines)
        place = next((i for i in range(begin, end) if _parse_key(self._lines[i]) == key), None)
        if place is not None:
            comment = _trailing_comment(self._lines[place])
            self._lines[place : place + 1] = (
                [] if value is None else [_format_pair(key, value) + comment]
            )
        elif value is not None:
            self._insert_row(begin, end, _format_pair(key, value), is_top=not table)

    def _insert_row(self, begin: int, end: int, row: str, *, is_top: bool) -> None:
        rows = self._lines[begin:end]
        keys = [i for i, line in enumerate(rows) if _parse_key(line) is not None]
        if keys or not is_top:
            self._lines.insert(begin + (keys[-1] + 1 if keys else 0), row)
            return
        # Between what stands above the first table and the comment that belongs to it.
        blank = max((i for i, line in enumerate(rows) if not line.strip()), default=len(rows) - 1)
        place = begin + blank + 1 if end < len(self._lines) else end
        self._lines[place:place] = [row, ""] if end < len(self._lines) else [row]

    def _table_bounds(self, table: tuple[str, ...]) -> tuple[int | None, int]:
        """The lines of a table without its header; None where it begins if it is not there."""
        headers = [i for i, line in enumerate(self._lines) if line.lstrip().startswith("[")]
        if not table:
            return 0, headers[0] if headers else len(self._lines)
        for i, place in enumerate(headers):
            if _is_header(self._lines[place], table):
                after = headers[i + 1] if i + 1 < len(headers) else len(self._lines)
                return place + 1, after
        return None, 0


def _format_header(table: tuple[str, ...]) -> str:
    return f"[{'.'.join(_format_key(part) for part in table)}]"


def _format_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quote(key)


def _format_pair(key: str, value: str) -> str:
    return f"{_format_key(key)} = {_quote(value)}"


def _quote(text: str) -> str:
    # A text of JSON is one of TOML too, but for one letter.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _is_header(line: str, table: tuple[str, ...]) -> bool:
    found = _parse_line(line)
    for part in table:
        if not isinstance(found, dict) or list(found) != [part]:
            return False
        found = found[part]
    return found == {}


def _parse_key(line: str) -> str | None:
    found = _parse_line(line)
    return next(iter(found)) if found and not line.lstrip().startswith("[") else None


def _trailing_comment(line: str) -> str:
    for i, letter in enumerate(line):
        if letter == "#" and _parse_line(line[:i]) is not None:
            return "  " + line[i:]
    return ""


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return None
