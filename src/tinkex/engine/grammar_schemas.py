"""Grammars of JSON schemas: built and checked where a request arrives, applied by the engine.

A grammar is a text for llguidance, in `InferenceParams.grammar`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from tinkex.errors import InternalServerError, InvalidInput
from tinkex.installation import install_command, missing_libraries

#: Limits of a schema.
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
#: The largest integer of a schema that does not limit it; all JSON parsers read it exactly.
MAX_INTEGER = 10**15 - 1
#: Limits of the check of a schema.
CHECK_CPU_SECONDS = 2
CHECK_SECONDS = 15.0
CHECK_BYTES = 1 << 30
RETRY_SECONDS = 2.0
#: Schemas whose check is remembered.
MAX_CHECKED = 256

#: Keywords whose values are JSON and not schemas.
_LITERALS = frozenset({"const", "default", "enum", "examples"})
_NUMBER_LIMITS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum"}
)
_CHECK_FILE = Path(__file__).with_name("grammar_check.py")
#: At most one space between values: small models would fill the answer with white space, which is
#: valid anywhere in a document. `oneOf` is applied like `anyOf`.
_OPTIONS = {"whitespace_pattern": r"\x20?", "coerce_one_of": True}


class SchemaNotChecked(InternalServerError):
    """HTTP 503: the machine is too busy to check a schema."""

    status_code = 503


def is_available() -> bool:
    """Whether the library for grammars is installed."""
    return not missing_libraries("structured")


def build_grammar(schema: Mapping[str, object]) -> str:
    """Return the grammar of a JSON schema; an empty one means any JSON object.

    Raises InvalidInput if the schema is invalid, too large, or takes too long. Blocks while a new
    schema is checked.
    """
    if not is_available():
        raise InvalidInput(
            "structured output is not installed on this server; the operator can add it with "
            f"`{install_command('structured')}`"
        )
    _check_depth(schema)
    num_bytes = len(msgspec.json.encode(schema))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidInput(
            f"the JSON schema has {num_bytes} bytes; expected at most {MAX_SCHEMA_BYTES}"
        )
    given = dict(schema or {"type": "object"})
    bounded, reason = _bound_integers(given), ""
    # Limits make a grammar larger: without them, it may be small enough.
    for document in [bounded] if bounded == given else [bounded, given]:
        grammar = _encode_grammar(document)
        reason = _check_grammar(grammar)
        if not reason:
            return grammar
    raise InvalidInput(f"the JSON schema cannot be used: {reason}")


def _encode_grammar(schema: Mapping[str, object]) -> str:
    document = {**schema, "x-guidance": _OPTIONS}
    return msgspec.json.encode({"grammars": [{"json_schema": document}]}).decode()


def _check_depth(schema: object) -> None:
    level: list[object] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        parts = [part.values() if isinstance(part, Mapping) else part for part in level]
        level = [
            child
            for part in parts
            if not isinstance(part, str)
            for child in part  # type: ignore[attr-defined]
            if isinstance(child, Mapping | list | tuple)
        ]
        if not level:
            return
    raise InvalidInput(f"the JSON schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _bound_integers(schema: Mapping[str, object]) -> dict[str, object]:
    """Limit integers that have no limits: a small model may repeat a digit for ever."""
    bounded = {
        name: value if name in _LITERALS else _bound_children(value)
        for name, value in schema.items()
    }
    if schema.get("type") == "integer" and schema.keys().isdisjoint(_NUMBER_LIMITS):
        bounded |= {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
    return bounded


def _bound_children(value: object) -> object:
    if isinstance(value, Mapping):
        return _bound_integers(value)
    if isinstance(value, list):
        return [_bound_children(child) for child in value]
    return value


@lru_cache(MAX_CHECKED)
def _check_grammar(grammar: str) -> str:
    """Return why a grammar cannot be used; empty if it can. Errors are not remembered."""
    command = [sys.executable, "-P", str(_CHECK_FILE), str(CHECK_CPU_SECONDS), str(CHECK_BYTES)]
    try:
        checked = subprocess.run(
            command,
            input=grammar.encode(),
            capture_output=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # The limit of CPU time was not reached, so that the machine is busy.
        raise SchemaNotChecked(
            "the JSON schema could not be checked in time; try again",
            retry_after_seconds=RETRY_SECONDS,
        ) from None
    if checked.returncode:
        return "it is too complex"
    return " ".join(checked.stdout.decode(errors="replace").split())[:500]
