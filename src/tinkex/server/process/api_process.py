"""API process: serves HTTP. The supervisor starts it through `child_entry`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import uvicorn
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from tinkex.errors import TinkexError
from tinkex.home import Home
from tinkex.logs import get_logger
from tinkex.server.app import create_app
from tinkex.server.dashboard.navigation import PAGE_DATA_PREFIX, PAGE_PATHS
from tinkex.server.http.connection_protocol import LimitedHttpProtocol
from tinkex.server.http.connections import Acceptor, ConnectionLimits, ConnectionRegistry
from tinkex.server.http.request_context import Services
from tinkex.server.process.child_setup import initialize_child
from tinkex.server.process.heartbeat import start_heartbeat
from tinkex.server.process.listen_socket import raise_descriptor_limit
from tinkex.server.process.restart_policy import exit_code_for
from tinkex.server.wiring import open_services
from tinkex.server_discovery import HEALTH_PATH, READY_PATH

LOG = get_logger(__name__)
#: Minimum interval between two touches of the activity file.
TOUCH_INTERVAL_SECONDS = 5.0
#: Requests that do not count as activity: health probes, and dashboard pages left open.
IGNORED_PATHS = frozenset({HEALTH_PATH, READY_PATH, "/metrics"}) | PAGE_PATHS
IGNORED_PREFIXES = ("/runs/", "/static/", PAGE_DATA_PREFIX)


class ActivityMiddleware:
    """Touch the home's activity file on requests; the supervisor stops an idle server."""

    def __init__(self, app: ASGIApp, home: Home) -> None:
        self._app = app
        self._file = home.activity_file
        self._next_touch = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Record the request and forward it."""
        if scope["type"] == ScopeType.HTTP and not _is_ignored(scope["path"]):
            self._touch(time.monotonic())
        await self._app(scope, receive, send)

    def _touch(self, now: float) -> None:
        if now >= self._next_touch:
            self._next_touch = now + TOUCH_INTERVAL_SECONDS
            with contextlib.suppress(OSError):
                os.utime(self._file)


def _is_ignored(path: str) -> bool:
    return path in IGNORED_PATHS or path.startswith(IGNORED_PREFIXES)


class ApiServer(uvicorn.Server):
    """A uvicorn server that ends long polls first when it shuts down."""

    def __init__(
        self, config: uvicorn.Config, services: Services, connections: ConnectionRegistry
    ) -> None:
        super().__init__(config)
        self._services = services
        self._connections = connections
        self._stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM; the supervisor handles SIGINT."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        try:
            yield
        finally:
            # A second SIGTERM must not turn a clean shutdown into a crash.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then accept connections through the fair start queue."""
        await super().startup(sockets=[])
        for listener in sockets or []:
            acceptor = Acceptor(listener, self._connections, self._make_protocol)
            self.servers.append(cast("asyncio.Server", acceptor))

    def _make_protocol(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    async def main_loop(self) -> None:
        """Wait for SIGTERM; uvicorn's own loop would poll ten times a second."""
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all long polls, finish the open requests and close."""
        self._services.waiters.release_all()
        await super().shutdown(sockets)


def main() -> int:
    """Serve HTTP until SIGTERM; return the exit code."""
    setup = initialize_child()
    assert setup.listener is not None  # the supervisor passes one to every API process
    # A log line per malformed request would let any client fill the disk; they are counted.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # Collect less often: most objects here live as long as the process.
    gc.set_threshold(50_000, 20, 50)
    try:
        with (
            socket.socket(fileno=setup.listener) as listener,
            open_services(setup.config) as services,
        ):
            asyncio.run(_serve(services, listener, setup.heartbeat))
    except TinkexError as error:
        LOG.error("%s", error)
        return exit_code_for(error)
    return 0


async def _serve(services: Services, listener: socket.socket, heartbeat: int | None) -> None:
    if heartbeat is not None:
        start_heartbeat(heartbeat)
    app = ActivityMiddleware(create_app(services), services.home)
    connections = ConnectionRegistry(
        ConnectionLimits.from_config(services.config, raise_descriptor_limit())
    )
    config = _uvicorn_config(app, services, connections)
    await ApiServer(config, services, connections).serve([listener])


def _uvicorn_config(
    app: ActivityMiddleware, services: Services, connections: ConnectionRegistry
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="on",
        loop="asyncio",
        http=cast("type[asyncio.Protocol]", partial(LimitedHttpProtocol, connections=connections)),
        ws="none",
        log_config=None,
        access_log=False,
        date_header=False,
        server_header=False,
        # Longer than a client's pauses: its next request must not hit a closing connection.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, int(services.config.stop_seconds / 2)),
    )
