"""Converts the text of a parameter to JSON by the types that its schema allows."""

from __future__ import annotations

from collections.abc import Mapping

from tinkex.server.inference.tool_parsers.json_scanner import read_json, write_json

_TYPE_NAMES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
_STRING = frozenset({"string"})


def parameter_types(schema: Mapping[str, object], name: str) -> frozenset[str]:
    """Return the types that a schema allows for a parameter; text if it does not say."""
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    return (_types_of(own) if isinstance(own, Mapping) else frozenset()) or _STRING


def _types_of(schema: Mapping[str, object]) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(map(str, kind))
    choices = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(choices, list):
        return frozenset()
    parts = [_types_of(part) for part in choices if isinstance(part, Mapping)]
    return frozenset().union(*parts)


class ParameterValue:
    """One value; text is converted while it arrives, other types at their end.

    A newline at the beginning and one at the end are part of the format.
    """

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._is_text = types == _STRING
        self._is_started = False
        self._held: list[str] = []

    def feed(self, text: str) -> str:
        """Add a piece; returns the next part of the value as JSON."""
        if not text:
            return ""
        opening = ""
        if not self._is_started:
            self._is_started = True
            text = text.removeprefix("\n")
            opening = '"' if self._is_text else ""
        if not self._is_text:
            self._held.append(text)
            return ""
        if not text:
            return opening
        text = "".join([*self._held, text])
        shown = text.removesuffix("\n")
        self._held = [text[len(shown) :]]
        return opening + _escape(shown)

    def finish(self) -> str:
        """Return the rest of the value as JSON."""
        if self._is_text:
            return '"' if self._is_started else '""'
        return write_json(_convert("".join(self._held).removesuffix("\n"), self._types))


def _escape(text: str) -> str:
    return write_json(text)[1:-1]


def _convert(text: str, types: frozenset[str]) -> object:
    """Return the value of a text; text that is not of an allowed type stays text."""
    stripped = text.strip()
    literals = {"True": True, "False": False, "None": None}
    try:
        value = literals[stripped] if stripped in literals else read_json(stripped)
    except ValueError:
        return text
    name = _TYPE_NAMES.get(type(value), "string")
    if name in types or (name == "integer" and "number" in types):
        return value
    return text
