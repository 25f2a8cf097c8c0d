"""Publish the engine's base models to the API processes through the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from tinkex.engine.protocol import Engine
from tinkex.errors import StoreError
from tinkex.logs import get_logger
from tinkex.store import settings
from tinkex.store.database import Connection, Database

LOG = get_logger(__name__)
#: Setting that holds the base models.
BASE_MODELS_SETTING = "base_models"
#: Setting that identifies the server settings they were published for.
SOURCE_SETTING = "base_models_source"


class ServedModels:
    """Publishes the base models of an engine whenever their list changes."""

    def __init__(
        self, engine: Engine, database: Database, refresh: Callable[[], bool], source: str = ""
    ) -> None:
        """`refresh` updates the engine's base models and returns whether they changed.

        `source` identifies the settings that name the base models.
        """
        self._engine = engine
        self._database = database
        self._refresh = refresh
        self._source = source
        self._is_stale = False

    def publish(self, db: Connection) -> None:
        """Store the base models that the engine serves now."""
        settings.put(
            db, BASE_MODELS_SETTING, [asdict(model) for model in self._engine.base_models()]
        )
        settings.put(db, SOURCE_SETTING, self._source)

    def refresh(self) -> None:
        """Refresh the engine's models and publish changes; retried if the store fails."""
        self._is_stale = self._refresh() or self._is_stale
        if not self._is_stale:
            return
        try:
            self._database.write(self.publish)
        except StoreError as error:
            LOG.warning("cannot publish the base models now: %s", error)
        else:
            self._is_stale = False
