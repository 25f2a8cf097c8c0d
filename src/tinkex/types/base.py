"""Base classes of values: frozen, validated msgspec structs with pydantic-like methods.

Constructors go through `ValueMeta.__call__`, which checks names and types. Decoding from the
network happens in C and skips it, except for `__post_init__`.
"""

from __future__ import annotations

import copy
import difflib
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from tinkex.errors import InvalidInput


def encode_hook(value: object) -> object:
    """Convert a type unknown to msgspec to builtins; pass this to every encoder."""
    if isinstance(value, str):
        return str(value)  # msgspec encodes no subclasses of str
    to_wire = getattr(value, "to_wire", None) or getattr(value, "tolist", None)
    if to_wire is None:
        raise NotImplementedError(f"{type(value).__name__} has no form on the wire")
    return to_wire()


def decode_hook(type_: type, data: object) -> object:
    """Build a type unknown to msgspec from builtins; pass this to every decoder."""
    if isinstance(data, type_):
        return data
    from_wire = getattr(type_, "from_wire", None)
    if from_wire is None:
        raise NotImplementedError(f"{type_.__name__} cannot be read from the wire")
    return from_wire(data)


_PRELOADED: set[object] = set()
#: Reentrant, because inspecting a type imports modules that may call preload_type.
_PRELOAD_LOCK = threading.RLock()
_PreloadT = TypeVar("_PreloadT")


def preload_type(type_: _PreloadT) -> _PreloadT:
    """Make a type safe for decoding on any thread and return it; call this before decoding.

    msgspec inspects a type at its first use. If another thread decodes the same type meanwhile, the
    process crashes.
    """
    if type_ not in _PRELOADED:
        with _PRELOAD_LOCK:
            # Building a decoder inspects nested types too.
            msgspec.json.Decoder(type_, dec_hook=decode_hook)
            _PRELOADED.add(type_)
    return type_


class FieldInfo:
    """A field of a value, with the names that pydantic uses."""

    __slots__ = ("_field", "annotation")

    def __init__(self, field: msgspec.structs.FieldInfo) -> None:
        self._field = field
        self.annotation = field.type

    def is_required(self) -> bool:
        """Whether the constructor requires it."""
        return self._field.required

    def get_default(self) -> Any:
        """Return the default; None if the field is required."""
        if self._field.default is not msgspec.NODEFAULT:
            return self._field.default
        factory = self._field.default_factory
        return None if factory is msgspec.NODEFAULT else factory()

    @property
    def default(self) -> Any:
        """Same as get_default."""
        return self.get_default()


class _DumpOptions(TypedDict, total=False):
    include: Collection[str] | None
    exclude: Collection[str] | None
    exclude_none: bool
    exclude_defaults: bool


class _ModeOptions(_DumpOptions, total=False):
    mode: Literal["python", "json"]


class _IndentOptions(_DumpOptions, total=False):
    indent: int | None


class _CopyOptions(TypedDict, total=False):
    update: Mapping[str, object] | None
    deep: bool


