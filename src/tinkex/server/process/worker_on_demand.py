"""A worker that starts with the first work: what counts as work, and who waits for it.

Until then the supervisor stands in for the worker. It has a bell that the store lists as the
worker's, so API processes ring it after each new job, and clients of this machine ring it when they
need the worker. A ring may be lost, so the store is read as well, every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib

from tinkex import clock
from tinkex.errors import StoreError
from tinkex.jobs.served_models import SOURCE_SETTING
from tinkex.jobs.wakeup import WakeupListener
from tinkex.logs import get_logger
from tinkex.server.config import ServerConfig
from tinkex.server.periodic import PeriodicTask
from tinkex.server.wiring import compute_models_digest, open_database
from tinkex.store import jobs, sessions, settings
from tinkex.store.database import Connection, Database

LOG = get_logger(__name__)
#: How often the store is read for work.
POLL_SECONDS = 2.0


def is_worker_needed(db: Connection, config: ServerConfig) -> bool:
    """Whether jobs are unfinished, or the stored list of base models has other settings."""
    if jobs.get_load(db).num_jobs > 0:
        return True
    return bool(settings.get(db, SOURCE_SETTING) != compute_models_digest(config))


def open_worker_placeholder(config: ServerConfig) -> WorkerPlaceholder | None:
    """A stand-in for the worker, which the caller closes; None if the worker is needed now."""
    database = open_database(config)
    try:
        if not database.read(lambda db: is_worker_needed(db, config)):
            return WorkerPlaceholder(config, database)
    except BaseException:
        database.close()
        raise
    database.close()
    return None


class WorkerPlaceholder:
    """Waits for work while there is no worker."""

    def __init__(self, config: ServerConfig, database: Database) -> None:
        self._config = config
        self._database = database
        self._wakeup = WakeupListener(database, "worker")
        self._exit_stack = contextlib.ExitStack()
        self._exit_stack.callback(database.close)
        self._exit_stack.callback(self._close_wakeup)
        self._exit_stack.enter_context(PeriodicTask("on demand", self._poll, POLL_SECONDS))

    @property
    def wakeup_address(self) -> str:
        """The address that takes wake-up messages when the worker is needed."""
        return self._wakeup.process.bell

    async def wait_for_work(self) -> None:
        """Wait until the bell rings."""
        loop = asyncio.get_running_loop()
        rung = asyncio.Event()
        loop.add_reader(self._wakeup.socket, rung.set)
        try:
            await rung.wait()
        finally:
            loop.remove_reader(self._wakeup.socket)

    def close(self) -> None:
        """Leave the worker's place; closing twice is fine."""
        self._exit_stack.close()

    def _poll(self) -> None:
        """What a worker does for those who read, and the search for work; on its own thread."""
        self._wakeup.heartbeat()
        now = clock.now()
        unseen_since = now - self._config.session_seconds
        self._database.write(
            lambda db: sessions.expire_unseen(db, unseen_since=unseen_since, now=now)
        )
        if self._database.read(lambda db: is_worker_needed(db, self._config)):
            self._wakeup.wake()

    def _close_wakeup(self) -> None:
        try:
            self._wakeup.close()
        except StoreError as error:
            LOG.warning("the stand-in of the worker stays in the store for a while: %s", error)
