"""The main process of `tinkex serve`: starts, monitors and stops the other processes.

    supervisor   locks the home, creates the store and the first key, opens the listening socket
    ├── api      serves HTTP; any number, all accept on the same socket
    ├── worker   owns an engine; usually one, which may start only with the first job
    └── cluster  instead of workers: starts them on a Ray cluster

The supervisor itself neither computes nor serves, so a bad request or job cannot crash it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

import msgspec

from tinkex import clock
from tinkex.errors import ConfigError
from tinkex.home import Home
from tinkex.logs import get_logger
from tinkex.server.config import ServerConfig
from tinkex.server.periodic import IdleTimer
from tinkex.server.process.child_process import ChildProcess, ProcessSpec
from tinkex.server.process.child_setup import ChildSetup, count_cores, worker_environment
from tinkex.server.process.home_setup import (
    HomeLock,
    bind_blobs_to_store,
    bind_home_to_store,
    ensure_keys,
)
from tinkex.server.process.listen_socket import listen, listener_url, raise_descriptor_limit
from tinkex.server.process.restart_policy import RestartPolicy
from tinkex.server.process.worker_on_demand import WorkerPlaceholder, open_worker_placeholder
from tinkex.server.wiring import open_blobs, open_store
from tinkex.server_discovery import HEALTH_PATH, READY_PATH, ServerState, get_http_status
from tinkex.settings import package_version
from tinkex.system.atomic import write_file_atomic

LOG = get_logger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PROBE_TIMEOUT_SECONDS = 5.0
_PROBE_INTERVAL_SECONDS = 0.05
_MAX_POLL_SECONDS = 5.0


def print_ready(state: ServerState) -> None:
    """Print the server's URL on standard output."""
    sys.stdout.write(f"tinkex server ready at {state.url}\n")
    sys.stdout.flush()


def serve(config: ServerConfig, on_ready: Callable[[ServerState], None] = print_ready) -> None:
    """Serve until a signal or the idle timeout; call `on_ready` once the server is ready."""
    # Other users of this machine must not read what tenants send.
    os.umask(0o077)
    raise_descriptor_limit()
    home = Home(config.home)
    lock = HomeLock.acquire(home)
    try:
        home.state_file.unlink(missing_ok=True)
        with _open_listener(config, home) as listener:
            with open_store(config) as database:
                bind_home_to_store(home, database)
                bind_blobs_to_store(open_blobs(config), database)
                ensure_keys(config, home, database)
            asyncio.run(Supervisor(config, lock, listener, on_ready).run())
    finally:
        _remove_state_file(home, lock)
        lock.release()


def _open_listener(config: ServerConfig, home: Home) -> socket.socket:
    """Open the socket; port 0 prefers the previous port, where clients may still retry."""
    if config.port != 0:
        return listen(config.host, config.port)
    try:
        listener = listen(config.host, int(home.port_file.read_text("ascii")))
    except (OSError, ValueError):  # ConfigError is a ValueError
        listener = listen(config.host, 0)
    write_file_atomic(home.port_file, str(listener.getsockname()[1]).encode())
    return listener


