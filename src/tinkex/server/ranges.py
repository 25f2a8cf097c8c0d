"""Which part of a file a client asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_RANGE_HEADER = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class ByteRange(NamedTuple):
    """The bytes from `start` up to but not including `stop`."""

    start: int
    stop: int


class RangeNotSatisfiable(Exception):
    """Nothing of the file lies in the range that was asked for."""


def parse_range(headers: Mapping[str, str], size: int, etag: str) -> ByteRange | None:
    """The part to send, or None for all of it.

    What cannot be understood is ignored, as are several ranges at once; a range of a file that has
    changed since is ignored too.
    """
    asked = headers.get("range", "")
    match = _RANGE_HEADER.fullmatch(asked.replace(" ", "").lower())
    if match is None or not (match[1] or match[2]):
        return None
    if headers.get("if-range", etag).strip() != etag:
        return None
    part = _resolve_bounds(match[1], match[2], size)
    if part is None:
        return None
    if part.start >= part.stop:
        raise RangeNotSatisfiable
    return part


def _resolve_bounds(first: str, last: str, size: int) -> ByteRange | None:
    if not first:
        return ByteRange(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    return ByteRange(int(first), min(size, int(last) + 1) if last else size)
