"""What a request may say: numbers, names and free-form values within bounds, or 422."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinkex.errors import UnprocessableEntityError
from tinkex.ids import check_id
from tinkex.server.call import RequestContext
from tinkex.wire.codec import encode_json

#: The largest number that both databases keep.
MAX_INT64 = 2**63 - 1
MAX_PROJECT_CHARS = 255
#: Of a name or version that people read.
MAX_LABEL_CHARS = 1024
MAX_TAGS_BYTES = 16 * 1024


def check_number(
    name: str, value: int | None, minimum: int = 0, maximum: int = MAX_INT64
) -> int | None:
    """A number within bounds, or None if none was given."""
    if value is not None and not minimum <= value <= maximum:
        raise UnprocessableEntityError(f"{name} is {value}; expected {minimum} to {maximum}")
    return value


def check_label(name: str, text: str | None) -> str | None:
    """A short text that people read."""
    if text is not None:
        check_number(f"the length of {name}", len(text), maximum=MAX_LABEL_CHARS)
    return text


def check_tags(tags: Sequence[str]) -> list[str]:
    """What a user finds sessions by, if it is not too much."""
    check_number("the size of tags in bytes", len(encode_json(tags)), maximum=MAX_TAGS_BYTES)
    return list(tags)


def check_project(project_id: str) -> str:
    """A project's name, which must be one that lists can be asked for by."""
    check_id("project id", project_id)
    check_number("the length of project_id", len(project_id), maximum=MAX_PROJECT_CHARS)
    return project_id


def parse_page(context: RequestContext[Any], default_limit: int) -> tuple[int, int]:
    """The limit and offset that a list was asked for; the query is checked by now."""
    return int(context.query.get("limit", default_limit)), int(context.query.get("offset", 0))
