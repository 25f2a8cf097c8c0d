"""JSONL files line by line; whatever is wrong is told with the file and the line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from tinkex.errors import InvalidInput

RowT = TypeVar("RowT")
_BOM = b"\xef\xbb\xbf"
_SHOWN_LETTERS = 80


class Line(NamedTuple):
    """A line that holds something."""

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
            content = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if not content:
                continue
            yield Line(number, content)
            num_found += 1
            if num_found == limit:
                return
    if not num_found:
        raise InvalidInput(
            f"{path} has no rows; expected one JSON object per line",
            hint="Fill the file, or name another one.",
        )


def parse_line(path: Path, line: Line, parse: Callable[[Any], RowT]) -> RowT:
    """A line as a row; errors name the file and the line."""
    where = f"{path}, line {line.number}"
    try:
        value = msgspec.json.decode(line.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(
            f"{where} is not JSON ({error}): {shown(line.content.decode(errors='replace'))}",
            hint="Repair the line or take it out; each line is one JSON object.",
        ) from error
    try:
        return parse(value)
    except InvalidInput as error:
        raise InvalidInput(
            f"{where}: {error.message}", hint="Repair the row or take it out."
        ) from None


def digest_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shown(value: object) -> str:
    """A value for messages, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}..."


def _opened(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read: {error.strerror or error}",
            hint="Name a file of JSON, one object per line.",
        ) from error
