"""The worker process of a group on a node of a cluster, watched by a thread."""

from __future__ import annotations

import asyncio
import os
import socket
import threading

import msgspec

from tinkex.errors import ConfigError, TinkexError
from tinkex.home import Home
from tinkex.logs import attach_logger, get_logger
from tinkex.server.config import ServerConfig
from tinkex.server.process.child_process import ChildProcess, ProcessSpec
from tinkex.server.process.child_setup import ChildSetup, worker_environment
from tinkex.server.process.home_setup import bind_blobs_to_store, bind_home_to_store
from tinkex.server.process.restart_policy import (
    DRAINED_EXIT_CODE,
    FENCED_EXIT_CODE,
    RestartPolicy,
)
from tinkex.server.wiring import open_blobs, open_store
from tinkex.settings import package_version

LOG = get_logger(__name__)


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a group's process, as its node reports it."""

    pid: int
    """The process id; 0 if it does not run now."""
    num_restarts: int
    """How often it was started again after it had died."""
    has_ended: bool
    """Whether it was drained, stopped or replaced, and is not started again."""
    error: str
    """Why it cannot run; empty if it can."""
    version: str
    """The version of tinkex on the node."""


class HostedWorker:
    """Runs the worker process of a group and restarts it when it dies."""

    def __init__(self, config: ServerConfig, group_id: str) -> None:
        self._config = config
        self._group_id = group_id
        self._error = ""
        self._has_ended = False
        self._child: ChildProcess | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def status(self) -> WorkerStatus:
        """Return the state of the process."""
        child = self._child
        return WorkerStatus(
            pid=child.pid if child is not None else 0,
            num_restarts=max(0, child.num_starts - 1) if child is not None else 0,
            has_ended=self._has_ended,
            error=self._error,
            version=package_version(),
        )

    def stop(self) -> None:
        """Stop the process; it writes the state of its models to disk and keeps them."""
        self._is_stopping = True
        if self._loop is not None and self._child is not None:
            self._loop.call_soon_threadsafe(self._child.stop)

    def _run(self) -> None:
        try:
            # Other users of this machine must not read what tenants send.
            os.umask(0o077)
            attach_logger(self._config.log_level)
            check_home(self._config)
            asyncio.run(self._supervise())
        except TinkexError as error:
            LOG.error("%s", error)
            self._error = error.message
        self._has_ended = True

    async def _supervise(self) -> None:
        setup = ChildSetup(
            config=self._config,
            group_id=self._group_id,
            # A worker that is started again, also on another node, takes over the lease at once;
            # the previous one, if it still runs, cannot write any more.
            owner=f"cluster:{self._group_id}",
        )
        spec = ProcessSpec(
            name="worker",
            module="tinkex.server.process.worker_process",
            setup=setup,
            environment=worker_environment(self._config.threads, self._config.threads or 1),
            final_exit_codes=frozenset({DRAINED_EXIT_CODE, FENCED_EXIT_CODE}),
        )
        self._loop = asyncio.get_running_loop()
        self._child = ChildProcess(spec, RestartPolicy())
        if self._is_stopping:
            self._child.stop()
        await self._child.supervise()


def check_home(config: ServerConfig) -> None:
    """Raise ConfigError if the files of checkpoints would not be those of the server."""
    home = Home(config.home)
    if not config.blobs and not home.store_id_file.exists():
        raise ConfigError(
            f"the home {home.root} on node {socket.gethostname()} is not that of the server; set "
            "blobs, or put the home on a file system that all nodes share"
        )
    with open_store(config) as database:
        bind_home_to_store(home, database)
        bind_blobs_to_store(open_blobs(config), database)
