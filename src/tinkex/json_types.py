"""Types of decoded JSON, for annotations.

msgspec cannot resolve recursive aliases: annotate the fields of a Struct with `object`.
"""

from __future__ import annotations

from typing import TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = "dict[str, JsonValue]"
