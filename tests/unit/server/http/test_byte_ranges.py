from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.http.downloads import ByteRange, RangeNotSatisfiable, parse_range

ETAG = '"v1"'


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-9", ByteRange(0, 10)),
        ("bytes=5-", ByteRange(5, 100)),
        ("bytes=-5", ByteRange(95, 100)),
        ("bytes=-500", ByteRange(0, 100)),
        ("bytes=90-500", ByteRange(90, 100)),
        ("BYTES = 1 - 2", ByteRange(1, 3)),
        ("", None),
        ("bytes=", None),
        ("bytes=-", None),
        ("bytes=9-5", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        ("bytes=٣-٤", None),
    ],
)
def test_parse_range(asked: str, part: ByteRange | None) -> None:
    assert parse_range({"range": asked}, 100, ETAG) == part


@pytest.mark.parametrize("asked", ["bytes=100-", "bytes=200-300", "bytes=-0"])
def test_unsatisfiable_range_is_rejected(asked: str) -> None:
    with pytest.raises(RangeNotSatisfiable):
        parse_range({"range": asked}, 100, ETAG)


def test_changed_file_is_sent_completely() -> None:
    asked = {"range": "bytes=5-", "if-range": '"v0"'}

    assert parse_range(asked, 100, ETAG) is None
    assert parse_range(asked | {"if-range": ETAG}, 100, ETAG) == ByteRange(5, 100)
    assert parse_range(asked | {"if-range": "Sun, 06 Nov 1994 08:49:37 GMT"}, 100, ETAG) is None


@given(st.text(), st.integers(0, 2**40))
def test_any_range_stays_within_file(text: str, size: int) -> None:
    for asked in (text, f"bytes={text}"):
        with contextlib.suppress(RangeNotSatisfiable):
            part = parse_range({"range": asked}, size, ETAG)
            assert part is None or 0 <= part.start < part.stop <= size


@given(st.integers(0, 2**60), st.integers(0, 2**60), st.integers(0, 2**40))
def test_range_is_within_requested_bounds(first: int, last: int, size: int) -> None:
    with contextlib.suppress(RangeNotSatisfiable):
        part = parse_range({"range": f"bytes={first}-{last}"}, size, ETAG)
        assert part is None or first == part.start < part.stop <= min(last + 1, size)
