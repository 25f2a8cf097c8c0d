"""Changes that only the operator of a server may make: API keys of tenants and their quotas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinkex.errors import BadRequestError, NotFoundError, PermissionDeniedError
from tinkex.ids import MAX_LABEL_CHARS, is_label
from tinkex.server.config import DEFAULT_TENANT
from tinkex.server.http.request_context import CallerIdentity
from tinkex.server.http.store_access import record_event
from tinkex.store import keys, quotas
from tinkex.store.database import Connection
from tinkex.store.quotas import Quotas
from tinkex.store.records import ApiKeyRecord, TenantRecord

MAX_NOTE_CHARS = 1000
MAX_QUOTA = 2**62
OPERATOR_ONLY = f"only the operator, the tenant {DEFAULT_TENANT!r} of this server, can do this"


def is_operator(tenant: TenantRecord) -> bool:
    """Whether a tenant operates the server: it owns the key that was created with the home."""
    return tenant.name == DEFAULT_TENANT


def require_operator(tenant: TenantRecord) -> None:
    """Raise PermissionDeniedError unless the tenant operates the server."""
    if not is_operator(tenant):
        raise PermissionDeniedError(OPERATOR_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedKey:
    """A new key; its secret is not stored."""

    key: ApiKeyRecord
    tenant: str
    secret: str


def create_key(
    db: Connection, operator: TenantRecord, tenant: str, name: str, note: str, now: float
) -> CreatedKey:
    """Create a key, and its tenant if it does not exist."""
    require_operator(operator)
    _check_label("tenant", tenant)
    _check_label("name", name)
    if len(note) > MAX_NOTE_CHARS or not note.isprintable():
        raise BadRequestError(f"note must have at most {MAX_NOTE_CHARS:,} printable characters")
    owner = keys.get_or_create_tenant(db, tenant, now)
    secret = keys.generate_key()
    key = keys.insert_key(db, owner.id, secret, name=name, note=note or None, now=now)
    return CreatedKey(key=key, tenant=owner.name, secret=secret)


def revoke_key(db: Connection, operator: TenantRecord, key_id: int, now: float) -> None:
    """Revoke a key; the last key of the operator stays, because it is needed to create others."""
    require_operator(operator)
    key = keys.find_by_id(db, key_id)
    if key is None or key.revoked_at is not None:
        raise NotFoundError(f"no active key has the id {key_id}")
    if key.tenant_id == operator.id and keys.count_active(db, operator.id) == 1:
        raise BadRequestError(
            f"key {key_id} is the last one of the operator; create another one before you revoke it"
        )
    keys.revoke(db, key_id, now)


def set_quotas(
    db: Connection,
    operator: TenantRecord,
    identity: CallerIdentity,
    tenant: str,
    limits: Mapping[str, int | None],
) -> None:
    """Replace the quotas of a tenant; None follows the server's settings, 0 is unlimited."""
    require_operator(operator)
    record = keys.find_tenant_by_name(db, tenant) if is_label(tenant) else None
    if record is None:
        raise NotFoundError(f"no tenant is named {tenant!r:.{MAX_LABEL_CHARS}}")
    unknown = sorted(set(limits) - set(Quotas.names()))
    if unknown:
        raise BadRequestError(
            f"unknown quota {unknown[0]!r:.80}; known: {', '.join(Quotas.names())}"
        )
    own = {name: limit for name, limit in limits.items() if limit is not None}
    for name, limit in own.items():
        if not 0 <= limit <= MAX_QUOTA:
            raise BadRequestError(f"{name} is {limit}; expected 0 to {MAX_QUOTA:,}")
    quotas.set_overrides(db, record.id, own or None)
    record_event(db, identity, "quotas_set", tenant=record.name, quotas=own)


def _check_label(what: str, text: str) -> None:
    if not is_label(text):
        raise BadRequestError(
            f"{what} is {text!r:.{MAX_LABEL_CHARS}}; expected 1 to {MAX_LABEL_CHARS} printable "
            "characters without surrounding spaces"
        )
