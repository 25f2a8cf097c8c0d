from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import PermissionDeniedError
from tinkex.server.signing import FILES, Place, Shelf, check, sign

SECRET = b"secret"
PLACE = Place(Shelf.FILE, "c1", "a/b.safetensors")


def parts(url: str) -> tuple[str, str]:
    query = parse_qs(urlsplit(url).query)
    return query["expires"][0], query["signature"][0]


def test_a_signed_url_opens_its_place_until_it_expires() -> None:
    url = sign(SECRET, "http://host", PLACE, 1000)

    assert url.startswith(f"http://host{FILES}/checkpoints/c1/a/b.safetensors?")
    check(SECRET, PLACE, *parts(url), now=999.9)
    with pytest.raises(PermissionDeniedError, match="has expired"):
        check(SECRET, PLACE, *parts(url), now=1000.0)


@pytest.mark.parametrize(
    "place",
    [
        Place(Shelf.ARCHIVE, "c1", "a/b.safetensors"),
        Place(Shelf.FILE, "c2", "a/b.safetensors"),
        Place(Shelf.FILE, "c1", "a/b"),
        Place(Shelf.FILE, "c1/a", "b.safetensors"),
    ],
)
def test_a_signature_is_good_for_its_own_place_alone(place: Place) -> None:
    with pytest.raises(PermissionDeniedError, match="not valid"):
        check(SECRET, place, *parts(sign(SECRET, "", PLACE, 1000)), now=0)


def test_a_later_expiry_cannot_be_written_in() -> None:
    _, signature = parts(sign(SECRET, "", PLACE, 1000))

    with pytest.raises(PermissionDeniedError, match="not valid"):
        check(SECRET, PLACE, "2000", signature, now=0)


@given(st.text(), st.text())
def test_rubbish_is_refused_in_a_sentence(expires: str, signature: str) -> None:
    with pytest.raises(PermissionDeniedError):
        check(SECRET, PLACE, expires, signature, now=0)


@given(st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), min_size=1))
def test_any_file_name_survives_its_url(name: str) -> None:
    place = Place(Shelf.FILE, "c1", name)
    url = sign(SECRET, "", place, 1000)

    path = url.partition("?")[0]
    assert unquote(path.removeprefix(f"{FILES}/checkpoints/c1/")) == name
    check(SECRET, place, *parts(url[len(path) :]), now=0)
