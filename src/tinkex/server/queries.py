"""What may stand in query strings: one check and one schema per name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any
from urllib.parse import parse_qsl

from tinkex.errors import UnprocessableEntityError

MAX_LIMIT = 1000
#: What the databases count with.
MAX_OFFSET = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One name that queries may have."""

    schema: Mapping[str, Any]
    """Its JSON schema."""
    says: str
    """What it is for."""

    def problem(self, text: str) -> str | None:
        """What is wrong with a value, or None."""
        return _problem(self.schema, text)


QUERY: Mapping[str, Parameter] = {
    "limit": Parameter(
        schema={"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
        says="How many to list.",
    ),
    "offset": Parameter(
        schema={"type": "integer", "minimum": 0, "maximum": MAX_OFFSET},
        says="How many to leave out at the beginning.",
    ),
    "after": Parameter(
        schema={"type": "integer", "minimum": 0, "maximum": MAX_OFFSET},
        says="List what comes after this cursor; 0 is the beginning.",
    ),
    "base_model": Parameter(
        schema={"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[^\s?#%]+$"},
        says="The base model's name.",
    ),
    "digest": Parameter(
        schema={"type": "string", "minLength": 64, "maxLength": 64, "pattern": r"^[0-9a-f]+$"},
        says="The digest from an answer without files; then the answer has the files.",
    ),
    "access_scope": Parameter(
        schema={"type": "string", "enum": ["owned", "accessible"]},
        says="One's own things, or also those that others published.",
    ),
    "project_id": Parameter(
        schema={"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[\w.:@~+=-]+$"},
        says="Only what belongs to this project.",
    ),
    "search": Parameter(
        schema={"type": "string", "minLength": 1, "maxLength": 120, "pattern": r"^[^\x00-\x1f]+$"},
        says="Only runs whose id begins with this text or whose name contains it.",
    ),
    "event_type": Parameter(
        schema={
            "type": "string",
            "enum": ["all", "checkpoints", "projects", "teams", "organizations"],
        },
        says="Which kind of events to list.",
    ),
    "day": Parameter(schema={"type": "string", "format": "date"}, says="Only events of this day."),
    "starting_on": Parameter(
        schema={"type": "string", "format": "date-time"}, says="The first hour, on the hour."
    ),
    "ending_before": Parameter(
        schema={"type": "string", "format": "date-time"}, says="The hour after the last one."
    ),
}


def read_query(raw: bytes, allowed: frozenset[str]) -> dict[str, str]:
    """The query string taken apart and checked; values stay text."""
    if not raw:
        return {}
    found: dict[str, str] = {}
    for name, text in _pairs(raw):
        if name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise UnprocessableEntityError(f"query name {name[:80]!r} is unknown; known: {known}")
        if name in found:
            raise UnprocessableEntityError(f"query name {name!r} is given twice; give it once")
        problem = QUERY[name].problem(text)
        if problem is not None:
            raise UnprocessableEntityError(f"{name} is {text[:80]!r}; {problem}")
        found[name] = text
    return found


def _pairs(raw: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=64
        )
    except ValueError:
        raise UnprocessableEntityError("the query string cannot be read") from None


def _problem(schema: Mapping[str, Any], text: str) -> str | None:
    if schema["type"] == "integer":
        low, high = schema["minimum"], schema["maximum"]
        if text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high:
            return None
        return f"expected an integer from {low} to {high}"
    if "enum" in schema:
        return None if text in schema["enum"] else f"expected one of {', '.join(schema['enum'])}"
    if schema.get("format") == "date":
        return None if _is_day(text) else "expected a day such as 2026-01-31"
    if schema.get("format") == "date-time":
        return None if _is_time(text) else "expected a time such as 2026-01-31T13:00:00Z"
    return _text_problem(schema, text)


def _text_problem(schema: Mapping[str, Any], text: str) -> str | None:
    low, high = schema["minLength"], schema["maxLength"]
    if not low <= len(text) <= high:
        return f"expected {low} to {high} characters"
    if not re.search(schema["pattern"], text):
        return "it contains a character that it never has"
    return None


def _is_day(text: str) -> bool:
    try:
        return len(text) == len("2026-01-31") and date.fromisoformat(text) is not None
    except ValueError:
        return False


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
