"""Tenants, API keys and settings of a store."""

from __future__ import annotations

import pytest

from tests.support.store_rows import NOW, add_tenant
from tinkex.errors import InvalidInput
from tinkex.store import accounting, keys, settings
from tinkex.store.database import Database


def test_tenant_is_created_once(database: Database) -> None:
    first = add_tenant(database, "alice")
    assert add_tenant(database, "alice") == first
    assert add_tenant(database, "bob").id != first.id
    assert database.read(lambda db: keys.find_tenant(db, first.id)) == first
    assert database.read(lambda db: keys.find_tenant(db, "nobody")) is None


def test_key_is_valid_until_revoked(database: Database) -> None:
    tenant = add_tenant(database)
    secret = keys.generate_key()
    assert not database.read(keys.has_keys)
    key = database.write(
        lambda db: keys.insert_key(db, tenant.id, secret, name="laptop", note="mine", now=NOW)
    )
    assert (key.name, key.note, key.hint) == ("laptop", "mine", secret[:8] + "…")
    assert database.read(lambda db: keys.find_by_secret(db, secret)) == key
    assert database.read(lambda db: keys.find_by_secret(db, secret + "x")) is None
    assert database.read(keys.has_keys)

    assert database.write(lambda db: keys.revoke(db, key.id, NOW + 1))
    assert not database.write(lambda db: keys.revoke(db, key.id, NOW + 2))
    assert database.read(lambda db: keys.find_by_secret(db, secret)) is None
    revoked = database.read(lambda db: keys.find_by_id(db, key.id))
    assert revoked is not None
    assert revoked.revoked_at == NOW + 1
    assert not database.read(keys.has_keys)
    assert database.read(keys.list_keys) == [(revoked, tenant)]


def test_secret_of_key_is_not_stored(database: Database) -> None:
    secret = keys.generate_key()
    tenant = add_tenant(database)
    database.write(lambda db: keys.insert_key(db, tenant.id, secret, name="n", now=NOW))
    rows = database.read(lambda db: db.exec_driver_sql("SELECT * FROM api_keys").all())
    assert secret not in str(rows)


def test_same_key_is_stored_once(database: Database) -> None:
    tenant = add_tenant(database)
    first = database.write(lambda db: keys.insert_key(db, tenant.id, "tml-a", name="n", now=NOW))
    again = database.write(lambda db: keys.insert_key(db, tenant.id, "tml-a", name="m", now=NOW))
    assert again == first


def test_key_cannot_change_tenant_or_be_restored(database: Database) -> None:
    alice, bob = add_tenant(database, "alice"), add_tenant(database, "bob")
    key = database.write(lambda db: keys.insert_key(db, alice.id, "tml-a", name="n", now=NOW))
    with pytest.raises(InvalidInput, match="belongs to another tenant"):
        database.write(lambda db: keys.insert_key(db, bob.id, "tml-a", name="n", now=NOW))
    database.write(lambda db: keys.revoke(db, key.id, NOW))
    with pytest.raises(InvalidInput, match="was revoked"):
        database.write(lambda db: keys.insert_key(db, alice.id, "tml-a", name="n", now=NOW))


def test_settings_are_stored_and_replaced(database: Database) -> None:
    assert database.read(lambda db: settings.get(db, "models")) is None
    database.write(lambda db: settings.put(db, "models", ["a"]))
    database.write(lambda db: settings.put(db, "models", {"b": [1, None, "ü"]}))
    assert database.read(lambda db: settings.get(db, "models")) == {"b": [1, None, "ü"]}


def test_secret_is_generated_once(database: Database) -> None:
    secret = database.write(settings.get_or_create_secret)
    assert len(secret) == 32
    assert database.write(settings.get_or_create_secret) == secret


def test_key_events_are_audited(database: Database) -> None:
    tenant = database.write(lambda db: keys.get_or_create_tenant(db, "alice", NOW))
    secret = keys.generate_key()
    for _ in range(2):
        key = database.write(
            lambda db: keys.insert_key(db, tenant.id, secret, name="laptop", now=NOW)
        )
    for _ in range(2):
        database.write(lambda db: keys.revoke(db, key.id, NOW + 1))
    events = database.read(
        lambda db: accounting.list_audit(db, tenant.id, since=0.0, until=NOW + 9, events=None)
    )
    assert [entry.event for entry in events] == ["api_key_revoked", "api_key_created"]
    assert secret not in str(events)
