"""How a store of any age becomes one of today: an append-only list, each step run once."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from tinkex.errors import ConfigError
from tinkex.store import initial_schema
from tinkex.store.database import Database

#: Kept apart from the other tables: it says which of them are there.
_version_table = sa.Table(
    "schema_version", sa.MetaData(), sa.Column("version", sa.Integer, primary_key=True)
)


def m001_tables(db: sa.Connection) -> None:
    """Make the tables."""
    for statement in initial_schema.statements(db.dialect.name):
        db.exec_driver_sql(statement)


def m002_forgotten(db: sa.Connection) -> None:
    """Remember which operations of a run were forgotten, so that none is done twice."""
    db.exec_driver_sql("ALTER TABLE runs ADD COLUMN forgotten_seq BIGINT DEFAULT -1 NOT NULL")


def m003_num_steps(db: sa.Connection) -> None:
    """Count the optimizer steps of a run, beginning with those that are stored."""
    db.exec_driver_sql("ALTER TABLE runs ADD COLUMN num_steps BIGINT DEFAULT 0 NOT NULL")
    db.exec_driver_sql(
        "UPDATE runs SET num_steps = (SELECT count(*) FROM steps"
        " WHERE steps.run_id = runs.id AND steps.kind = 'optim_step')"
    )


def m004_scheduling(db: sa.Connection) -> None:
    """Store what the scheduler needs to know about a job before it reads the payload."""
    db.exec_driver_sql("ALTER TABLE jobs ADD COLUMN num_tokens BIGINT DEFAULT 0 NOT NULL")
    db.exec_driver_sql("ALTER TABLE jobs ADD COLUMN base_model TEXT")
    time = "DOUBLE" if db.dialect.name == "sqlite" else "DOUBLE PRECISION"
    db.exec_driver_sql(f"ALTER TABLE jobs ADD COLUMN cancelled_at {time}")


def m005_limits(db: sa.Connection) -> None:
    """Add what limits need: the last use of samplers, quotas, the tokens of open jobs."""
    json = "JSON" if db.dialect.name == "sqlite" else "JSONB"
    time = sa.Double().compile(dialect=db.dialect)
    db.exec_driver_sql(f"ALTER TABLE samplers ADD COLUMN used_at {time} DEFAULT 0 NOT NULL")
    db.exec_driver_sql(f"ALTER TABLE tenants ADD COLUMN quotas {json}")
    db.exec_driver_sql("DROP INDEX jobs_open")
    db.exec_driver_sql(
        "CREATE INDEX jobs_open ON jobs (tenant_id, payload_bytes, num_tokens)"
        " WHERE finished_at IS NULL"
    )


def m006_step_position(db: sa.Connection) -> None:
    """Store the place of a step within its run, so that clients can report metrics of it."""
    db.exec_driver_sql("ALTER TABLE steps ADD COLUMN position BIGINT")


MIGRATIONS: list[Callable[[sa.Connection], None]] = [
    m001_tables,
    m002_forgotten,
    m003_num_steps,
    m004_scheduling,
    m005_limits,
    m006_step_position,
]


def migrate(database: Database) -> int:
    """Run what has not run, and return the store's version; processes may do so at once."""
    version = database.read(_current_version)
    while version < len(MIGRATIONS):
        version = database.write(_apply_next)
    if version > len(MIGRATIONS):
        raise ConfigError(
            f"the store has version {version}, and this program knows {len(MIGRATIONS)}; "
            "install the newer tinkex that it was made with"
        )
    return version


def _current_version(db: sa.Connection) -> int:
    if not sa.inspect(db).has_table(_version_table.name):
        return 0
    return db.scalar(sa.select(sa.func.max(_version_table.c.version))) or 0


def _apply_next(db: sa.Connection) -> int:
    """Run the next step, unless somebody else has; one transaction with its number."""
    version = _current_version(db)
    if version >= len(MIGRATIONS):
        return version
    _version_table.create(db, checkfirst=True)
    MIGRATIONS[version](db)
    db.execute(sa.insert(_version_table).values(version=version + 1))
    return version + 1
