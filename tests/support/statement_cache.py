"""One cache of compiled SQL statements for all engines of a test process.

An engine compiles every statement once. Tests open hundreds of stores, and compiling would take a
quarter of the time of a small server.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


class StatementCache(dict[Any, Any]):
    """Compiled statements by the name of the dialect instead of its instance."""

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the compiled statement of any engine with the same dialect."""
        return super().get(_shared_key(key), default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        super().__setitem__(_shared_key(key), compiled)


def _shared_key(key: Any) -> Any:
    dialect, *statement = key
    return (dialect.name, dialect.driver, *statement)


def share_statements() -> None:
    """Let every engine of this process use the same cache."""
    cache = StatementCache()

    @sa.event.listens_for(sa.Engine, "engine_connect")
    def use_cache(connection: sa.Connection) -> None:
        connection.execution_options(compiled_cache=cache)
