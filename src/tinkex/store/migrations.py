"""Create the tables of a new store and migrate existing stores, one transaction per step."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from tinkex.errors import ConfigError
from tinkex.store.database import Database
from tinkex.store.schema import METADATA

#: Separate from the other tables, because it records which of them exist.
_version_table = sa.Table(
    "schema_version", sa.MetaData(), sa.Column("version", sa.Integer, primary_key=True)
)

#: The oldest version that can be opened. Earlier ones were never released.
FIRST_VERSION = 6
#: Append-only. The first entry migrates version 6 to 7, the next one 7 to 8. A change goes into
#: `schema` as well, because new stores are created from there.
MIGRATIONS: list[Callable[[sa.Connection], None]] = []


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
        _version_table.create(db, checkfirst=True)
        version = newest_version()
    elif version < newest_version():
        MIGRATIONS[version - FIRST_VERSION](db)
        version += 1
    else:
        return version
    db.execute(sa.insert(_version_table).values(version=version))
    return version
