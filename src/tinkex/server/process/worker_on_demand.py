"""Start the worker on demand: a placeholder waits for the first job that needs it.

Until then the supervisor registers a wake-up address in the store as the worker's. API processes
send a wake-up message to it after each new job, and clients on this machine do when they need the
worker. Messages may be lost, so the placeholder also polls the store every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib

from tinkex import clock
from tinkex.errors import StoreError
from tinkex.jobs.wakeup import WakeupListener
from tinkex.logs import get_logger
from tinkex.server.config import ServerConfig
from tinkex.server.periodic import PeriodicTask
from tinkex.server.wiring import compute_models_digest, open_database
from tinkex.store import groups, jobs, sessions
from tinkex.store.database import Connection, Database

LOG = get_logger(__name__)
#: How often to poll the store for jobs.
POLL_SECONDS = 2.0


def is_worker_needed(db: Connection, config: ServerConfig) -> bool:
    """Whether jobs are unfinished, or the stored list of base models is from other settings."""
    if jobs.get_load(db).num_jobs > 0:
        return True
    group = groups.find(db, "")
    return group is None or group.models_source != compute_models_digest(config)


def open_worker_placeholder(config: ServerConfig) -> WorkerPlaceholder | None:
    """Open a placeholder, which the caller closes; None if the worker is needed now."""
    database = open_database(config)
    try:
        if not database.read(lambda db: is_worker_needed(db, config)):
            return WorkerPlaceholder(config, database)
    except BaseException:  # also on cancellation: no one else closes the database
        database.close()
        raise
    database.close()
    return None


class WorkerPlaceholder:
    """Takes the worker's place in the store and waits for jobs."""

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
        """Wait for a wake-up message."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        loop.add_reader(self._wakeup.socket, woken.set)
        try:
            await woken.wait()
        finally:
            loop.remove_reader(self._wakeup.socket)

    def close(self) -> None:
        """Remove the placeholder from the store; may be called twice."""
        self._exit_stack.close()

    def _poll(self) -> None:
        """Send a heartbeat, expire sessions as a worker would, and check for jobs."""
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
            LOG.warning("the placeholder of the worker stays in the store for a while: %s", error)
