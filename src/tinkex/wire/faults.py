"""How a failure is spelled on the wire, read and written in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tinkex.errors import RequestErrorCategory


class ErrorBody(NamedTuple):
    """What a body says about a failure."""

    message: str
    category: RequestErrorCategory | None


def parse_error_body(body: object) -> ErrorBody | None:
    """Find the message and category in a JSON body of any known dialect, or None."""
    if isinstance(body, str) and body.strip():
        return ErrorBody(body.strip(), None)
    if not isinstance(body, Mapping):
        return None
    said = [body[key] for key in ("error", "detail", "message") if body.get(key) is not None]
    if not said:
        return None
    message = next(filter(None, said), None)
    raw = body.get("category")
    category = RequestErrorCategory.parse(raw) if raw is not None else None
    return ErrorBody(_format_message(message) if message else "no reason was given", category)


def make_error_body(message: str, category: RequestErrorCategory) -> dict[str, str]:
    """The body of a failed request: the error, and whose fault it is."""
    return {"error": message, "detail": message, "category": str(category)}


def _format_message(message: Any) -> str:
    if isinstance(message, Mapping):
        inner = message.get("message") or message.get("detail") or message.get("msg")
        where = ".".join(str(part) for part in message.get("loc") or ())
        text = str(inner) if inner else str(dict(message))
        return f"{where}: {text}" if where else text
    if isinstance(message, list):
        return "; ".join(_format_message(part) for part in message)
    return str(message)
