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
from tinkex.server.http.request_context import CallerIdentity, Services, run_in_thread
from tinkex.store import keys
from tinkex.store.records import TenantRecord

ISSUER = "passport-tinkex"
MISSING_KEY = "the X-API-Key header is missing; send your key in it"
INVALID_KEY = "the API key is wrong or was revoked; check it, or ask for a new one"
EXPIRED_TOKEN = "the token has expired; exchange your key for a new one"
#: Nothing longer is a credential of ours.
MAX_CREDENTIAL_CHARS = 4096
_JWT_HEADER = {"alg": "HS256", "typ": "JWT"}


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


_CLAIMS_DECODER = msgspec.json.Decoder(Claims)


def read_credential(headers: Mapping[str, str]) -> str:
    """What the caller shows: X-API-Key, or else a bearer token; empty if nothing."""
    key = headers.get("x-api-key")
    if key:
        return key.strip()
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def authenticate(services: Services, headers: Mapping[str, str]) -> CallerIdentity:
    """Who asks; AuthenticationError if nobody can tell."""
    credential = read_credential(headers)
    if not credential:
        raise AuthenticationError(MISSING_KEY)
    found = await _resolve_credential(services, credential)
    if isinstance(found, CallerIdentity):
        return found
    raise AuthenticationError(found)


async def identify(services: Services, credential: str) -> CallerIdentity | None:
    """Whose a credential is, or None."""
    found = await _resolve_credential(services, credential)
    return found if isinstance(found, CallerIdentity) else None


async def _resolve_credential(services: Services, credential: str) -> CallerIdentity | str:
    """The credential's owner, or the sentence that refuses it; both are remembered for a moment."""
    if len(credential) > MAX_CREDENTIAL_CHARS:
        return INVALID_KEY
    memory, digest = services.cache, keys.hash_key(credential)
    known = memory.identities.get(digest) or memory.rejections.get(digest)
    if known is not None:
        return known
    found = await run_in_thread(_load_identity, services, credential)
    if isinstance(found, CallerIdentity):
        memory.identities.put(digest, found)
    else:
        memory.rejections.put(digest, found)
    return found


def _load_identity(services: Services, credential: str) -> CallerIdentity | str:
    """The credential's owner, or the sentence that refuses it."""
    if credential.startswith(keys.KEY_PREFIX):
        key = services.database.read(lambda db: keys.find_by_secret(db, credential))
        if key is None:
            return INVALID_KEY
        return CallerIdentity(tenant_id=key.tenant_id, key_id=key.id)
    claims = read_token(services.secret, credential)
    if claims is None:
        return INVALID_KEY
    if claims.ends_at <= clock.now():
        return EXPIRED_TOKEN
    key = services.database.read(lambda db: keys.find_by_id(db, claims.key_id))
    if key is None or key.revoked_at is not None or key.tenant_id != claims.tenant:
        return INVALID_KEY
    return CallerIdentity(tenant_id=key.tenant_id, key_id=key.id, expires_at=claims.ends_at)


# --- tokens --------------------------------------------------------------------------------
def issue_token(
    secret: bytes, identity: CallerIdentity, tenant: TenantRecord, seconds: float
) -> str:
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
    signed = f"{_encode_segment(_JWT_HEADER)}.{_encode_segment(claims)}"
    return f"{signed}.{_base64url(_signature(secret, signed))}"


def read_token(secret: bytes, token: str) -> Claims | None:
    """What a token says, if it was signed here; whether it has expired is not asked."""
    signed, _, signature = token.rpartition(".")
    expected = _base64url(_signature(secret, signed)).encode()
    if not hmac.compare_digest(signature.encode(), expected):
        return None
    head, _, body = signed.partition(".")
    # The signature is ours, so the rest is what we wrote; but a token is never believed in parts.
    if head != _encode_segment(_JWT_HEADER):
        return None
    try:
        return _CLAIMS_DECODER.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (msgspec.DecodeError, ValueError):
        return None


def _signature(secret: bytes, signed: str) -> bytes:
    # Set apart from what else the secret signs, such as promises and URLs.
    key = hmac.digest(secret, b"tokens", "sha256")
    return hmac.new(key, signed.encode(), hashlib.sha256).digest()


def _encode_segment(content: object) -> str:
    return _base64url(msgspec.json.encode(content))


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
