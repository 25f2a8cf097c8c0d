"""JSONL files: read line by line, or by row number; errors name the file and the line."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from tinkex.errors import InvalidInput

RowT = TypeVar("RowT")
_BOM = b"\xef\xbb\xbf"
_SHOWN_LETTERS = 80


class Line(NamedTuple):
    """A line that is not blank."""

    number: int
    """Counted from 1, as editors do."""
    content: bytes

    @property
    def digest(self) -> int:
        """A number that two lines share only if they are the same."""
        return int.from_bytes(hashlib.blake2b(self.content, digest_size=8).digest(), "little")


def read_lines(path: Path, limit: int = 0) -> Iterator[Line]:
    """The lines of a file that are not blank, at most `limit` if that is not 0."""
    num_found = 0
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            content = _content(line, number)
            if not content:
                continue
            yield Line(number, content)
            num_found += 1
            if num_found == limit:
                return
    if not num_found:
        raise _without_rows(path)


def parse_line(path: Path, line: Line, parse: Callable[[Any], RowT]) -> RowT:
    """A line as a row; errors name the file and the line."""
    where = f"{path}, line {line.number}"
    try:
        value = msgspec.json.decode(line.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(
            f"{where} is not JSON ({error}): {shown(line.content.decode(errors='replace'))}",
            hint="Repair the line or remove it; each line is one JSON object.",
        ) from error
    try:
        return parse(value)
    except InvalidInput as error:
        raise InvalidInput(
            f"{where}: {error.message}", hint="Repair the row or remove it."
        ) from None


class RowFile(Generic[RowT]):
    """The rows of one file, all checked at the start; memory holds only their offsets."""

    def __init__(self, path: Path, parse: Callable[[Any], RowT]) -> None:
        self.path = path
        self._parse = parse
        self._starts = array("q")
        self._lines = array("q")
        self.digest = self._scan()
        """The SHA-256 of the file's content."""

    def __len__(self) -> int:
        return len(self._starts)

    def take(self, numbers: Iterable[int]) -> list[RowT]:
        """The rows with these numbers, counted from 0, in this order."""
        with _opened(self.path) as file:
            found = []
            for number in numbers:
                file.seek(self._starts[number])
                line = Line(self._lines[number], file.readline())
                found.append(self._read(line))
        return found

    def place(self, number: int) -> str:
        """The file and the line of a row, for messages."""
        return f"{self.path}, line {self._lines[number]}"

    def _scan(self) -> str:
        digest = hashlib.sha256()
        start = 0
        with _opened(self.path) as file:
            for number, content in enumerate(file, start=1):
                digest.update(content)
                if _content(content, number):
                    self._read(Line(number, content))
                    self._starts.append(start)
                    self._lines.append(number)
                start += len(content)
        if not self._starts:
            raise _without_rows(self.path)
        return digest.hexdigest()

    def _read(self, line: Line) -> RowT:
        content = _content(line.content, line.number)
        return parse_line(self.path, line._replace(content=content), self._parse)


def digest_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shown(value: object) -> str:
    """A value for messages, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}..."


def _content(line: bytes, number: int) -> bytes:
    return (line.removeprefix(_BOM) if number == 1 else line).strip()


def _opened(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read: {error.strerror or error}",
            hint="Name a file of JSON, one object per line.",
        ) from error


def _without_rows(path: Path) -> InvalidInput:
    return InvalidInput(
        f"{path} has no rows; expected one JSON object per line",
        hint="Fill the file, or name another one.",
    )
