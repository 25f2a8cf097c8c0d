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

from tinkex.engine.models.gguf.encodings import ENCODINGS, Encoding, name_of
from tinkex.engine.models.weight_files import UnusableModel

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: How numbers are packed, by the number of their type.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS[12] = "d"
_TEXT, _LIST = 8, 9
#: The fewest bytes that a value takes which is no number.
_LEAST_BYTES = {_TEXT: 8, _LIST: 12}
_MAX_DEPTH = 4
_MAX_SIDES = 4
_AGAIN = "Copy or download the file again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in the file."""

    name: str
    shape: tuple[int, ...]
    """The slowest side first, as in every other format."""
    encoding: Encoding
    offset: int
    """Where its bytes begin, from the start of the file."""

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes in the file."""
        return self.size // self.encoding.block * self.encoding.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """What the header of a file says."""

    path: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, Stored]


def read_gguf(path: Path) -> Gguf:
    """Read a header; raises with a sentence if the file is damaged or of a kind not known here."""
    try:
        with path.open("rb") as file:
            return _Header(path, file, path.stat().st_size).read()
    except OSError as error:
        raise UnusableModel(f"{path} cannot be read: {error.strerror or error}") from error


class _Header:
    """Reads a header from front to back, and never past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, num_bytes: int) -> None:
        self._path = path
        self._file = file
        self._num_bytes = num_bytes
        self._left = num_bytes

    def read(self) -> Gguf:
        self._check_kind()
        num_tensors, num_facts = self._number("Q"), self._number("Q")
        facts: dict[str, Any] = {}
        for _ in range(num_facts):
            name = self._text()
            facts[name] = self._value(self._number("I"))
        _check_whole(self._path, facts)
        found = [self._description() for _ in range(num_tensors)]
        start = _aligned(self._num_bytes - self._left, self._alignment(facts))
        return Gguf(path=self._path, facts=facts, tensors=self._placed(found, start))

    def _check_kind(self) -> None:
        if self._take(len(MAGIC)) != MAGIC:
            raise UnusableModel(f"{self._path} is no GGUF file: it does not begin with GGUF")
        version = self._number("I")
        if version in _VERSIONS:
            return
        what = f"version {version}"
        if version & 0xFFFF == 0:
            what = "the order of bytes of other processors (big endian)"
        raise UnusableModel(
            f"{self._path} is a GGUF file of {what}; versions 2 and 3, little endian, are read",
            hint="Make it anew with a current llama.cpp.",
        )

    def _description(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_sides = self._text(), self._number("I")
        if not 1 <= num_sides <= _MAX_SIDES:
            raise self._damaged(f"tensor {name!r:.100} has {num_sides} dimensions")
        sides = tuple(self._number("Q") for _ in range(num_sides))
        return name, sides[::-1], self._number("I"), self._number("Q")

    def _placed(
        self, found: list[tuple[str, tuple[int, ...], int, int]], start: int
    ) -> dict[str, Stored]:
        tensors: dict[str, Stored] = {}
        for name, shape, kind, offset in found:
            encoding = ENCODINGS.get(kind)
            if encoding is None:
                known = ", ".join(encoding.name for encoding in ENCODINGS.values())
                raise UnusableModel(
                    f"tensor {name!r} of {self._path} is stored as {name_of(kind)}, which is not "
                    f"read here; known are {known}",
                    hint="Take another file of the same model.",
                )
            tensor = Stored(name=name, shape=shape, encoding=encoding, offset=start + offset)
            self._check_place(tensor)
            if name in tensors:
                raise self._damaged(f"tensor {name!r} is there twice")
            tensors[name] = tensor
        return tensors

    def _check_place(self, tensor: Stored) -> None:
        if not tensor.size or tensor.shape[-1] % tensor.encoding.block:
            raise self._damaged(
                f"tensor {tensor.name!r} has the shape {tensor.shape}, which "
                f"{tensor.encoding.name} cannot store"
            )
        end = tensor.offset + tensor.num_bytes
        if end > self._num_bytes:
            raise UnusableModel(
                f"{self._path} is cut off: it has {self._num_bytes:,} bytes where tensor "
                f"{tensor.name!r} ends at {end:,}",
                hint=_AGAIN,
            )

    def _alignment(self, facts: Mapping[str, Any]) -> int:
        alignment = facts.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}")
        return alignment

    # --- values ---------------------------------------------------------------------------------

    def _take(self, num_bytes: int) -> bytes:
        self._reserve(num_bytes)
        self._left -= num_bytes
        return self._file.read(num_bytes)

    def _reserve(self, num_bytes: int) -> None:
        """Refuse what cannot be there, before any memory is taken for it."""
        if num_bytes > self._left:
            raise UnusableModel(
                f"{self._path} is cut off or damaged: its {self._num_bytes:,} bytes do not hold "
                "its header",
                hint=_AGAIN,
            )

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _text(self) -> str:
        content = self._take(self._number("Q"))
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self._damaged(f"{content!r:.60} is no text") from None

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _LIST or depth == _MAX_DEPTH:
            raise self._damaged(f"it has a value of type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner in _NUMBERS:
            self._reserve(count)
            code = f"<{count}{_NUMBERS[inner]}"
            return list(struct.unpack(code, self._take(struct.calcsize(code))))
        self._reserve(count * _LEAST_BYTES.get(inner, 1))
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _damaged(self, how: str) -> UnusableModel:
        return UnusableModel(f"{self._path} is damaged: {how}", hint=_AGAIN)


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _check_whole(path: Path, facts: Mapping[str, Any]) -> None:
    count = facts.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise UnusableModel(
            f"{path} is one of {count} parts of a model",
            hint="Put them together first: `llama-gguf-split --merge FIRST_PART WHOLE.gguf`.",
        )
