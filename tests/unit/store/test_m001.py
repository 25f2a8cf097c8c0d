"""The frozen tables, as text."""

from __future__ import annotations

import hashlib

import pytest

from tinkex.store import initial_schema

#: Stores with these tables exist: what changes them is a new migration.
DIGESTS = {
    "sqlite": "ac0f4165b76c8a5b14beb8f490794a4e14ff35e162ac3f954b49b518d9b9cca3",
    "postgresql": "429bcddce83578bbda82bf3d16ee57b1cc84d8a82c0cf52f12609209454915a3",
}


@pytest.mark.parametrize("dialect", DIGESTS)
def test_the_first_migration_is_never_edited(dialect: str) -> None:
    text = ";\n".join(initial_schema.statements(dialect))
    assert hashlib.sha256(text.encode()).hexdigest() == DIGESTS[dialect]
