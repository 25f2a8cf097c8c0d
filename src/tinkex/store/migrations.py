"""Create the tables of a new store and migrate existing stores, one transaction per step."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from tinkex.errors import ConfigError
from tinkex.store.database import Database
from tinkex.store.schema import (
    METADATA,
    aliases,
    checkpoints,
    groups,
    jobs,
    runs,
    settings,
    unused_blobs,
)

#: Separate from the other tables, because it records which of them exist.
_version_table = sa.Table(
    "schema_version", sa.MetaData(), sa.Column("version", sa.Integer, primary_key=True)
)

#: The oldest version that can be opened. Earlier ones were never released.
FIRST_VERSION = 6


def _add_groups(db: sa.Connection) -> None:
    """Assign all models and jobs to the group of a single worker, whose id is empty."""
    for table in ("runs", "jobs"):
        db.execute(sa.text(f"ALTER TABLE {table} ADD COLUMN group_id TEXT NOT NULL DEFAULT ''"))
    db.execute(sa.text("ALTER TABLE processes ADD COLUMN network TEXT NOT NULL DEFAULT ''"))
    db.execute(sa.text("DROP INDEX jobs_by_state"))
    for index in jobs.indexes | runs.indexes:
        if index.name in {"jobs_by_state", "runs_by_group"}:
            index.create(db)
    groups.create(db)
    served = {
        name: db.scalar(sa.select(settings.c.value).where(settings.c.name == name))
        for name in ("base_models", "base_models_source")
    }
    if served["base_models"] is not None:
        values = {
            "id": "",
            "state": "ready",
            "base_models": served["base_models"],
            "models_source": served["base_models_source"] or "",
            "host": "",
            "load": {},
            "num_moves": 0,
            "started_at": 0.0,
            "seen_at": 0.0,
        }
        db.execute(sa.insert(groups).values(values))
    db.execute(sa.delete(settings).where(settings.c.name.in_(served)))


def _add_blobs(db: sa.Connection) -> None:
    """Let rows name places in an object store; the files of existing rows are in the home."""
    db.execute(sa.text("ALTER TABLE checkpoints ADD COLUMN place TEXT NOT NULL DEFAULT ''"))
    db.execute(sa.text("ALTER TABLE jobs ADD COLUMN payload_ref TEXT"))
    for index in checkpoints.indexes:
        if index.name == "checkpoints_by_place":
            index.create(db)
    unused_blobs.create(db)


#: Storage parameters on PostgreSQL. Finished jobs are deleted all the time: dead rows are removed
#: when they are 1 % of a table; rows of models are updated in place if their page has space.
_STORAGE_PARAMETERS = {
    "jobs": "autovacuum_vacuum_scale_factor = 0.01, autovacuum_analyze_scale_factor = 0.02",
    "completions": "autovacuum_vacuum_scale_factor = 0.01, autovacuum_analyze_scale_factor = 0.02",
    "runs": "autovacuum_vacuum_scale_factor = 0.02, fillfactor = 80",
}


def _set_storage_parameters(db: sa.Connection) -> None:
    if db.dialect.name == "sqlite":
        return
    for table, parameters in _STORAGE_PARAMETERS.items():
        db.execute(sa.text(f"ALTER TABLE {table} SET ({parameters})"))


def _add_token_streams(db: sa.Connection) -> None:
    """Let API processes find the token streams of workers, and jobs name their API process."""
    db.execute(sa.text("ALTER TABLE processes ADD COLUMN stream_address TEXT NOT NULL DEFAULT ''"))
    db.execute(sa.text("ALTER TABLE jobs ADD COLUMN process_id TEXT"))
    for index in jobs.indexes:
        if index.name == "jobs_by_process":
            index.create(db)


def _add_aliases(db: sa.Connection) -> None:
    aliases.create(db)


#: Append-only. The first entry migrates version 6 to 7, the next one 7 to 8. A change goes into
#: `schema` as well, because new stores are created from there.
MIGRATIONS: list[Callable[[sa.Connection], None]] = [
    _add_groups,
    _add_blobs,
    _set_storage_parameters,
    _add_token_streams,
    _add_aliases,
]


def newest_version() -> int:
    """Return the version that this program reads and writes."""
    return FIRST_VERSION + len(MIGRATIONS)


def migrate(database: Database) -> int:
    """Bring a store to the newest version and return it. Several processes may call this at once.

    Raises ConfigError for a store that is too old or too new for this program.
    """
    newest = newest_version()
    version = database.read(_current_version)
    while version == 0 or FIRST_VERSION <= version < newest:
        version = database.write(_apply_next)
    if version < newest:
        raise ConfigError(
            f"the store has version {version}, written by an unreleased tinkex; this program reads "
            f"version {FIRST_VERSION} and later: move the store away and start with an empty one"
        )
    if version > newest:
        raise ConfigError(
            f"the store has version {version}, but this program knows only {newest}; "
            "install the newer tinkex that wrote it"
        )
    return version


def _current_version(db: sa.Connection) -> int:
    if not sa.inspect(db).has_table(_version_table.name):
        return 0
    return db.scalar(sa.select(sa.func.max(_version_table.c.version))) or 0


def _apply_next(db: sa.Connection) -> int:
    """Create the tables or run the next migration, unless another process just did."""
    version = _current_version(db)
    if version == 0:
        METADATA.create_all(db)
        _set_storage_parameters(db)
        _version_table.create(db, checkfirst=True)
        version = newest_version()
    elif version < newest_version():
        MIGRATIONS[version - FIRST_VERSION](db)
        version += 1
    else:
        return version
    db.execute(sa.insert(_version_table).values(version=version))
    return version
