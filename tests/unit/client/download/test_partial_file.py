"""Partial files: expected digests, resume information, files left on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.client.download.partial_file import FileDigest, PartialFile, ResumeInfo
from tinkex.errors import InvalidInput


@pytest.mark.parametrize("digest", ["", "abc", "g" * 64, "0" * 63])
def test_invalid_digest_is_rejected(digest: str) -> None:
    with pytest.raises(InvalidInput, match=repr(digest)):
        FileDigest(sha256=digest)
    with pytest.raises(InvalidInput, match="-1"):
        FileDigest(num_bytes=-1)
    with pytest.raises(InvalidInput, match="Invalid file size"):
        FileDigest(num_bytes=10**400)


@pytest.mark.parametrize(
    ("one", "other", "agrees"),
    [
        (FileDigest(), FileDigest(num_bytes=1, sha256="a" * 64), True),
        (FileDigest(num_bytes=1), FileDigest(num_bytes=1, sha256="a" * 64), True),
        (FileDigest(num_bytes=1), FileDigest(num_bytes=2), False),
        (FileDigest(sha256="a" * 64), FileDigest(sha256="A" * 64), True),
        (FileDigest(sha256="a" * 64), FileDigest(sha256="b" * 64), False),
    ],
)
def test_digest_consistency_is_symmetric(one: FileDigest, other: FileDigest, agrees: bool) -> None:
    assert one.is_consistent_with(other) is other.is_consistent_with(one) is agrees


@pytest.mark.parametrize(
    ("headers", "validator", "num_bytes"),
    [
        ({"etag": '"a"', "last-modified": "Mon", "content-length": "5"}, '"a"', 5),
        ({"etag": 'W/"a"', "last-modified": "Mon"}, "Mon", None),
        ({"etag": 'W/"a"', "content-length": "-5"}, None, None),
        ({"etag": '"a"', "content-length": "5", "content-encoding": "gzip"}, None, None),
        ({"etag": '"a"', "content-length": "5", "content-encoding": "identity"}, '"a"', 5),
        ({"content-length": "9" * 5000}, None, None),
        ({"content-length": "\u0665"}, None, None),
        ({}, None, None),
    ],
)
def test_resume_info_from_headers(
    headers: dict[str, str], validator: str | None, num_bytes: int | None
) -> None:
    info = ResumeInfo.from_headers(headers)
    assert (info.validator, info.num_bytes) == (validator, num_bytes)


def test_empty_partial_file_is_deleted(tmp_path: Path) -> None:
    part = PartialFile(tmp_path / "sub" / "x", FileDigest())
    part.open()
    part.restart(ResumeInfo(etag='"a"'))
    part.close()
    assert not list((tmp_path / "sub").iterdir())


def test_unreadable_resume_info_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "x.part").write_bytes(b"abc")
    (tmp_path / "x.part.json").write_text("{")
    part = PartialFile(tmp_path / "x", FileDigest())
    part.open()
    assert (part.num_bytes, part.info, part.resume_headers()) == (3, ResumeInfo(), {})
    part.close()
    assert (tmp_path / "x.part").read_bytes() == b"abc"
