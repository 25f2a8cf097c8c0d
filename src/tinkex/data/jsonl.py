"""Read JSONL files sequentially or by row number; errors name the file and the line."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from tinkex.errors import InvalidInput

RowT = TypeVar("RowT")
_BOM = b"\xef\xbb\xbf"
_MAX_REPR_LENGTH = 80


class JsonlLine(NamedTuple):
    """A non-blank line."""

    number: int
    """Line number, counted from 1."""
    content: bytes

    @property
    def digest(self) -> int:
        """64-bit digest of the content."""
        return int.from_bytes(hashlib.blake2b(self.content, digest_size=8).digest(), "little")


def read_lines(path: Path, limit: int = 0) -> Iterator[JsonlLine]:
    """Yield the non-blank lines of a file, at most `limit` unless it is 0."""
    num_lines = 0
    with _open_file(path) as file:
        for number, line in enumerate(file, start=1):
            content = _strip_line(line, number)
            if not content:
                continue
            yield JsonlLine(number, content)
            num_lines += 1
            if num_lines == limit:
                return
    if not num_lines:
        raise _no_rows_error(path)


def parse_line(path: Path, line: JsonlLine, parse: Callable[[object], RowT]) -> RowT:
    """Parse a line; errors name the file and the line."""
    location = f"{path}, line {line.number}"
    try:
        value = msgspec.json.decode(line.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(
            f"{location} is not JSON ({error}): "
            f"{truncated_repr(line.content.decode(errors='replace'))}",
            hint="Repair the line or remove it; each line is one JSON object.",
        ) from error
    try:
        return parse(value)
    except InvalidInput as error:
        raise InvalidInput(
            f"{location}: {error.message}", hint="Repair the row or remove it."
        ) from None


class JsonlFile(Generic[RowT]):
    """Random access to the rows of a file; all rows are checked at the start."""

    def __init__(self, path: Path, parse: Callable[[object], RowT]) -> None:
        self.path = path
        self._parse = parse
        self._offsets = array("q")
        self._line_numbers = array("q")
        self.digest = self._scan()
        """SHA-256 of the file."""

    def __len__(self) -> int:
        return len(self._offsets)

    def read_rows(self, numbers: Iterable[int]) -> list[RowT]:
        """Return rows by number, counted from 0, in the given order."""
        with _open_file(self.path) as file:
            rows = []
            for number in numbers:
                file.seek(self._offsets[number])
                line = JsonlLine(self._line_numbers[number], file.readline())
                rows.append(self._parse_row(line))
        return rows

    def describe_location(self, number: int) -> str:
        """Return the file and line of a row, for messages."""
        return f"{self.path}, line {self._line_numbers[number]}"

    def _scan(self) -> str:
        digest = hashlib.sha256()
        start = 0
        with _open_file(self.path) as file:
            for number, content in enumerate(file, start=1):
                digest.update(content)
                if _strip_line(content, number):
                    self._parse_row(JsonlLine(number, content))
                    self._offsets.append(start)
                    self._line_numbers.append(number)
                start += len(content)
        if not self._offsets:
            raise _no_rows_error(self.path)
        return digest.hexdigest()

    def _parse_row(self, line: JsonlLine) -> RowT:
        content = _strip_line(line.content, line.number)
        return parse_line(self.path, line._replace(content=content), self._parse)


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file as hex."""
    with _open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def truncated_repr(value: object) -> str:
    """Return the repr of a value, truncated for messages."""
    text = repr(value)
    return text if len(text) <= _MAX_REPR_LENGTH else f"{text[:_MAX_REPR_LENGTH]}..."


def _strip_line(line: bytes, number: int) -> bytes:
    return (line.removeprefix(_BOM) if number == 1 else line).strip()


def _open_file(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read: {error.strerror or error}",
            hint="Pass a JSONL file, one JSON object per line.",
        ) from error


def _no_rows_error(path: Path) -> InvalidInput:
    return InvalidInput(
        f"{path} has no rows; expected one JSON object per line",
        hint="Add rows, or pass another file.",
    )
