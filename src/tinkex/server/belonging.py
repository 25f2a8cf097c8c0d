"""A home and its store belong together: what the store does not know is removed from the home."""

from __future__ import annotations

from tinkex.checkpoint.atomic import write_file_atomic
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.store.database import Database
from tinkex.store.settings import get_or_create_store_id


def bind_home_to_store(home: Home, database: Database) -> None:
    """Note which store a home belongs to, or refuse to serve it with another."""
    found = database.write(get_or_create_store_id)
    try:
        known = home.store_id_file.read_text("ascii").strip()
    except FileNotFoundError:
        write_file_atomic(home.store_id_file, f"{found}\n".encode())
        return
    if known != found:
        raise ConfigError(
            f"the checkpoints in {home.root} belong to another store than this one, which would "
            "remove them",
            hint="Name their store with --store, or another --home; remove "
            f"{home.store_id_file} only to give them up.",
        )
