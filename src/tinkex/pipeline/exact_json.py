"""JSON that gives back exactly what was written, or refuses to write it."""

from __future__ import annotations

import json
import math
from typing import Any

from tinkex.errors import InvalidInput

_JSON_HINT = "Save numbers, text, true, false, null, lists, and dictionaries whose keys are text."


def encode_lossless_json(value: dict[str, Any], label: str) -> bytes:
    """A dictionary as JSON; InvalidInput names the first value that reading would change."""
    try:
        _check_json_value(value, label)
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return f"{text}\n".encode()
    except RecursionError:
        raise InvalidInput(
            f"{label} is nested too deeply, or contains itself", hint=_JSON_HINT
        ) from None
    except UnicodeEncodeError:
        raise InvalidInput(f"{label} has text that is not valid Unicode", hint=_JSON_HINT) from None


def _check_json_value(value: Any, location: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidInput(
                    f"{location} has the key {key!r}, which is not text", hint=_JSON_HINT
                )
            _check_json_value(item, f"{location}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json_value(item, f"{location}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(f"{location} is {value}, which JSON cannot hold", hint=_JSON_HINT)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise InvalidInput(
            f"{location} is of type {type(value).__name__}, which JSON cannot hold", hint=_JSON_HINT
        )


def to_readable_json(value: Any) -> Any:
    """A value for people to read: what JSON does not know becomes text."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)
