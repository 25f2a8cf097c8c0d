"""How a failure is spelled on the wire, read and written in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tinkex.errors import RequestErrorCategory


class Fault(NamedTuple):
    """What a body says about a failure."""

    message: str
    category: RequestErrorCategory | None


def read_fault(body: object) -> Fault | None:
    """Find the message and category in a JSON body of any known dialect, or None."""
    if isinstance(body, str) and body.strip():
        return Fault(body.strip(), None)
    if not isinstance(body, Mapping):
        return None
    message = body.get("error") or body.get("detail") or body.get("message")
    if message is None:
        return None
    raw = body.get("category")
    category = RequestErrorCategory.parse(raw) if raw is not None else None
    return Fault(_text(message), category)


def write_fault(message: str, category: RequestErrorCategory) -> dict[str, str]:
    """The body of a failed request: the error, and whose fault it is."""
    return {"error": message, "detail": message, "category": str(category)}


def _text(message: Any) -> str:
    if isinstance(message, Mapping):
        inner = message.get("message") or message.get("detail")
        return str(inner) if inner else str(dict(message))
    if isinstance(message, list):
        return "; ".join(_text(part) for part in message)
    return str(message)
