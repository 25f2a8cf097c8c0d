"""Results as JSON that every reader takes: ISO times with an offset, no NaN, nothing unknown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, date, datetime
from enum import Enum
from pathlib import PurePath
from typing import Any


def to_json(value: Any, *, is_ascii: bool = False) -> str:
    """A value as indented JSON."""
    return json.dumps(to_jsonable(value), indent=2, ensure_ascii=is_ascii, allow_nan=False)


def to_jsonable(value: Any) -> Any:
    """A value made of what JSON has."""
    if isinstance(value, Enum):
        return to_jsonable(value.value)
    if value is None or isinstance(value, str | int | float):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in value]
    return _object_to_jsonable(value)


def _object_to_jsonable(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, PurePath):
        return str(value)
    for name in ("model_dump", "to_dict", "tolist"):
        if hasattr(value, name):
            return to_jsonable(getattr(value, name)())
    raise TypeError(f"{type(value).__name__} has no form in JSON")
