"""Tenants and their API keys. Only the digest of a key is stored."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import sqlalchemy as sa

from tinkex.errors import InvalidInput
from tinkex.ids import new_id
from tinkex.store import accounting
from tinkex.store.dialects import insert_or_ignore
from tinkex.store.records import ApiKeyRecord, AuditRecord, TenantRecord
from tinkex.store.schema import api_keys, tenants

KEY_PREFIX = "tml-"
_SECRET_BYTES = 32
_HINT_LENGTH = 8


def generate_key() -> str:
    """Generate a random API key."""
    return KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def hash_key(secret: str) -> str:
    """Return the stored digest of a key; keys are long and random, so a plain hash is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def get_or_create_tenant(db: sa.Connection, name: str, now: float) -> TenantRecord:
    """Return the tenant of this name, created if missing."""
    values = {"id": new_id(), "name": name, "created_at": now}
    db.execute(insert_or_ignore(db, tenants, "name"), values)
    return TenantRecord.from_row(db.execute(sa.select(tenants).where(tenants.c.name == name)).one())


def ensure_tenant(db: sa.Connection, tenant_id: str, now: float) -> None:
    """Create a tenant of this id and name, if it is missing."""
    values = {"id": tenant_id, "name": tenant_id, "created_at": now}
    db.execute(insert_or_ignore(db, tenants, "name"), values)


def find_tenant_by_name(db: sa.Connection, name: str) -> TenantRecord | None:
    """Return a tenant by name."""
    row = db.execute(sa.select(tenants).where(tenants.c.name == name)).one_or_none()
    return None if row is None else TenantRecord.from_row(row)


def find_tenant(db: sa.Connection, tenant_id: str) -> TenantRecord | None:
    """Return a tenant by id."""
    row = db.execute(sa.select(tenants).where(tenants.c.id == tenant_id)).one_or_none()
    return None if row is None else TenantRecord.from_row(row)


def list_tenants(db: sa.Connection, search: str, limit: int) -> tuple[list[TenantRecord], int]:
    """Return the tenants whose name contains a text, by name, and how many there are."""
    is_match = tenants.c.name.icontains(search, autoescape=True)
    total = db.scalar(sa.select(sa.func.count()).select_from(tenants).where(is_match)) or 0
    rows = db.execute(sa.select(tenants).where(is_match).order_by(tenants.c.name).limit(limit))
    return [TenantRecord.from_row(row) for row in rows], total


def insert_key(
    db: sa.Connection,
    tenant_id: str,
    secret: str,
    *,
    name: str,
    note: str | None = None,
    now: float,
) -> ApiKeyRecord:
    """Register a key of a tenant; a registered key stays unchanged."""
    values = {
        "tenant_id": tenant_id,
        "name": name,
        "note": note,
        "hint": secret[:_HINT_LENGTH] + "…",
        "digest": hash_key(secret),
        "created_at": now,
    }
    has_digest = api_keys.c.digest == values["digest"]
    is_new = _find_one(db, has_digest) is None
    db.execute(insert_or_ignore(db, api_keys, "digest"), values)
    key = _find_one(db, has_digest)
    assert key is not None
    if key.revoked_at is not None:
        raise InvalidInput(f"The key {key.hint} was revoked; use a new one")
    if key.tenant_id != tenant_id:
        raise InvalidInput(f"The key {key.hint} belongs to another tenant; use a new one")
    if is_new:
        _insert_audit(db, key, "api_key_created", now)
    return key


def _insert_audit(db: sa.Connection, key: ApiKeyRecord, event: str, now: float) -> None:
    details = {"key_id": key.id, "name": key.name, "hint": key.hint}
    entry = AuditRecord(tenant_id=key.tenant_id, at=now, event=event, details=details)
    accounting.insert_audit(db, entry)


def _find_one(db: sa.Connection, condition: sa.ColumnElement[bool]) -> ApiKeyRecord | None:
    row = db.execute(sa.select(api_keys).where(condition)).one_or_none()
    return None if row is None else ApiKeyRecord.from_row(row)


def find_by_secret(db: sa.Connection, secret: str) -> ApiKeyRecord | None:
    """Return the key that matches a secret, unless it was revoked."""
    has_digest = api_keys.c.digest == hash_key(secret)
    return _find_one(db, sa.and_(has_digest, api_keys.c.revoked_at.is_(None)))


def find_by_id(db: sa.Connection, key_id: int) -> ApiKeyRecord | None:
    """Return a key by id, revoked or not."""
    return _find_one(db, api_keys.c.id == key_id)


def find_active_id(db: sa.Connection, tenant_id: str) -> int | None:
    """Return the id of the tenant's oldest key that was not revoked."""
    is_active = sa.and_(api_keys.c.tenant_id == tenant_id, api_keys.c.revoked_at.is_(None))
    key_id: int | None = db.scalar(sa.select(sa.func.min(api_keys.c.id)).where(is_active))
    return key_id


def list_keys(db: sa.Connection) -> list[tuple[ApiKeyRecord, TenantRecord]]:
    """Return all keys with their tenants, oldest first."""
    owners = {row.id: TenantRecord.from_row(row) for row in db.execute(sa.select(tenants))}
    rows = db.execute(sa.select(api_keys).order_by(api_keys.c.id))
    return [(ApiKeyRecord.from_row(row), owners[row.tenant_id]) for row in rows]


def list_keys_of(db: sa.Connection, tenant_ids: Sequence[str], limit: int) -> list[ApiKeyRecord]:
    """Return the keys of tenants: first those that are not revoked, then the newest first."""
    query = sa.select(api_keys).where(api_keys.c.tenant_id.in_(tenant_ids))
    ordered = query.order_by(api_keys.c.revoked_at.is_not(None), api_keys.c.id.desc())
    return [ApiKeyRecord.from_row(row) for row in db.execute(ordered.limit(limit))]


def count_active(db: sa.Connection, tenant_id: str) -> int:
    """Return the number of a tenant's keys that are not revoked."""
    query = sa.select(sa.func.count()).where(
        api_keys.c.tenant_id == tenant_id, api_keys.c.revoked_at.is_(None)
    )
    return db.scalar(query) or 0


def revoke(db: sa.Connection, key_id: int, now: float) -> bool:
    """Revoke a key; returns False if it does not exist or was revoked."""
    is_active = sa.and_(api_keys.c.id == key_id, api_keys.c.revoked_at.is_(None))
    if not db.execute(sa.update(api_keys).where(is_active).values(revoked_at=now)).rowcount:
        return False
    key = find_by_id(db, key_id)
    assert key is not None
    _insert_audit(db, key, "api_key_revoked", now)
    return True


def has_keys(db: sa.Connection) -> bool:
    """Return whether an unrevoked key exists."""
    query = sa.select(api_keys.c.id).where(api_keys.c.revoked_at.is_(None)).limit(1)
    return db.scalar(query) is not None
