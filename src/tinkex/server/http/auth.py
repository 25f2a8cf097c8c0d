"""Authentication by API keys and by the short-lived tokens that they are exchanged for."""

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
INVALID_KEY = "the API key is wrong or was revoked; check it or request a new one"
EXPIRED_TOKEN = "the token has expired; exchange your key for a new one"
#: Longer credentials are rejected without a lookup.
MAX_CREDENTIAL_CHARS = 4096
_JWT_HEADER = {"alg": "HS256", "typ": "JWT"}


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """The claims of a token."""

    sub: str
    """The tenant's urn."""
    org_id: str
    email: str
    iss: str
    iat: int
    exp: int
    """Expiry on the wall clock, for the client."""
    jti: str
    tenant: str
    """The tenant's id."""
    key_id: int
    """The API key it was exchanged for; revoking the key also revokes its tokens."""
    until: int = 0
    """Expiry on the server's clock; tokens of earlier versions have only `exp`."""

    @property
    def ends_at(self) -> int:
        """Expiry that the server checks, in terms of `clock.now()`."""
        return self.until or self.exp


_CLAIMS_DECODER = msgspec.json.Decoder(Claims)


def read_credential(headers: Mapping[str, str]) -> str:
    """Return the X-API-Key header, otherwise the bearer token, otherwise an empty string."""
    key = headers.get("x-api-key")
    if key:
        return key.strip()
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def authenticate(services: Services, headers: Mapping[str, str]) -> CallerIdentity:
    """Identify the caller; raises AuthenticationError if the credential is missing or invalid."""
    credential = read_credential(headers)
    if not credential:
        raise AuthenticationError(MISSING_KEY)
    identity_or_error = await _resolve_credential(services, credential)
    if isinstance(identity_or_error, CallerIdentity):
        return identity_or_error
    raise AuthenticationError(identity_or_error)


async def identify(services: Services, credential: str) -> CallerIdentity | None:
    """Return the owner of a credential, or None if it is invalid."""
    identity_or_error = await _resolve_credential(services, credential)
    return identity_or_error if isinstance(identity_or_error, CallerIdentity) else None


async def _resolve_credential(services: Services, credential: str) -> CallerIdentity | str:
    """Return the credential's owner or an error message; both are cached for a short time."""
    if len(credential) > MAX_CREDENTIAL_CHARS:
        return INVALID_KEY
    cache, digest = services.cache, keys.hash_key(credential)
    cached = cache.identities.get(digest) or cache.rejections.get(digest)
    if cached is not None:
        return cached
    identity_or_error = await run_in_thread(_load_identity, services, credential)
    if isinstance(identity_or_error, CallerIdentity):
        cache.identities.put(digest, identity_or_error)
    else:
        cache.rejections.put(digest, identity_or_error)
    return identity_or_error


def _load_identity(services: Services, credential: str) -> CallerIdentity | str:
    """Look up the credential's owner in the store; return an error message if it is invalid."""
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
    """Create a token that expires no later than the caller's credential.

    So a stolen token cannot be renewed indefinitely: only the key starts a new lifetime.
    """
    now = clock.now()
    ends_at = now + seconds
    if identity.expires_at is not None:
        ends_at = min(ends_at, identity.expires_at)
    claims = Claims(
        sub=identity.urn,
        org_id=tenant.id,
        # A tenant's name may be an email address or anything else.
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
    """Return the claims of a token signed by this server, else None; does not check expiry."""
    signed, _, signature = token.rpartition(".")
    expected = _base64url(_signature(secret, signed)).encode()
    if not hmac.compare_digest(signature.encode(), expected):
        return None
    head, _, body = signed.partition(".")
    # Defence in depth: a valid signature already implies this header.
    if head != _encode_segment(_JWT_HEADER):
        return None
    try:
        return _CLAIMS_DECODER.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (msgspec.DecodeError, ValueError):
        return None


def _signature(secret: bytes, signed: str) -> bytes:
    # A derived key, separate from other uses of the secret such as job ids and URLs.
    key = hmac.digest(secret, b"tokens", "sha256")
    return hmac.new(key, signed.encode(), hashlib.sha256).digest()


def _encode_segment(content: object) -> str:
    return _base64url(msgspec.json.encode(content))


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
