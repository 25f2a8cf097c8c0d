"""JSON encoding and decoding of messages, and zstd compression.

A struct is encoded with its defaults. A field that is None is omitted unless it is required,
because omitting a required field would change the meaning. Long lists of integers are not traversed
in Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import Enum
from functools import cache
from math import isfinite
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from tinkex.errors import InvalidInput
from tinkex.types.base import decode_hook, encode_hook, preload_type
from tinkex.types.inputs import add_chunk_types
from tinkex.types.sampling import SampleResponse
from tinkex.types.tensors import TensorData
from tinkex.types.training import ForwardBackwardOutput, ForwardBackwardRequest, ForwardRequest
from tinkex.wire.proto.json_compat import (
    JSON_FIELDS,
    forward_backward_output_from_json,
    forward_backward_request_from_json,
    forward_request_from_json,
    sample_response_from_json,
)
from tinkex.wire.proto.protobuf import WireError

__all__ = [
    "convert_json",
    "decode_json",
    "encode_json",
    "forward_backward_output_from_json",
    "forward_backward_request_from_json",
    "forward_request_from_json",
    "sample_response_from_json",
]

T = TypeVar("T")
#: Values of these types are encoded by msgspec without checks.
PASSTHROUGH_TYPES = frozenset({int, str, bool, bytes, NoneType, datetime})

#: msgspec's error for a chunk without its tag.
_UNTYPED_CHUNK = re.compile(r"missing required field `type` - at `.*\.chunks\[\d+\]`")
_ENCODER = msgspec.json.Encoder(enc_hook=encode_hook)
_JSON_READERS: dict[type, Callable[[object], Any]] = {
    ForwardBackwardRequest: forward_backward_request_from_json,
    ForwardRequest: forward_request_from_json,
    ForwardBackwardOutput: forward_backward_output_from_json,
    SampleResponse: sample_response_from_json,
}


def encode_json(message: object) -> bytes:
    """Encode a struct, value or dict as JSON; raises InvalidInput for NaN and infinity."""
    builtins = _prepare(message, "")
    try:
        return _ENCODER.encode(builtins)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise InvalidInput(f"{type(message).__name__} cannot be written as JSON: {error}") from None


def decode_json(data: bytes, type_: type[T]) -> T:
    """Decode JSON as this type; raises msgspec.DecodeError (or its subclass ValidationError)."""
    if type_ in _JSON_READERS:
        return convert_json(msgspec.json.decode(data), type_)
    try:
        kind: type = type_
        value: T = _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        if not _UNTYPED_CHUNK.search(str(error)):
            raise
        body = add_chunk_types(msgspec.json.decode(data))
        value = msgspec.convert(body, preload_type(type_), dec_hook=decode_hook)
    return value


def convert_json(body: object, type_: type[T]) -> T:
    """Convert parsed JSON to a message that also has a protobuf form."""
    read: Callable[[object], T] = _JSON_READERS[type_]
    try:
        return read(body)
    except msgspec.ValidationError as error:
        if not _UNTYPED_CHUNK.search(str(error)):
            raise
    # SDKs up to 0.16.1 send chunks without a tag.
    return read(add_chunk_types(body))


@cache
def _decoder(type_: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(preload_type(type_), dec_hook=decode_hook)


# --- preparation for msgspec: omit None, refuse NaN ------------------------------------------
def _prepare(value: object, path: str) -> object:
    """Convert a value to types that msgspec encodes; `path` locates it in error messages."""
    if type(value) in PASSTHROUGH_TYPES:
        return value
    if isinstance(value, float):
        return _check_finite(value, path)
    if isinstance(value, msgspec.Struct):
        return _prepare_struct(value, path)
    if isinstance(value, list | tuple):
        return [_prepare(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {key: _prepare(item, _join(path, key)) for key, item in value.items()}
    return _prepare_object(value, path)


def _prepare_object(value: object, path: str) -> object:
    if isinstance(value, TensorData):
        return _prepare_tensor(value, path)
    if type(value) in JSON_FIELDS:
        items = {name: getattr(value, name) for name in JSON_FIELDS[type(value)]}
        present = {name: item for name, item in items.items() if item is not None}
        return _prepare(present, path)
    if hasattr(value, "to_wire") or hasattr(value, "tolist"):
        # Values with their own wire format, and NumPy scalars and arrays.
        return _prepare(encode_hook(value), path)
    return value


def _check_finite(value: float, path: str) -> float:
    if not isfinite(value):
        raise InvalidInput(f"{path or 'the message'} is {value}; JSON has no such number")
    return float(value)


def _prepare_tensor(tensor: TensorData, path: str) -> dict[str, object]:
    not_finite = tensor.find_not_finite() if tensor.dtype == "float32" else None
    if not_finite is not None:
        index, value = not_finite
        raise InvalidInput(f"{path or 'the tensor'}{index} is {value}; JSON has no such number")
    return tensor.to_wire()


def _prepare_struct(struct: msgspec.Struct, path: str) -> dict[str, object]:
    config = struct.__struct_config__
    items: dict[str, object] = {config.tag_field: config.tag} if config.tag_field else {}
    for field in _field_infos(type(struct)):
        item = getattr(struct, field.name)
        if item is not None or field.is_required:
            items[field.key] = (
                item if field.is_passthrough else _prepare(item, _join(path, field.name))
            )
    return items


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


class _FieldInfo(NamedTuple):
    name: str
    key: str
    is_required: bool
    is_passthrough: bool


@cache
def _field_infos(cls: type[msgspec.Struct]) -> tuple[_FieldInfo, ...]:
    return tuple(
        _FieldInfo(field.name, field.encode_name, field.required, _is_passthrough(field.type))
        for field in msgspec.structs.fields(cls)
    )


def _is_passthrough(type_: object) -> bool:
    """Return whether values of this type need no checks, so that token lists are not copied."""
    origin = get_origin(type_)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _is_passthrough(get_args(type_)[0])
    if origin is not None:
        return all(_is_passthrough(part) for part in get_args(type_))
    return type_ in PASSTHROUGH_TYPES or (isinstance(type_, type) and issubclass(type_, Enum))


# --- compression -----------------------------------------------------------------------------
#: Input bytes per step. zstd can turn 4 bytes into 128 KiB, so the output may exceed the limit by
#: at most 32 MiB before the check.
DECOMPRESS_CHUNK_BYTES = 1024
#: Maximum window of a frame; zstd's levels up to 19 need no more.
MAX_WINDOW_BYTES = 8 * 1024 * 1024


def compress_zstd(data: bytes) -> bytes:
    """Compress data to one zstd frame with its content size."""
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def zstd_content_size(data: bytes) -> int | None:
    """Return the declared content size of a zstd body; None if it declares none."""
    import zstandard

    try:
        num_bytes = zstandard.frame_content_size(data)
    except zstandard.ZstdError:
        return 0
    return None if num_bytes < 0 else num_bytes


def decompress_zstd(data: bytes, limit_bytes: int) -> bytes:
    """Decompress a zstd body; raises WireError if it is damaged or larger than the limit."""
    import zstandard

    try:
        num_bytes = zstandard.frame_content_size(data)
        if num_bytes > limit_bytes:
            raise WireError(f"a zstd body unpacks to {num_bytes} bytes; the limit is {limit_bytes}")
        if num_bytes > 0:
            return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        return _decompress_unsized(data, limit_bytes)
    except zstandard.ZstdError as error:
        raise WireError(f"a zstd body is damaged: {error}") from None


def _decompress_unsized(data: bytes, limit_bytes: int) -> bytes:
    """Decompress frames without a declared size in small steps."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    content = bytearray()
    frame = decompressor.decompressobj()
    for start in range(0, len(data), DECOMPRESS_CHUNK_BYTES):
        rest = data[start : start + DECOMPRESS_CHUNK_BYTES]
        while rest:
            if frame.eof:
                frame = decompressor.decompressobj()
            content += frame.decompress(rest)
            rest = frame.unused_data
            if len(content) > limit_bytes:
                raise WireError(f"a zstd body unpacks to more than {limit_bytes} bytes")
    if not frame.eof:
        raise WireError(f"a zstd body of {len(data)} bytes ends inside a frame")
    return bytes(content)