class ValueMeta(msgspec.StructMeta):
    """Makes constructors keyword-only and validated, with helpful errors."""

    __accepted__: frozenset[str]

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        **config: Any,
    ) -> ValueMeta:
        """Create the class; msgspec does not inherit `kw_only`, so it is repeated here."""
        config.setdefault("kw_only", True)
        cls = super().__new__(mcls, name, bases, namespace, **config)
        aliases: tuple[str, ...] = namespace.get("__aliases__", ())
        tag_field = cls.__struct_config__.tag_field
        cls.__accepted__ = frozenset((*cls.__struct_fields__, *aliases, tag_field or "")) - {""}
        return cls

    @property
    def model_fields(cls) -> Mapping[str, FieldInfo]:
        """The fields of the class by name."""
        return {
            field.name: FieldInfo(field)
            for field in msgspec.structs.fields(cast("type[msgspec.Struct]", cls))
        }

    # Type checkers use the constructor that dataclass_transform derives from the fields.
    if not TYPE_CHECKING:

        def __call__(cls, *args, **fields):
            """Build a validated value from keywords."""
            if args:
                raise InvalidInput(f"{cls.__name__} takes keywords only, got {args[0]!r}")
            if not fields.keys() <= cls.__accepted__:
                raise InvalidInput(explain_unknown(cls.__name__, cls.__accepted__, fields))
            return cls._build(cls._prepare(fields))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, metaclass=ValueMeta, frozen=True):
    """A frozen record with the methods of a pydantic model."""

    @classmethod
    def _prepare(cls, fields: dict[str, object]) -> dict[str, object]:
        """Hook: rewrite constructor keywords before validation."""
        return fields

    @classmethod
    def _build(cls, fields: Mapping[str, object]) -> Self:
        try:
            return msgspec.convert(fields, preload_type(cls), dec_hook=decode_hook)
        except msgspec.ValidationError as error:
            first = error
        # Convert NumPy scalars, ranges and the like only now: the common case stays in C.
        plain = {name: to_builtin(value) for name, value in fields.items()}
        try:
            return msgspec.convert(plain, cls, dec_hook=decode_hook)
        except msgspec.ValidationError as error:
            cause = first.__cause__ or error.__cause__
            if isinstance(cause, InvalidInput):
                raise cause from None
            raise InvalidInput(cls._error_message(plain, str(error))) from None

    @classmethod
    def _error_message(cls, fields: Mapping[str, object], problem: str) -> str:
        """Return the error message for input that does not match the field types."""
        return explain_mismatch(cls, fields, problem)

    @classmethod
    def model_validate(cls, obj: object) -> Self:
        """Build a value from a mapping, ignoring unknown keys; an instance is returned as is."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise InvalidInput(f"{cls.__name__} must be a mapping, got {obj!r:.80}")
        return cls._build(cls._prepare({str(name): value for name, value in obj.items()}))

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """Build a value from JSON text."""
        try:
            obj = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"{cls.__name__}: invalid JSON: {error}; {text!r:.80}") from None
        return cls.model_validate(obj)

    def model_dump(
        self,
        *,
        mode: Literal["python", "json"] = "python",
        include: Collection[str] | None = None,
        exclude: Collection[str] | None = None,
        exclude_none: bool = False,
        exclude_defaults: bool = False,
    ) -> dict[str, Any]:
        """Return a dict of builtins; `python` keeps datetimes, `json` converts them to text."""
        builtin_types: tuple[type, ...] = _KEPT_PYTHON_TYPES if mode == "python" else ()
        dumped: dict[str, Any] = msgspec.to_builtins(
            self, builtin_types=builtin_types, enc_hook=encode_hook
        )
        dropped = set(exclude or ())
        if include is not None:
            dropped |= dumped.keys() - set(include)
        if exclude_defaults:
            dropped |= self._default_names()
        selected = {name: value for name, value in dumped.items() if name not in dropped}
        return _without_none(selected) if exclude_none else selected

    def _default_names(self) -> set[str]:
        names = {
            name
            for name, field in type(self).model_fields.items()
            if not field.is_required() and getattr(self, name) == field.get_default()
        }
        return names | {self.__struct_config__.tag_field or ""}

    def model_dump_json(self, *, indent: int | None = None, **options: Unpack[_DumpOptions]) -> str:
        """Return JSON text, on one line without `indent`; `options` are those of model_dump."""
        selected = self.model_dump(mode="json", **options) if options else self
        data = msgspec.json.encode(selected, enc_hook=encode_hook)
        if indent is not None:
            data = msgspec.json.format(data, indent=indent)
        return data.decode()

    def model_copy(self, *, update: Mapping[str, object] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed and validated."""
        source = copy.deepcopy(self) if deep else self
        fields = {name: getattr(source, name) for name in self.__struct_fields__}
        return type(self)(**{**fields, **(update or {})})

    # --- older names of pydantic ----------------------------------------------------------

    def dict(self, **options: Unpack[_ModeOptions]) -> dict[str, Any]:
        """Same as model_dump."""
        return self.model_dump(**options)

    def json(self, **options: Unpack[_IndentOptions]) -> str:
        """Same as model_dump_json."""
        return self.model_dump_json(**options)

    def copy(self, **options: Unpack[_CopyOptions]) -> Self:
        """Same as model_copy."""
        return self.model_copy(**options)

    @classmethod
    def parse_obj(cls, obj: object) -> Self:
        """Same as model_validate."""
        return cls.model_validate(obj)


