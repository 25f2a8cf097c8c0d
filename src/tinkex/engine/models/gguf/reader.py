"""Reads the header of a GGUF file: metadata by key, and the location of every tensor.

The layout is that of versions 2 and 3, little endian: magic, version, number of tensors, number of
metadata entries, the metadata, the tensor descriptions, padding, and the tensor data.

Files are untrusted, so every count is checked against the file size before memory is allocated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tinkex.engine.models.gguf.quantization import ENCODINGS, TensorEncoding, encoding_name
from tinkex.engine.models.weight_files import UnusableModel

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: `struct` codes by GGUF value type.
_NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBER_CODES[12] = "d"
_STRING, _ARRAY = 8, 9
#: The minimum size of values that are not numbers.
_MIN_VALUE_BYTES = {_STRING: 8, _ARRAY: 12}
_MAX_DEPTH = 4
_MAX_DIMENSIONS = 4
_RETRY_HINT = "Copy or download the file again."


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """The description of a tensor in the file."""

    name: str
    shape: tuple[int, ...]
    """Slowest-varying dimension first, as in NumPy; the file stores the reverse."""
    encoding: TensorEncoding
    offset: int
    """Position of its first byte in the file."""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes in the file."""
        return self.size // self.encoding.block_size * self.encoding.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """The parsed header of a file."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read a header; raises UnusableModel if the file is damaged or not supported."""
    try:
        with path.open("rb") as file:
            return _HeaderReader(path, file, path.stat().st_size).read()
    except OSError as error:
        raise UnusableModel(f"{path} cannot be read: {error.strerror or error}") from error


class _HeaderReader:
    """Reads a header sequentially, and never past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, num_bytes: int) -> None:
        self._path = path
        self._file = file
        self._num_bytes = num_bytes
        self._num_remaining = num_bytes

    def read(self) -> GgufFile:
        self._check_version()
        num_tensors, num_entries = self._read_int("Q"), self._read_int("Q")
        metadata: dict[str, object] = {}
        for _ in range(num_entries):
            key = self._read_string()
            metadata[key] = self._read_value(self._read_int("I"))
        _check_not_split(self._path, metadata)
        infos = [self._read_tensor_info() for _ in range(num_tensors)]
        start = _align(self._num_bytes - self._num_remaining, self._alignment(metadata))
        tensors = self._build_tensors(infos, start)
        return GgufFile(path=self._path, metadata=metadata, tensors=tensors)

    def _check_version(self) -> None:
        if self._read_bytes(len(MAGIC)) != MAGIC:
            raise UnusableModel(f"{self._path} is not a GGUF file: it does not begin with GGUF")
        version = self._read_int("I")
        if version in _VERSIONS:
            return
        # A big-endian version number has its bits in the upper half.
        found = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise UnusableModel(
            f"{self._path} is a {found} GGUF file; little-endian versions 2 and 3 are supported",
            hint="Convert it again with a current llama.cpp.",
        )

    def _read_tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._read_string(), self._read_int("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged_error(f"tensor {name!r:.100} has {num_dimensions} dimensions")
        dimensions = tuple(self._read_int("Q") for _ in range(num_dimensions))
        return name, dimensions[::-1], self._read_int("I"), self._read_int("Q")

    def _build_tensors(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int
    ) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in infos:
            encoding = ENCODINGS.get(type_id)
            if encoding is None:
                known = ", ".join(encoding.name for encoding in ENCODINGS.values())
                raise UnusableModel(
                    f"tensor {name!r} of {self._path} is stored as {encoding_name(type_id)}, which "
                    f"is not supported; supported are {known}",
                    hint="Use another file of the same model.",
                )
            tensor = GgufTensor(name=name, shape=shape, encoding=encoding, offset=start + offset)
            self._check_bounds(tensor)
            if name in tensors:
                raise self._damaged_error(f"it has two tensors named {name!r}")
            tensors[name] = tensor
        return tensors

    def _check_bounds(self, tensor: GgufTensor) -> None:
        if not tensor.size or tensor.shape[-1] % tensor.encoding.block_size:
            raise self._damaged_error(
                f"tensor {tensor.name!r} has the shape {tensor.shape}, which "
                f"{tensor.encoding.name} cannot store"
            )
        end = tensor.offset + tensor.num_bytes
        if end > self._num_bytes:
            raise UnusableModel(
                f"{self._path} is truncated: it has {self._num_bytes:,} bytes, but tensor "
                f"{tensor.name!r} ends at {end:,}",
                hint=_RETRY_HINT,
            )

    def _alignment(self, metadata: Mapping[str, object]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged_error(f"general.alignment is {alignment!r}")
        return alignment

    # --- values ---------------------------------------------------------------------------------

    def _read_bytes(self, num_bytes: int) -> bytes:
        self._reserve(num_bytes)
        self._num_remaining -= num_bytes
        return self._file.read(num_bytes)

    def _reserve(self, num_bytes: int) -> None:
        """Raise if the file cannot hold so many bytes, before memory is allocated for them."""
        if num_bytes > self._num_remaining:
            raise UnusableModel(
                f"{self._path} is truncated or damaged: its header does not fit into its "
                f"{self._num_bytes:,} bytes",
                hint=_RETRY_HINT,
            )

    def _read_int(self, code: str) -> int:
        number = self._read_number(code)
        assert isinstance(number, int)
        return number

    def _read_number(self, code: str) -> object:
        (number,) = struct.unpack(f"<{code}", self._read_bytes(struct.calcsize(f"<{code}")))
        return number

    def _read_string(self) -> str:
        content = self._read_bytes(self._read_int("Q"))
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self._damaged_error(f"{content!r:.60} is not UTF-8") from None

    def _read_value(self, type_id: int, depth: int = 0) -> object:
        if type_id in _NUMBER_CODES:
            return self._read_number(_NUMBER_CODES[type_id])
        if type_id == _STRING:
            return self._read_string()
        if type_id != _ARRAY or depth == _MAX_DEPTH:
            raise self._damaged_error(f"it has a value of type {type_id}")
        inner, count = self._read_int("I"), self._read_int("Q")
        if inner in _NUMBER_CODES:
            self._reserve(count)
            code = f"<{count}{_NUMBER_CODES[inner]}"
            return list(struct.unpack(code, self._read_bytes(struct.calcsize(code))))
        self._reserve(count * _MIN_VALUE_BYTES.get(inner, 1))
        return [self._read_value(inner, depth + 1) for _ in range(count)]

    def _damaged_error(self, problem: str) -> UnusableModel:
        return UnusableModel(f"{self._path} is damaged: {problem}", hint=_RETRY_HINT)


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _check_not_split(path: Path, metadata: Mapping[str, object]) -> None:
    count = metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise UnusableModel(
            f"{path} is one of {count} parts of a model",
            hint="Merge them first: `llama-gguf-split --merge FIRST_PART WHOLE.gguf`.",
        )
