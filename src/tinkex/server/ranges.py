"""Which part of a file a client asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class Part(NamedTuple):
    """The bytes from `start` up to but not including `stop`."""

    start: int
    stop: int


class NoSuchPart(Exception):
    """Nothing of the file lies in the range that was asked for."""


def part_of(headers: Mapping[str, str], size: int, etag: str) -> Part | None:
    """The part to send, or None for all of it.

    What cannot be understood is ignored, as are several ranges at once; a range of a file that has
    changed since is ignored too.
    """
    asked = headers.get("range", "")
    match = _RANGE.fullmatch(asked.replace(" ", "").lower())
    if match is None or not (match[1] or match[2]):
        return None
    if headers.get("if-range", etag).strip() != etag:
        return None
    part = _bounds(match[1], match[2], size)
    if part is None:
        return None
    if part.start >= part.stop:
        raise NoSuchPart
    return part


def _bounds(first: str, last: str, size: int) -> Part | None:
    if not first:
        return Part(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    return Part(int(first), min(size, int(last) + 1) if last else size)
