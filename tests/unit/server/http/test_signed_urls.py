from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import PermissionDeniedError
from tinkex.server.http.downloads import (
    FILES_PREFIX,
    FileArea,
    FileRef,
    sign_url,
    verify_signed_url,
)

SECRET = b"secret"
PLACE = FileRef(FileArea.FILE, "c1", "a/b.safetensors")


def parts(url: str) -> tuple[str, str]:
    query = parse_qs(urlsplit(url).query)
    return query["expires"][0], query["signature"][0]


def test_signed_url_is_valid_until_expiry() -> None:
    url = sign_url(SECRET, "http://host", PLACE, 1000)

    assert url.startswith(f"http://host{FILES_PREFIX}/checkpoints/c1/a/b.safetensors?")
    verify_signed_url(SECRET, PLACE, *parts(url), now=999.9)
    with pytest.raises(PermissionDeniedError, match="has expired"):
        verify_signed_url(SECRET, PLACE, *parts(url), now=1000.0)


@pytest.mark.parametrize(
    "place",
    [
        FileRef(FileArea.ARCHIVE, "c1", "a/b.safetensors"),
        FileRef(FileArea.FILE, "c2", "a/b.safetensors"),
        FileRef(FileArea.FILE, "c1", "a/b"),
        FileRef(FileArea.FILE, "c1/a", "b.safetensors"),
    ],
)
def test_signature_is_valid_for_one_file_only(place: FileRef) -> None:
    with pytest.raises(PermissionDeniedError, match="not valid"):
        verify_signed_url(SECRET, place, *parts(sign_url(SECRET, "", PLACE, 1000)), now=0)


def test_tampered_expiry_is_rejected() -> None:
    _, signature = parts(sign_url(SECRET, "", PLACE, 1000))

    with pytest.raises(PermissionDeniedError, match="not valid"):
        verify_signed_url(SECRET, PLACE, "2000", signature, now=0)


@given(st.text(), st.text())
def test_invalid_signature_is_rejected(expires: str, signature: str) -> None:
    with pytest.raises(PermissionDeniedError):
        verify_signed_url(SECRET, PLACE, expires, signature, now=0)


@given(st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), min_size=1))
def test_any_file_name_round_trips(name: str) -> None:
    place = FileRef(FileArea.FILE, "c1", name)
    url = sign_url(SECRET, "", place, 1000)

    path = url.partition("?")[0]
    assert unquote(path.removeprefix(f"{FILES_PREFIX}/checkpoints/c1/")) == name
    verify_signed_url(SECRET, place, *parts(url[len(path) :]), now=0)
