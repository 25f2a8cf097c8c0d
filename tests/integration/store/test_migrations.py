"""Migrations: new stores get the declared tables; old and newer stores are handled once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.store_rows import add_job, add_session, add_tenant
from tinkex.errors import ConfigError
from tinkex.store import groups, jobs, migrations, settings
from tinkex.store.database import Database
from tinkex.store.migrations import (
    FIRST_VERSION,
    MIGRATIONS,
    _current_version,
    migrate,
    newest_version,
)
from tinkex.store.schema import METADATA


def _described(db: sa.Connection) -> dict[str, Any]:
    """Describe all tables of a database."""
    inspector = sa.inspect(db)
    return {
        table: {
            "columns": [
                {**column, "type": repr(column["type"])} for column in inspector.get_columns(table)
            ],
            "key": inspector.get_pk_constraint(table)["constrained_columns"],
            "foreign": sorted(
                (key["constrained_columns"], key["referred_table"], key["referred_columns"])
                for key in inspector.get_foreign_keys(table)
            ),
            "unique": sorted(
                unique["column_names"] for unique in inspector.get_unique_constraints(table)
            ),
            "indexes": _indexes(db, table),
        }
        for table in inspector.get_table_names()
        if table != "schema_version"
    }


def _indexes(db: sa.Connection, table: str) -> list[str]:
    """Return the SQL of the indexes, with their conditions."""
    if db.dialect.name == "sqlite":
        query = "SELECT sql FROM sqlite_master WHERE type = 'index' AND tbl_name = :table"
    else:
        query = "SELECT indexdef FROM pg_indexes WHERE tablename = :table"
    statements = db.scalars(sa.text(query), {"table": table})
    return sorted(" ".join(text.split()) for text in statements if text)


def _never_reused(db: sa.Connection) -> list[str]:
    """Return the SQLite tables whose numbers are never reused."""
    query = "SELECT name FROM sqlite_master WHERE sql LIKE '%AUTOINCREMENT%' ORDER BY name"
    return list(db.scalars(sa.text(query)))


def test_new_store_has_the_declared_tables(database: Database) -> None:
    assert database.read(_current_version) == newest_version()
    assert database.read(_described).keys() == METADATA.tables.keys()
    if database.is_sqlite:
        assert {"jobs", "completions", "steps"} <= set(database.read(_never_reused))


@pytest.mark.parametrize("version", [1, FIRST_VERSION - 1])
def test_unreleased_store_is_refused(database: Database, version: int) -> None:
    database.write(lambda db: db.exec_driver_sql(f"UPDATE schema_version SET version = {version}"))
    with pytest.raises(ConfigError, match=f"the store has version {version}, written by an unrel"):
        migrate(database)


def test_migrating_again_changes_nothing(database: Database) -> None:
    before = database.read(_described)
    assert migrate(database) == newest_version()
    assert database.read(_described) == before


def test_sqlite_uses_incremental_vacuum(database: Database) -> None:
    if database.is_sqlite:
        assert database.read(lambda db: db.exec_driver_sql("PRAGMA auto_vacuum").scalar()) == 2


def _downgrade_to_version_6(db: sa.Connection) -> None:
    for statement in (
        "DROP TABLE aliases",
        "DROP INDEX jobs_by_process",
        "ALTER TABLE jobs DROP COLUMN process_id",
        "ALTER TABLE processes DROP COLUMN stream_address",
        "DROP TABLE unused_blobs",
        "DROP INDEX checkpoints_by_place",
        "ALTER TABLE checkpoints DROP COLUMN place",
        "ALTER TABLE jobs DROP COLUMN payload_ref",
        "DROP TABLE groups",
        "DROP INDEX runs_by_group",
        "DROP INDEX jobs_by_state",
        "ALTER TABLE runs DROP COLUMN group_id",
        "ALTER TABLE jobs DROP COLUMN group_id",
        "ALTER TABLE processes DROP COLUMN network",
        "CREATE INDEX jobs_by_state ON jobs (state, no)",
        "UPDATE schema_version SET version = 6",
    ):
        db.exec_driver_sql(statement)


def test_models_of_version_6_belong_to_the_only_group(database: Database) -> None:
    expected = database.read(_described)
    job = add_job(database, add_session(database, add_tenant(database)))
    database.write(lambda db: settings.put(db, "base_models", [{"name": "tinkex/tiny"}]))
    database.write(lambda db: settings.put(db, "base_models_source", "digest"))
    database.write(_downgrade_to_version_6)
    assert database.read(_described) != expected
    migrate(database)
    assert database.read(_described) == expected
    assert database.read(lambda db: jobs.find(db, job.id)) == job
    (group,) = database.read(groups.list_current)
    assert (group.id, group.base_models) == ("", [{"name": "tinkex/tiny"}])
    assert group.models_source == "digest"


def test_newer_store_is_refused(database: Database) -> None:
    database.write(lambda db: db.exec_driver_sql("INSERT INTO schema_version VALUES (999)"))
    with pytest.raises(ConfigError, match="the store has version 999, but this program knows only"):
        migrate(database)


def test_failed_migration_is_rolled_back_and_runs_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_table(db: sa.Connection) -> None:
        db.exec_driver_sql("CREATE TABLE novelty (id INTEGER PRIMARY KEY)")

    def fail(db: sa.Connection) -> None:
        make_table(db)
        raise ValueError("broken")

    before = newest_version()
    monkeypatch.setattr(migrations, "MIGRATIONS", [*MIGRATIONS, fail])
    with pytest.raises(ValueError, match="broken"):
        migrate(database)
    assert not database.read(lambda db: sa.inspect(db).has_table("novelty"))
    monkeypatch.setattr(migrations, "MIGRATIONS", [*MIGRATIONS, make_table])
    assert migrate(database) == before + 1
    assert database.read(lambda db: sa.inspect(db).has_table("novelty"))


def test_concurrent_migrations_run_once(
    open_database: Callable[..., Database],
) -> None:
    databases = [open_database() for _ in range(6)]
    versions: list[int] = []
    barrier = threading.Barrier(len(databases))

    def run(database: Database) -> None:
        barrier.wait()
        versions.append(migrate(database))

    threads = [threading.Thread(target=run, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions == [newest_version()] * len(databases)
