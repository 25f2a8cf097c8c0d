"""Whose request it is: API keys, and the short-lived tokens they are exchanged for."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping

import msgspec

from tinkex import clock
from tinkex.errors import AuthenticationError
from tinkex.ids import new_id
from tinkex.server.call import Identity, Services, in_thread
from tinkex.store import keys
from tinkex.store.records import TenantRecord

ISSUER = "passport-tinkex"
MISSING = "the X-API-Key header is missing; send your key in it"
WRONG = "the API key is wrong or was revoked; check it, or ask for a new one"
EXPIRED = "the token has expired; exchange your key for a new one"
#: Nothing longer is a credential of ours.
MAX_CREDENTIAL_CHARS = 4096
_HEADER = {"alg": "HS256", "typ": "JWT"}


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What a token says."""

    sub: str
    """The tenant's urn."""
    org_id: str
    email: str
    iss: str
    iat: int
    exp: int
    """When it expires by the wall clock, for the client."""
    jti: str
    tenant: str
    """The tenant's id."""
    key_id: int
    """The key it was exchanged for; a revoked key ends its tokens."""
    until: int = 0
    """When it expires by the server's clock; tokens of earlier versions have `exp` alone."""

    @property
    def ends_at(self) -> int:
        """When the server stops accepting it, by `clock.now()`."""
        return self.until or self.exp


_CLAIMS = msgspec.json.Decoder(Claims)


def credential_of(headers: Mapping[str, str]) -> str:
    """What the caller shows: X-API-Key, or else a bearer token; empty if nothing."""
    key = headers.get("x-api-key")
    if key:
        return key.strip()
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def authenticate(services: Services, headers: Mapping[str, str]) -> Identity:
    """Who asks; AuthenticationError if nobody can tell."""
    credential = credential_of(headers)
    if not credential:
        raise AuthenticationError(MISSING)
    found = await _find(services, credential)
    if isinstance(found, Identity):
        return found
    raise AuthenticationError(found)


async def identify(services: Services, credential: str) -> Identity | None:
    """Whose a credential is, or None."""
    found = await _find(services, credential)
    return found if isinstance(found, Identity) else None


async def _find(services: Services, credential: str) -> Identity | str:
    """The credential's owner, or the sentence that refuses it; both are remembered for a moment."""
    if len(credential) > MAX_CREDENTIAL_CHARS:
        return WRONG
    memory, digest = services.memory, keys.hash_key(credential)
    known = memory.known.get(digest) or memory.unknown.get(digest)
    if known is not None:
        return known
    found = await in_thread(_look_up, services, credential)
    if isinstance(found, Identity):
        memory.known.put(digest, found)
    else:
        memory.unknown.put(digest, found)
    return found


def _look_up(services: Services, credential: str) -> Identity | str:
    """The credential's owner, or the sentence that refuses it."""
    if credential.startswith(keys.KEY_PREFIX):
        key = services.database.read(lambda db: keys.find_by_secret(db, credential))
        if key is None:
            return WRONG
        return Identity(tenant_id=key.tenant_id, key_id=key.id)
    claims = read_token(services.secret, credential)
    if claims is None:
        return WRONG
    if claims.ends_at <= clock.now():
        return EXPIRED
    key = services.database.read(lambda db: keys.find_by_id(db, claims.key_id))
    if key is None or key.revoked_at is not None or key.tenant_id != claims.tenant:
        return WRONG
    return Identity(tenant_id=key.tenant_id, key_id=key.id, expires_at=claims.ends_at)


# --- tokens --------------------------------------------------------------------------------
def issue_token(secret: bytes, identity: Identity, tenant: TenantRecord, seconds: float) -> str:
    """A token that stands for a key until it expires, no later than the caller's credential.

    So a stolen token cannot be renewed for ever: only the key itself starts a new lifetime.
    """
    now = clock.now()
    ends_at = now + seconds
    if identity.expires_at is not None:
        ends_at = min(ends_at, identity.expires_at)
    claims = Claims(
        sub=identity.urn,
        org_id=tenant.id,
        # A tenant is called by an address or by any other name; only the first is an email.
        email=tenant.name if "@" in tenant.name else "",
        iss=ISSUER,
        iat=int(clock.to_wall_time(now)),
        exp=int(clock.to_wall_time(ends_at)),
        jti=new_id(),
        tenant=identity.tenant_id,
        key_id=identity.key_id,
        until=int(ends_at),
    )
    signed = f"{_part(_HEADER)}.{_part(claims)}"
    return f"{signed}.{_text(_signature(secret, signed))}"


def read_token(secret: bytes, token: str) -> Claims | None:
    """What a token says, if it was signed here; whether it has expired is not asked."""
    signed, _, signature = token.rpartition(".")
    expected = _text(_signature(secret, signed)).encode()
    if not hmac.compare_digest(signature.encode(), expected):
        return None
    head, _, body = signed.partition(".")
    # The signature is ours, so the rest is what we wrote; but a token is never believed in parts.
    if head != _part(_HEADER):
        return None
    try:
        return _CLAIMS.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (msgspec.DecodeError, ValueError):
        return None


def _signature(secret: bytes, signed: str) -> bytes:
    # Set apart from what else the secret signs, such as promises and URLs.
    key = hmac.digest(secret, b"tokens", "sha256")
    return hmac.new(key, signed.encode(), hashlib.sha256).digest()


def _part(content: object) -> str:
    return _text(msgspec.json.encode(content))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
