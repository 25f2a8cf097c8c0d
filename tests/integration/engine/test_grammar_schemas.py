"""JSON schemas are checked before a request is queued, within limits of time and memory."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tinkex.engine import grammar_schemas
from tinkex.engine.grammar_schemas import SchemaNotChecked, build_grammar
from tinkex.errors import InvalidInput


def _nested(depth: int) -> Any:
    schema: Any = {"type": "integer", "minimum": 0}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


#: Each string would have to match all of them, which takes hours to find impossible.
HOSTILE = {
    "allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{n}}}c*$"} for n in range(1, 60)]
}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}}},
        {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}},
        _nested(50),
    ],
)
def test_usable_schema_gives_a_grammar(schema: Mapping[str, Any]) -> None:
    [grammar] = json.loads(build_grammar(schema))["grammars"]
    assert grammar["json_schema"].items() >= (schema or {"type": "object"}).items()


def test_integers_without_limits_are_bounded() -> None:
    literal = {"type": "integer"}
    schema = {"anyOf": [{"items": literal}, {"type": "integer", "minimum": 3}, {"const": literal}]}
    [grammar] = json.loads(build_grammar(schema))["grammars"]
    bounded, *others = grammar["json_schema"]["anyOf"]
    assert bounded["items"] == literal | {"minimum": 1 - 10**15, "maximum": 10**15 - 1}
    assert others == schema["anyOf"][1:]


def test_schema_of_many_integers_is_used_as_it_is() -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1500)}}
    [grammar] = json.loads(build_grammar(schema))["grammars"]
    assert grammar["json_schema"].items() >= schema.items()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "https://example.com/schema"}, "does not fetch resources"),
        ({"enum": ["x" * 70_000]}, "expected at most 65536"),
        (_nested(5000), "nested more than 64 levels"),
        ({"x": [[[]] * 1000] * 1000}, "bytes; expected at most 65536"),
    ],
)
def test_unusable_schema_is_refused(schema: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        build_grammar(schema)


def test_schema_that_takes_too_long_is_refused() -> None:
    with pytest.raises(InvalidInput, match="it is too complex"):
        build_grammar(HOSTILE)
    # The answer is remembered.
    started = time.monotonic()
    with pytest.raises(InvalidInput, match="it is too complex"):
        build_grammar(HOSTILE)
    assert time.monotonic() - started < 1.0


def test_busy_machine_does_not_condemn_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "title": "checked on a busy machine"}
    monkeypatch.setattr(grammar_schemas, "CHECK_SECONDS", 0.0)
    with pytest.raises(SchemaNotChecked, match="try again"):
        build_grammar(schema)
    monkeypatch.undo()
    assert build_grammar(schema)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_schemas, "missing_libraries", lambda *_: ["llguidance"])
    assert not grammar_schemas.is_available()
    with pytest.raises(InvalidInput, match=r"not installed on this server.*structured"):
        build_grammar({})
