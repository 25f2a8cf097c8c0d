"""A GGUF file as its header tells: facts by name, and where every tensor lies; none is read.

The layout is that of versions 2 and 3, little endian: magic, version, how many tensors and facts
there are, the facts, the tensors' descriptions, and after padding the tensors themselves.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tinkex.engine.models.gguf.quantization import ENCODINGS, TensorEncoding, encoding_name
from tinkex.engine.models.weight_files import UnusableModel

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: How numbers are packed, by the number of their type.
_NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBER_CODES[12] = "d"
_STRING, _ARRAY = 8, 9
#: The fewest bytes that a value takes which is no number.
_MIN_VALUE_BYTES = {_STRING: 8, _ARRAY: 12}
_MAX_DEPTH = 4
_MAX_DIMENSIONS = 4
_RETRY_HINT = "Copy or download the file again."


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor in the file."""

    name: str
    shape: tuple[int, ...]
    """The slowest side first, as in every other format."""
    encoding: TensorEncoding
    offset: int
    """Where its bytes begin, from the start of the file."""

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes in the file."""
        return self.size // self.encoding.block_size * self.encoding.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """What the header of a file says."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read a header; raises with a sentence if the file is damaged or of a kind not known here."""
    try:
        with path.open("rb") as file:
            return _HeaderReader(path, file, path.stat().st_size).read()
    except OSError as error:
        raise UnusableModel(f"{path} cannot be read: {error.strerror or error}") from error


class _HeaderReader:
    """Reads a header from front to back, and never past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, num_bytes: int) -> None:
        self._path = path
        self._file = file
        self._num_bytes = num_bytes
        self._num_remaining = num_bytes

    def read(self) -> GgufFile:
        self._check_version()
        num_tensors, num_facts = self._read_number("Q"), self._read_number("Q")
        facts: dict[str, Any] = {}
        for _ in range(num_facts):
            name = self._read_string()
            facts[name] = self._read_value(self._read_number("I"))
        _check_not_split(self._path, facts)
        found = [self._read_tensor_info() for _ in range(num_tensors)]
        start = _align(self._num_bytes - self._num_remaining, self._alignment(facts))
        return GgufFile(path=self._path, metadata=facts, tensors=self._build_tensors(found, start))

    def _check_version(self) -> None:
        if self._read_bytes(len(MAGIC)) != MAGIC:
            raise UnusableModel(f"{self._path} is no GGUF file: it does not begin with GGUF")
        version = self._read_number("I")
        if version in _VERSIONS:
            return
        what = f"version {version}"
        if version & 0xFFFF == 0:
            what = "the order of bytes of other processors (big endian)"
        raise UnusableModel(
            f"{self._path} is a GGUF file of {what}; versions 2 and 3, little endian, are read",
            hint="Make it anew with a current llama.cpp.",
        )

    def _read_tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_sides = self._read_string(), self._read_number("I")
        if not 1 <= num_sides <= _MAX_DIMENSIONS:
            raise self._damaged_error(f"tensor {name!r:.100} has {num_sides} dimensions")
        sides = tuple(self._read_number("Q") for _ in range(num_sides))
        return name, sides[::-1], self._read_number("I"), self._read_number("Q")

    def _build_tensors(
        self, found: list[tuple[str, tuple[int, ...], int, int]], start: int
    ) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in found:
            encoding = ENCODINGS.get(kind)
            if encoding is None:
                known = ", ".join(encoding.name for encoding in ENCODINGS.values())
                raise UnusableModel(
                    f"tensor {name!r} of {self._path} is stored as {encoding_name(kind)}, which "
                    "is not "
                    f"read here; known are {known}",
                    hint="Take another file of the same model.",
                )
            tensor = GgufTensor(name=name, shape=shape, encoding=encoding, offset=start + offset)
            self._check_bounds(tensor)
            if name in tensors:
                raise self._damaged_error(f"tensor {name!r} is there twice")
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
                f"{self._path} is cut off: it has {self._num_bytes:,} bytes where tensor "
                f"{tensor.name!r} ends at {end:,}",
                hint=_RETRY_HINT,
            )

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
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
        """Refuse what cannot be there, before any memory is taken for it."""
        if num_bytes > self._num_remaining:
            raise UnusableModel(
                f"{self._path} is cut off or damaged: its {self._num_bytes:,} bytes do not hold "
                "its header",
                hint=_RETRY_HINT,
            )

    def _read_number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._read_bytes(struct.calcsize(f"<{code}")))[0]

    def _read_string(self) -> str:
        content = self._read_bytes(self._read_number("Q"))
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self._damaged_error(f"{content!r:.60} is no text") from None

    def _read_value(self, type_id: int, depth: int = 0) -> Any:
        if type_id in _NUMBER_CODES:
            return self._read_number(_NUMBER_CODES[type_id])
        if type_id == _STRING:
            return self._read_string()
        if type_id != _ARRAY or depth == _MAX_DEPTH:
            raise self._damaged_error(f"it has a value of type {type_id}")
        inner, count = self._read_number("I"), self._read_number("Q")
        if inner in _NUMBER_CODES:
            self._reserve(count)
            code = f"<{count}{_NUMBER_CODES[inner]}"
            return list(struct.unpack(code, self._read_bytes(struct.calcsize(code))))
        self._reserve(count * _MIN_VALUE_BYTES.get(inner, 1))
        return [self._read_value(inner, depth + 1) for _ in range(count)]

    def _damaged_error(self, how: str) -> UnusableModel:
        return UnusableModel(f"{self._path} is damaged: {how}", hint=_RETRY_HINT)


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _check_not_split(path: Path, metadata: Mapping[str, Any]) -> None:
    count = metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise UnusableModel(
            f"{path} is one of {count} parts of a model",
            hint="Put them together first: `llama-gguf-split --merge FIRST_PART WHOLE.gguf`.",
        )
