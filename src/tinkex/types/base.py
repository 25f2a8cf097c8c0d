"""The ground every value stands on: frozen structs that refuse bad input in one sentence.

Python construction goes through `ValueMeta.__call__`, which checks names and types; decoding
from the network happens in C and does not, except for `__post_init__`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, dataclass_transform

import msgspec

from tinkex.errors import InvalidInput
from tinkex.types.refusals import explain_mismatch, explain_unknown


def encode_hook(value: Any) -> Any:
    """Turn a value msgspec does not know into builtins; give this to every encoder."""
    to_wire = getattr(value, "to_wire", None) or getattr(value, "tolist", None)
    if to_wire is None:
        raise NotImplementedError(f"{type(value).__name__} has no form on the wire")
    return to_wire()


def decode_hook(type_: Any, data: Any) -> Any:
    """Build a value msgspec does not know from builtins; give this to every decoder."""
    if isinstance(data, type_):
        return data
    from_wire = getattr(type_, "from_wire", None)
    if from_wire is None:
        raise NotImplementedError(f"{type_.__name__} cannot be read from the wire")
    return from_wire(data)


_LEARNED: set[Any] = set()
#: Reentrant: to learn a type runs its module's code, which may come back here.
_LEARNING = threading.RLock()
_TypeT = TypeVar("_TypeT")


def learned(type_: _TypeT) -> _TypeT:
    """The type itself, ready to be read by any thread; ask before msgspec reads into it.

    msgspec learns a type when it first reads one. A thread that comes by meanwhile finds it half
    learned, and the process crashes.
    """
    if type_ not in _LEARNED:
        with _LEARNING:
            # The lock is held until all of it is known, the types inside included.
            msgspec.json.Decoder(type_, dec_hook=decode_hook)
            _LEARNED.add(type_)
    return type_


class ValueMeta(msgspec.StructMeta):
    """Makes constructors keyword-only, checked, and helpful when they refuse."""

    __accepted__: frozenset[str]

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: Any, **config: Any) -> Any:
        """Create the class; msgspec does not inherit `kw_only`, so it is repeated here."""
        config.setdefault("kw_only", True)
        cls = super().__new__(mcls, name, bases, namespace, **config)
        aliases: tuple[str, ...] = namespace.get("__aliases__", ())
        tag_field = cls.__struct_config__.tag_field
        cls.__accepted__ = frozenset((*cls.__struct_fields__, *aliases, tag_field or "")) - {""}
        return cls

    # Checkers see the constructor that dataclass_transform derives from the fields.
    if not TYPE_CHECKING:

        def __call__(cls, *args, **fields):
            """Build a checked value from keywords."""
            if args:
                raise InvalidInput(f"{cls.__name__} takes keywords only, got {args[0]!r}")
            if not fields.keys() <= cls.__accepted__:
                raise InvalidInput(explain_unknown(cls, fields))
            return cls._build(cls._prepare(fields))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, metaclass=ValueMeta, frozen=True):
    """A frozen record with the conveniences that scripts expect of a model."""

    @classmethod
    def _prepare(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Rewrite constructor keywords before they are checked; the default changes nothing."""
        return fields

    @classmethod
    def _build(cls, fields: Mapping[str, Any]) -> Self:
        try:
            return msgspec.convert(fields, learned(cls), dec_hook=decode_hook)
        except msgspec.ValidationError as error:
            first = error
        # Only now look for numpy scalars, ranges and the like: the common road stays in C.
        plain = {name: to_plain(value) for name, value in fields.items()}
        try:
            return msgspec.convert(plain, cls, dec_hook=decode_hook)
        except msgspec.ValidationError as error:
            cause = first.__cause__ or error.__cause__
            if isinstance(cause, InvalidInput):
                raise cause from None
            raise InvalidInput(cls._refusal(plain, str(error))) from None

    @classmethod
    def _refusal(cls, fields: Mapping[str, Any], problem: str) -> str:
        """The sentence for input that does not fit the field types."""
        return explain_mismatch(cls, fields, problem)

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Read a mapping (unknown keys are ignored), or return an instance as it is."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise InvalidInput(f"{cls.__name__} is read from a mapping, got {obj!r:.80}")
        return cls._build(cls._prepare({str(name): value for name, value in obj.items()}))

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Read JSON text."""
        try:
            obj = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"{cls.__name__} got no JSON: {error}; {text!r:.80}") from None
        return cls.model_validate(obj)

    def model_dump(
        self, *, mode: Literal["python", "json"] = "python", exclude_none: bool = False
    ) -> dict[str, Any]:
        """A dict of builtins; `python` keeps datetimes, `json` writes them as text."""
        kept: tuple[Any, ...] = _PYTHON_TYPES if mode == "python" else ()
        dumped = msgspec.to_builtins(self, builtin_types=kept, enc_hook=encode_hook)
        return _without_none(dumped) if exclude_none else dumped  # type: ignore[no-any-return]

    def model_dump_json(self, *, indent: int | None = None) -> str:
        """JSON text, on one line unless `indent` is given."""
        data = msgspec.json.encode(self, enc_hook=encode_hook)
        if indent is not None:
            data = msgspec.json.format(data, indent=indent)
        return data.decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """The same value with some fields changed; the changes are checked."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return type(self)(**{**fields, **(update or {})})


class Message(Value):
    """Something a client asks; a misspelled field is refused when it is built."""


class Reply(Value):
    """Something a server answers; fields this version does not know are ignored."""


_PYTHON_TYPES = (datetime,)


def to_plain(value: Any) -> Any:
    """Builtins for look-alikes: numpy scalars and arrays, ranges, subclasses of str and int."""
    if isinstance(value, bool | None) or hasattr(value, "to_wire"):
        return value
    for exact in (str, int, float):
        if isinstance(value, exact):
            return exact(value)
    if isinstance(value, list | tuple | range):
        return [to_plain(item) for item in value]
    if type(value) is dict:
        return {key: to_plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "dtype") or hasattr(value, "typecode") else value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
