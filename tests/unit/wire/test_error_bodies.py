"""Error bodies are parsed in every dialect and written in one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.errors import RequestErrorCategory
from tinkex.wire.results import ErrorBody, make_error_body, parse_error_body

User, Server, Unknown = (
    RequestErrorCategory.User,
    RequestErrorCategory.Server,
    RequestErrorCategory.Unknown,
)


@pytest.mark.parametrize(
    ("body", "message", "category"),
    [
        ({"error": "boom", "category": "user"}, "boom", User),
        ({"error": "boom", "category": "SERVER"}, "boom", Server),
        ({"error": "boom", "category": "weird"}, "boom", Unknown),
        ({"error": "boom"}, "boom", None),
        ({"error": "boom", "category": None}, "boom", None),
        ({"detail": "not found"}, "not found", None),
        ({"message": "no", "category": "user"}, "no", User),
        ({"error": "first", "detail": "second"}, "first", None),
        ({"error": None, "detail": "second"}, "second", None),
        ({"error": {"message": "inner", "type": "x"}}, "inner", None),
        ({"error": {"code": 7}}, "{'code': 7}", None),
        ({"detail": ["one", {"message": "two"}]}, "one; two", None),
        ("plain text\n", "plain text", None),
    ],
)
def test_every_dialect_is_parsed(
    body: Any, message: str, category: RequestErrorCategory | None
) -> None:
    assert parse_error_body(body) == ErrorBody(message, category)


@pytest.mark.parametrize("body", [None, {}, [], "", "  ", 5, {"path": "x"}, {"category": "user"}])
def test_bodies_without_error_are_not_parsed(body: Any) -> None:
    assert parse_error_body(body) is None


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
KEYS = st.sampled_from(["error", "detail", "message", "category", "other"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(VALUES)
def test_parsing_never_raises(body: Any) -> None:
    fault = parse_error_body(body)
    assert fault is None or isinstance(fault.message, str)


@pytest.mark.parametrize("category", list(RequestErrorCategory))
def test_error_body_round_trip(category: RequestErrorCategory) -> None:
    body = make_error_body("no such model", category)
    assert parse_error_body(body) == ErrorBody("no such model", category)
    # `detail` is what REST callers of the official package show.
    assert body["detail"] == "no such model"
    assert body["category"] in {"user", "server", "unknown"}
