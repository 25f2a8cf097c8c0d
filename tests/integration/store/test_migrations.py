"""Migrations: an empty database becomes exactly what the schema says, once, whoever is first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from tinkex.errors import ConfigError
from tinkex.store import migrations
from tinkex.store.database import Database
from tinkex.store.migrations import MIGRATIONS, migrate
from tinkex.store.schema import METADATA


def _described(db: sa.Connection) -> dict[str, Any]:
    """Everything a database knows about its tables."""
    look = sa.inspect(db)
    return {
        table: {
            "columns": [
                {**column, "type": repr(column["type"])} for column in look.get_columns(table)
            ],
            "key": look.get_pk_constraint(table)["constrained_columns"],
            "foreign": sorted(
                (key["constrained_columns"], key["referred_table"], key["referred_columns"])
                for key in look.get_foreign_keys(table)
            ),
            "unique": sorted(
                unique["column_names"] for unique in look.get_unique_constraints(table)
            ),
            "indexes": _indexes(db, table),
        }
        for table in look.get_table_names()
        if table != "schema_version"
    }


def _indexes(db: sa.Connection, table: str) -> list[str]:
    """Indexes in the database's own words, with their conditions."""
    if db.dialect.name == "sqlite":
        query = "SELECT sql FROM sqlite_master WHERE type = 'index' AND tbl_name = :table"
    else:
        query = "SELECT indexdef FROM pg_indexes WHERE tablename = :table"
    found = db.scalars(sa.text(query), {"table": table})
    return sorted(" ".join(text.split()) for text in found if text)


def _never_reused(db: sa.Connection) -> list[str]:
    """The SQLite tables whose numbers never come back."""
    query = "SELECT name FROM sqlite_master WHERE sql LIKE '%AUTOINCREMENT%' ORDER BY name"
    return list(db.scalars(sa.text(query)))


def test_an_empty_database_becomes_what_the_schema_says(
    open_database: Callable[..., Database], tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    migrated = open_database()
    assert migrate(migrated) == len(MIGRATIONS)
    if migrated.is_sqlite:
        declared = Database(f"sqlite:///{tmp_path / 'declared.db'}")
    else:
        declared = Database(request.getfixturevalue("postgres").create_database())
    declared.write(METADATA.create_all)
    assert migrated.read(_described) == declared.read(_described)
    if migrated.is_sqlite:
        names = migrated.read(_never_reused)
        assert names == declared.read(_never_reused)
        assert {"jobs", "completions", "steps"} <= set(names)
    declared.close()


def test_migrating_again_changes_nothing(database: Database) -> None:
    before = database.read(_described)
    assert migrate(database) == len(MIGRATIONS)
    assert database.read(_described) == before


def test_sqlite_can_give_pages_back(database: Database) -> None:
    if database.is_sqlite:
        assert database.read(lambda db: db.exec_driver_sql("PRAGMA auto_vacuum").scalar()) == 2


def test_a_newer_store_is_refused(database: Database) -> None:
    database.write(lambda db: db.exec_driver_sql("INSERT INTO schema_version VALUES (999)"))
    with pytest.raises(ConfigError, match="the store has version 999, and this program knows"):
        migrate(database)


def test_a_step_that_fails_leaves_nothing_and_runs_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_table(db: sa.Connection) -> None:
        db.exec_driver_sql("CREATE TABLE novelty (id INTEGER PRIMARY KEY)")

    def fail(db: sa.Connection) -> None:
        make_table(db)
        raise ValueError("broken")

    monkeypatch.setattr(migrations, "MIGRATIONS", [*MIGRATIONS, fail])
    with pytest.raises(ValueError, match="broken"):
        migrate(database)
    assert not database.read(lambda db: sa.inspect(db).has_table("novelty"))
    monkeypatch.setattr(migrations, "MIGRATIONS", [*MIGRATIONS, make_table])
    assert migrate(database) == len(MIGRATIONS) + 1
    assert database.read(lambda db: sa.inspect(db).has_table("novelty"))


def test_many_may_migrate_at_once(open_database: Callable[..., Database]) -> None:
    databases = [open_database() for _ in range(6)]
    versions: list[int] = []
    together = threading.Barrier(len(databases))

    def run(database: Database) -> None:
        together.wait()
        versions.append(migrate(database))

    threads = [threading.Thread(target=run, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions == [len(MIGRATIONS)] * len(databases)