class Supervisor:
    """Runs the processes of one server."""

    def __init__(
        self,
        config: ServerConfig,
        lock: HomeLock,
        listener: socket.socket,
        on_ready: Callable[[ServerState], None] = print_ready,
    ) -> None:
        self._config = config
        self._on_ready = on_ready
        self._home = Home(config.home)
        self._lock = lock
        self._listener = listener
        self._url = listener_url(listener)
        self._placeholder: WorkerPlaceholder | None = None
        if config.worker_on_demand:
            self._placeholder = open_worker_placeholder(config)
        specs = [make_cluster_spec(config, lock)] if config.cluster else worker_specs(config, lock)
        self._workers = [
            ChildProcess(spec, RestartPolicy(), start_immediately=self._placeholder is None)
            for spec in specs
        ]
        api_spec = make_api_spec(config, lock, listener)
        self._children = [
            *(ChildProcess(api_spec, RestartPolicy()) for _ in range(config.api_processes)),
            *self._workers,
        ]
        self._stopping = asyncio.Event()
        self._num_signals = 0

    async def run(self) -> None:
        """Serve, then stop all processes; raises if a process cannot start."""
        self._install_signal_handlers()
        self._home.activity_file.touch()
        child_tasks = [asyncio.create_task(child.supervise()) for child in self._children]
        background_task = asyncio.create_task(self._run_background_tasks())
        home_task = asyncio.create_task(self._watch_home())
        try:
            # A child task that raises has given up restarting, which ends the server.
            tasks: list[asyncio.Task[object]] = [*child_tasks, background_task, home_task]
            tasks.append(asyncio.create_task(self._stopping.wait()))
            while not self._stopping.is_set():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    tasks.remove(task)
        finally:
            background_task.cancel()
            home_task.cancel()
            await self._stop(child_tasks)
            if self._placeholder is not None:
                self._placeholder.close()

    async def _run_background_tasks(self) -> None:
        state = await self._announce_ready()
        tasks = []
        if self._placeholder is not None:
            tasks.append(self._start_worker_on_demand(self._placeholder, state))
        if self._config.idle_stop_seconds > 0:
            tasks.append(self._stop_when_idle())
        await asyncio.gather(*tasks)

    async def _watch_home(self) -> None:
        """Stop when the home was removed: results written to deleted files would be lost."""
        while self._lock.is_lock_of(self._home):
            await asyncio.sleep(_MAX_POLL_SECONDS)
        raise ConfigError(
            f"the files of the home {self._home.root} were removed while its server was running",
            hint="Start it again; all work since the removal is lost.",
        )

    # --- startup ------------------------------------------------------------------------------

    async def _announce_ready(self) -> ServerState:
        """Publish the server's URL once it serves and the worker or its placeholder is ready."""
        await self._wait_for_status(HEALTH_PATH, 200)
        if self._workers:
            # A server is not ready before it knows its models.
            await self._wait_for_status(READY_PATH, 200, 404)
        state = ServerState(
            pid=os.getpid(),
            url=self._url,
            version=package_version(),
            started_at=clock.now(),
            log=_log_path(self._home),
            worker_wakeup=self._placeholder.wakeup_address
            if self._placeholder is not None
            else None,
        )
        self._write_state(state)
        for child in self._children:
            child.was_ready = child not in self._workers or self._placeholder is None
        self._on_ready(state)
        return state

    def _write_state(self, state: ServerState) -> None:
        write_file_atomic(self._home.state_file, msgspec.json.encode(state))

    async def _start_worker_on_demand(
        self, placeholder: WorkerPlaceholder, state: ServerState
    ) -> None:
        await placeholder.wait_for_work()
        LOG.info("a job needs the worker: starting it")
        placeholder.close()
        for worker in self._workers:
            worker.allow_start()
        await self._wait_for_status(READY_PATH, 200, 404)
        for worker in self._workers:
            worker.was_ready = True
        self._write_state(msgspec.structs.replace(state, worker_wakeup=None))

    async def _wait_for_status(self, path: str, *statuses: int) -> None:
        url = self._url + path
        while await asyncio.to_thread(get_http_status, url, _PROBE_TIMEOUT_SECONDS) not in statuses:
            await asyncio.sleep(_PROBE_INTERVAL_SECONDS)

    # --- shutdown -----------------------------------------------------------------------------

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            LOG.info("received %s: stopping the server", number.name)
            self._stopping.set()
            return
        LOG.warning("received %s again: killing the server's processes", number.name)
        for child in self._children:
            child.kill()

    async def _stop_when_idle(self) -> None:
        limit = self._config.idle_stop_seconds
        timer = IdleTimer(time.monotonic())
        while (idle := timer.idle_seconds(self._last_activity(), time.monotonic())) < limit:
            await asyncio.sleep(min(limit - idle, _MAX_POLL_SECONDS))
        LOG.info("no requests for %g s: stopping the server", limit)
        self._stopping.set()

    def _last_activity(self) -> float | None:
        try:
            return self._home.activity_file.stat().st_mtime
        except OSError:
            return None

    async def _stop(self, child_tasks: list[asyncio.Task[None]]) -> None:
        _remove_state_file(self._home, self._lock)
        # From now on new connections fail at once instead of waiting in the backlog.
        self._listener.close()
        for child in self._children:
            child.stop()
        _, late = await asyncio.wait(child_tasks, timeout=self._config.stop_seconds)
        if late:
            LOG.error("%d processes did not exit in time; killing them", len(late))
            for child in self._children:
                child.kill()
            await asyncio.wait(late)
        for task in child_tasks:
            # Retrieved, so asyncio does not warn; the first error is raised by run().
            task.exception()
        LOG.info("the server has stopped")


def make_api_spec(config: ServerConfig, lock: HomeLock, listener: socket.socket) -> ProcessSpec:
    """The spec of an API process."""
    return ProcessSpec(
        name="API",
        module="tinkex.server.process.api_process",
        setup=ChildSetup(config=config, lock=lock.descriptor, listener=listener.fileno()),
        hang_seconds=config.api_hang_seconds,
    )


def make_cluster_spec(config: ServerConfig, lock: HomeLock) -> ProcessSpec:
    """The spec of the process that starts workers on a cluster."""
    return ProcessSpec(
        name="cluster",
        module="tinkex.server.cluster.cluster_process",
        setup=ChildSetup(config=config, lock=lock.descriptor),
    )


def worker_specs(config: ServerConfig, lock: HomeLock) -> list[ProcessSpec]:
    """The specs of the workers; they share the cores and the memory for models in training."""
    num_cores = max(1, count_cores() // (max(1, config.workers) * config.ranks))
    return [
        ProcessSpec(
            name="worker" if config.workers == 1 else f"worker {number}",
            module="tinkex.server.process.worker_process",
            setup=ChildSetup(
                config=config,
                lock=lock.descriptor,
                # The first one has the group of a server with one worker, and so its models.
                group_id="" if number == 1 else f"local-{number}",
            ),
            environment=worker_environment(config.threads, num_cores),
        )
        for number in range(1, config.workers + 1)
    ]


def _remove_state_file(home: Home, lock: HomeLock) -> None:
    """Remove the state file, unless another server has taken over the home."""
    if lock.is_lock_of(home):
        home.state_file.unlink(missing_ok=True)


def _log_path(home: Home) -> str | None:
    """The path of the home's log file, if standard error is redirected to it."""
    try:
        is_log_file = os.path.samestat(os.fstat(sys.stderr.fileno()), home.log_file.stat())
    except OSError:
        return None
    return str(home.log_file) if is_log_file else None
