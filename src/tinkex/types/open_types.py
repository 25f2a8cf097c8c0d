"""Forward compatibility: unions with unknown members, and records with unknown fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, Self

import msgspec

from tinkex.errors import InvalidInput
from tinkex.types.base import decode_hook, explain_value, preload_type


class _OpenUnionMeta(type):
    """Makes msgspec accept the result of the stand-in's `from_wire`."""

    def __instancecheck__(cls, value: object) -> bool:
        return value is None or isinstance(value, msgspec.Struct | OpenRecord)


def open_union(name: str, union: object, unknown: Callable[[Mapping[str, object]], object]) -> type:
    """Return a field type like `union` that passes unknown members to `unknown`.

    msgspec rejects a whole response because of one unknown tag; here `unknown` returns the value of
    the field instead, or NotImplemented to keep the error. `name` names the object in the error.
    """

    def from_wire(data: object) -> object:
        try:
            return msgspec.convert(data, preload_type(union), dec_hook=decode_hook)
        except msgspec.ValidationError as error:
            failure = error
        value = unknown(data) if isinstance(data, Mapping) else NotImplemented
        if value is not NotImplemented:
            return value
        if isinstance(failure.__cause__, InvalidInput):
            raise failure.__cause__
        raise InvalidInput(explain_value(name, data, str(failure)))

    return _OpenUnionMeta("OpenUnion", (), {"from_wire": staticmethod(from_wire), "union": union})


def ignore_unknown(_: Mapping[str, object]) -> None:
    """Decode unknown members as None."""


class OpenRecord:
    """A frozen record with a `type` and arbitrary other fields."""

    __slots__ = ("_fields",)

    _fields: dict[str, object]

    def __init__(self, /, *, type: str, **extra: object) -> None:
        if not isinstance(type, str) or not type:
            raise InvalidInput(f"{self.__class__.__name__}.type is {type!r}; expected a name")
        object.__setattr__(self, "_fields", {"type": type, **extra})

    @classmethod
    def from_wire(cls, data: object) -> Self:
        """Build a record from its JSON form."""
        if not isinstance(data, Mapping) or "type" not in data:
            raise InvalidInput(f"{cls.__name__} needs an object with a type, got {data!r:.80}")
        return cls(**data)

    def to_wire(self) -> dict[str, object]:
        """Return the JSON form."""
        return dict(self._fields)

    def model_dump(
        self, *, mode: Literal["python", "json"] = "python", exclude_none: bool = False
    ) -> dict[str, Any]:
        """Return a dict of the fields."""
        return {k: v for k, v in self._fields.items() if v is not None or not exclude_none}

    def __getattr__(self, name: str) -> Any:
        # During copying and unpickling, _fields does not exist yet.
        if name == "_fields" or name not in self._fields:
            raise AttributeError(f"{self.__class__.__name__} has no field {name!r}")
        return self._fields[name]

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{self.__class__.__name__} is frozen; cannot set {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpenRecord):
            return NotImplemented
        return self.__class__ is other.__class__ and self._fields == other._fields

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._fields.items())
        return f"{self.__class__.__name__}({fields})"

    def __reduce__(self) -> tuple[object, ...]:
        return (self.__class__.from_wire, (self._fields,))
