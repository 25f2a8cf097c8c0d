"""The main process of `tinkex worker`: runs a worker of a store that servers elsewhere serve.

supervisor   registers nothing itself; restarts the worker, and drains it when it is stopped
└── worker   owns an engine and the models of one group
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable

from tinkex import clock
from tinkex.errors import ConfigError, StoreError
from tinkex.home import Home
from tinkex.ids import new_id
from tinkex.jobs.coordinator import MOVED_MESSAGE
from tinkex.jobs.wakeup import WakeupSender
from tinkex.logs import get_logger
from tinkex.server.config import ServerConfig
from tinkex.server.process.child_process import ChildProcess, ProcessSpec
from tinkex.server.process.child_setup import ChildSetup, count_cores, worker_environment
from tinkex.server.process.home_setup import bind_blobs_to_store, bind_home_to_store
from tinkex.server.process.restart_policy import DRAINED_EXIT_CODE, RestartPolicy
from tinkex.server.wiring import open_blobs, open_store
from tinkex.store import groups
from tinkex.store.database import Database
from tinkex.store.records import GroupState

LOG = get_logger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_SECONDS = 0.1
#: The group of the server's own worker, and its name in commands.
RESERVED_GROUPS = ("", "default")


def new_group_id() -> str:
    """Return a group id that no other worker uses."""
    return f"{socket.gethostname()}-{new_id()[:6]}"


def run_worker(config: ServerConfig, group_id: str, on_ready: Callable[[str], None]) -> None:
    """Run a worker until a signal, or until its group is drained."""
    if group_id in RESERVED_GROUPS:
        raise ConfigError(
            f"a worker's group cannot be called {group_id!r}; choose another name, or none"
        )
    # Other users of this machine must not read what tenants send.
    os.umask(0o077)
    with open_store(config) as database:
        bind_home_to_store(Home(config.home), database)
        bind_blobs_to_store(open_blobs(config), database)
        asyncio.run(WorkerSupervisor(config, group_id, database, on_ready).run())


class WorkerSupervisor:
    """Runs the worker of one group."""

    def __init__(
        self,
        config: ServerConfig,
        group_id: str,
        database: Database,
        on_ready: Callable[[str], None],
    ) -> None:
        self._config = config
        self._group_id = group_id
        self._database = database
        self._on_ready = on_ready
        self._started_at = clock.now()
        self._num_signals = 0
        self._stopping = asyncio.Event()
        setup = ChildSetup(
            config=config,
            group_id=group_id,
            # Only a worker of this process takes over the lease of the previous one at once.
            owner=f"{socket.gethostname()}:{os.getpid()}:{new_id()}",
        )
        spec = ProcessSpec(
            name="worker",
            module="tinkex.server.process.worker_process",
            setup=setup,
            environment=worker_environment(config.threads, max(1, count_cores() // config.ranks)),
            final_exit_codes=frozenset({DRAINED_EXIT_CODE}),
        )
        self._child = ChildProcess(spec, RestartPolicy())

    async def run(self) -> None:
        """Run until the worker is drained; raises if it cannot start."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        supervise = asyncio.create_task(self._child.supervise())
        ready = asyncio.create_task(self._announce_ready())
        stop = asyncio.create_task(self._drain_when_stopped())
        try:
            await supervise
        finally:
            ready.cancel()
            stop.cancel()
        LOG.info("the worker of group %r has ended", self._group_id)

    async def _announce_ready(self) -> None:
        while not await asyncio.to_thread(self._is_registered):
            await asyncio.sleep(_POLL_SECONDS)
        self._child.was_ready = True
        self._on_ready(self._group_id)

    def _is_registered(self) -> bool:
        try:
            group = self._database.read(lambda db: groups.find(db, self._group_id))
        except StoreError:
            return False
        return group is not None and group.started_at >= self._started_at

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            LOG.info("received %s: handing the models over", number.name)
            self._stopping.set()
        else:
            LOG.warning("received %s again: killing the worker", number.name)
            self._child.kill()

    async def _drain_when_stopped(self) -> None:
        await self._stopping.wait()
        self._child.expect_exit()
        try:
            await asyncio.to_thread(self._request_drain)
            await asyncio.sleep(self._config.stop_seconds)
            LOG.warning("the models are not handed over yet; they move when the lease has expired")
        except StoreError as error:
            LOG.warning("cannot drain the group: %s", error)
        self._child.stop()

    def _request_drain(self) -> None:
        self._database.write(lambda db: groups.set_state(db, self._group_id, GroupState.DRAINING))
        sender = WakeupSender(self._database, "worker")
        sender.notify([MOVED_MESSAGE])
        sender.close()
