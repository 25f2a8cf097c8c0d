"""JSON that gives back exactly what was written, or refuses to write it."""

from __future__ import annotations

import json
import math
from typing import Any

from tinkex.errors import InvalidInput

_HINT = "Save numbers, text, true, false, null, lists, and dictionaries whose keys are text."


def encode_exact(value: dict[str, Any], name: str) -> bytes:
    """A dictionary as JSON; InvalidInput names the first value that reading would change."""
    try:
        _check(value, name)
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return f"{text}\n".encode()
    except RecursionError:
        raise InvalidInput(f"{name} is nested too deeply, or contains itself", hint=_HINT) from None
    except UnicodeEncodeError:
        raise InvalidInput(f"{name} has text that is not valid Unicode", hint=_HINT) from None


def _check(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidInput(f"{place} has the key {key!r}, which is not text", hint=_HINT)
            _check(item, f"{place}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{place}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(f"{place} is {value}, which JSON cannot hold", hint=_HINT)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise InvalidInput(
            f"{place} is of type {type(value).__name__}, which JSON cannot hold", hint=_HINT
        )


def readable(value: Any) -> Any:
    """A value for people to read: what JSON does not know becomes text."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)
