"""Whose request it is: API keys, and the short-lived tokens they are exchanged for."""

from __future__ import annotations

import base64
import hashlib
import hmac
import zlib
from collections.abc import Iterable

import msgspec

from tinkex import clock
from tinkex.testing.answers import Refusal

_SECRET = b"stub server, not a secret"
_HEADER = {"alg": "HS256", "typ": "JWT"}
#: Everybody, on a server without keys.
ANYBODY = ""


class Tenants:
    """The keys that open this server; None means that any key does, or none."""

    def __init__(self, api_keys: Iterable[str] | None, token_seconds: float) -> None:
        self._keys = None if api_keys is None else set(api_keys)
        self._token_seconds = token_seconds
        self._key_by_token: dict[str, tuple[str, float]] = {}
        self._num_tokens = 0

    def identify(self, credential: str | None) -> str:
        """The tenant behind a key or token; 401 if there is none."""
        if self._keys is None:
            return ANYBODY
        if credential in self._keys:
            return credential
        if not credential:
            raise Refusal(401, "the X-API-Key header is missing")
        key, expires_at = self._key_by_token.get(credential, ("", 0.0))
        if key not in self._keys:
            raise Refusal(401, f"invalid API key {credential[:8]}...")
        if expires_at <= clock.now():
            raise Refusal(401, "Invalid JWT: it has expired")
        return key

    def issue_token(self, tenant: str) -> str:
        """A JWT that stands for the tenant until it expires."""
        now = clock.now()
        expires_at = now + self._token_seconds
        self._num_tokens += 1
        claims = {
            "sub": owner_urn(tenant),
            "org_id": "stub-org",
            "email": "user@example.com",
            "iss": "passport-stub",
            "iat": int(now),
            "exp": expires_at,
            "jti": str(self._num_tokens),
        }
        signed = f"{_part(_HEADER)}.{_part(claims)}"
        digest = hmac.new(_SECRET, signed.encode(), hashlib.sha256).digest()
        token = f"{signed}.{_text(digest)}"
        self._key_by_token[token] = (tenant, expires_at)
        return token

    def revoke(self, tenant: str) -> None:
        """Make a key open nothing any more."""
        if self._keys is not None:
            self._keys.discard(tenant)


def owner_urn(tenant: str) -> str:
    """How a tenant is called in answers; the key itself is never shown."""
    return f"tml:user:{zlib.crc32(tenant.encode()):08x}"


def _part(content: dict[str, object] | dict[str, str]) -> str:
    return _text(msgspec.json.encode(content))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