class Message(Value):
    """Base class of requests; unknown fields are refused by the constructor."""


class Reply(Value):
    """Base class of responses; unknown fields are ignored when decoding."""


_KEPT_PYTHON_TYPES = (datetime,)


def to_builtin(value: object) -> object:
    """Convert NumPy scalars and arrays, ranges, and subclasses of str and int to builtins."""
    if isinstance(value, bool | None) or hasattr(value, "to_wire"):
        return value
    for exact in (str, int, float):
        if isinstance(value, exact):
            return exact(value)
    if isinstance(value, list | tuple | range):
        return [to_builtin(item) for item in value]
    if type(value) is dict:
        return {key: to_builtin(item) for key, item in value.items()}
    is_array = hasattr(value, "dtype") or hasattr(value, "typecode")
    tolist = getattr(value, "tolist", None) if is_array else None
    return value if tolist is None else tolist()


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


# --- error messages for invalid input ----------------------------------------------------------
_PROBLEM = re.compile(r"^(?P<problem>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_PATH_PART = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")
_MISSING = re.compile(r"missing required field `(\w+)`")
_WORD = re.compile(r"\w+")
#: Python names of msgspec's JSON types.
_PYTHON_NAMES = {"array": "list", "object": "dict", "null": "None"}


def explain_unknown(name: str, accepted: Collection[str], given: Iterable[str]) -> str:
    """Name the unknown keyword and suggest a similar one."""
    unknown = next(keyword for keyword in given if keyword not in accepted)
    close = difflib.get_close_matches(unknown, sorted(accepted), n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{name} has no field {unknown!r}{hint}"


def explain_mismatch(cls: type, fields: Mapping[str, object], problem: str) -> str:
    """Describe which field of the input is invalid, with its value."""
    _, path = split_problem(problem)
    steps = [name for name, _, _ in _PATH_PART.findall(path) if name]
    choices = _literal_values(get_type_hints(cls).get(steps[0])) if len(steps) == 1 else []
    if problem.startswith("Invalid") and choices:
        value, expected = value_at(fields, path), " or ".join(map(repr, choices))
        return f"{cls.__name__}{path} is {value!r:.80}; expected {expected}"
    return explain_value(cls.__name__, fields, problem)


def explain_value(name: str, data: object, problem: str) -> str:
    """Translate msgspec's error about `data`, named `name`, to Python's terms."""
    text, path = split_problem(problem)
    if missing := _MISSING.search(text):
        return f"{name}{path} needs {missing[1]!r}"
    words = _WORD.sub(lambda word: _PYTHON_NAMES.get(word[0], word[0]), text.replace("`", ""))
    return f"{name}{path} is {value_at(data, path)!r:.80}; {words[:1].lower()}{words[1:]}"


def split_problem(problem: str) -> tuple[str, str]:
    """Split msgspec's error into the problem and the path."""
    match = _PROBLEM.match(problem)
    assert match is not None
    return match["problem"], match["path"] or ""


def value_at(data: Any, path: str) -> object:
    """Return the part of the input at a path such as `.chunks[0].tokens`, as far as it exists."""
    for name, index, _ in _PATH_PART.findall(path):
        key = name or (int(index) if index else None)
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            data = getattr(data, name, data) if name else data
    return data


def _literal_values(hint: object) -> list[object]:
    """Return all literals in a field's type."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) for choice in _literal_values(part)]
