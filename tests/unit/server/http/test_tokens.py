from __future__ import annotations

import base64
import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex import clock
from tinkex.server.http.auth import issue_token, read_credential, read_token
from tinkex.server.http.request_context import CallerIdentity
from tinkex.store.records import TenantRecord

SECRET = b"s" * 32
WHO = CallerIdentity(tenant_id="t", key_id=7)
TENANT = TenantRecord(id="t", name="alice", created_at=0.0)


def token(seconds: float = 60.0) -> str:
    return issue_token(SECRET, WHO, TENANT, seconds)


def test_token_round_trip() -> None:
    claims = read_token(SECRET, token())

    assert claims is not None
    assert (claims.tenant, claims.key_id, claims.sub) == ("t", 7, "tml:user:t")
    assert claims.email == ""
    assert claims.exp > time.time()
    assert token().startswith("eyJ")


@pytest.mark.parametrize("jump", [-7200.0, 28 * 3600.0])
def test_token_has_wall_clock_and_server_expiry(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    before, real = clock.now(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    claims = read_token(SECRET, token(seconds=60.0))
    assert claims is not None
    assert claims.exp - claims.iat == 60
    assert abs(claims.iat - (real() + jump)) < 30.0
    assert before + 59.0 <= claims.ends_at <= clock.now() + 60.0


def test_token_of_earlier_version_uses_exp() -> None:
    claims = read_token(SECRET, token())
    assert claims is not None
    assert msgspec.structs.replace(claims, until=0).ends_at == claims.exp


def test_tokens_are_unique() -> None:
    assert token() != token()


@given(st.binary(min_size=1, max_size=64).filter(lambda secret: secret != SECRET))
def test_token_with_other_secret_is_rejected(secret: bytes) -> None:
    assert read_token(secret, token()) is None


@given(st.data())
def test_tampered_token_is_rejected(data: st.DataObject) -> None:
    good = token()
    place = data.draw(st.integers(0, len(good) - 1))
    letter = data.draw(st.sampled_from("AZaz09-_."))
    if letter != good[place]:
        assert read_token(SECRET, good[:place] + letter + good[place + 1 :]) is None


@given(st.text())
def test_arbitrary_text_is_rejected(text: str) -> None:
    assert read_token(SECRET, text) is None


def test_unsigned_token_is_rejected() -> None:
    head = base64.urlsafe_b64encode(json.dumps({"alg": "none", "typ": "JWT"}).encode())
    _, body, signature = token().split(".")
    unsigned = head.rstrip(b"=").decode()

    assert read_token(SECRET, f"{unsigned}.{body}.") is None
    assert read_token(SECRET, f"{unsigned}.{body}.{signature}") is None


def test_api_key_header_has_precedence() -> None:
    both = {"x-api-key": "tml-a", "authorization": "Bearer tml-b"}

    assert read_credential(both) == "tml-a"
    assert read_credential({"authorization": "Bearer tml-b"}) == "tml-b"
    assert read_credential({"x-api-key": "", "authorization": "bearer  tml-b "}) == "tml-b"
    assert read_credential({"authorization": "Basic abc"}) == ""
    assert read_credential({}) == ""
