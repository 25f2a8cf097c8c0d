"""Keys and tokens."""

from __future__ import annotations

import base64
import json
import time

import pytest

from tinkex.testing.answers import Refusal
from tinkex.testing.tenants import Tenants, owner_urn


def test_keys_open_and_strangers_do_not() -> None:
    tenants = Tenants({"tml-a"}, token_seconds=60.0)
    assert tenants.identify("tml-a") == "tml-a"
    for credential in (None, "", "tml-b", "eyJ.x.y"):
        with pytest.raises(Refusal) as refusal:
            tenants.identify(credential)
        assert refusal.value.status == 401
    assert Tenants(None, 60.0).identify(None) == Tenants(None, 60.0).identify("tml-x")


def test_a_token_stands_for_its_key_until_it_expires_or_the_key_is_revoked() -> None:
    tenants = Tenants({"tml-a"}, token_seconds=60.0)
    token = tenants.issue_token("tml-a")
    assert token != tenants.issue_token("tml-a")
    assert tenants.identify(token) == "tml-a"
    part = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    assert claims["exp"] == pytest.approx(time.time() + 60.0, abs=5.0)
    assert claims["sub"] == owner_urn("tml-a")
    assert "tml-a" not in str(claims)
    expired = Tenants({"tml-a"}, token_seconds=-1.0)
    with pytest.raises(Refusal, match="expired"):
        expired.identify(expired.issue_token("tml-a"))
    tenants.revoke("tml-a")
    with pytest.raises(Refusal):
        tenants.identify(token)
