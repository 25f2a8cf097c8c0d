"""A process that answers HTTP: `python -m tinkex.server.process.api_process`, by the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import uvicorn

from tinkex.errors import TinkexError
from tinkex.home import Home
from tinkex.logs import get_logger
from tinkex.server.app import create_app
from tinkex.server.http.acceptor import Acceptor
from tinkex.server.http.connection_protocol import LimitedHttpProtocol
from tinkex.server.http.connections import ConnectionLimits, ConnectionRegistry
from tinkex.server.http.request_context import Services
from tinkex.server.process.child_setup import initialize_child
from tinkex.server.process.heartbeat import start_heartbeat
from tinkex.server.process.listen_socket import raise_descriptor_limit
from tinkex.server.process.restart_policy import exit_code_for
from tinkex.server.wiring import open_services
from tinkex.server_discovery import HEALTH_PATH, READY_PATH

LOG = get_logger(__name__)
#: How often the activity file is touched at most.
TOUCH_INTERVAL_SECONDS = 5.0
#: Questions that are no sign of somebody working: probes, and a page that is left open.
IGNORED_PATHS = frozenset({HEALTH_PATH, READY_PATH, "/metrics", "/"})
IGNORED_PREFIXES = ("/runs/", "/static/")


class ActivityMiddleware:
    """Notes in the home that somebody asked, for the supervisor that stops an idle server."""

    def __init__(self, app: Any, home: Home) -> None:
        self._app = app
        self._file = home.activity_file
        self._next_touch = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Note a request, and pass it on."""
        if scope["type"] == "http" and not _is_ignored(scope["path"]):
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
    """uvicorn's server, which stops when told to and lets long polls go first."""

    def __init__(
        self, config: uvicorn.Config, services: Services, connections: ConnectionRegistry
    ) -> None:
        super().__init__(config)
        self._services = services
        self._connections = connections
        self._stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM stops; SIGINT is the supervisor's to hear."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        try:
            yield
        finally:
            # Impatience must not turn a clean end into a crash.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then accept connections in fair turns."""
        await super().startup(sockets=[])
        for listener in sockets or []:
            acceptor = Acceptor(listener, self._connections, self._make_protocol)
            self.servers.append(cast("Any", acceptor))

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        return protocol

    async def main_loop(self) -> None:
        """Serve until told to stop; uvicorn itself would look ten times a second."""
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is being asked, hold nobody, and close."""
        self._services.waiters.release_all()
        await super().shutdown(sockets)


def main() -> int:
    """Answer until told to stop."""
    orders = initialize_child()
    assert orders.listener is not None  # the supervisor's own orders
    # A line for each malformed request would let anybody fill the disk; they are counted instead.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # What lives long is not looked through again and again.
    gc.set_threshold(50_000, 20, 50)
    try:
        with (
            socket.socket(fileno=orders.listener) as listener,
            open_services(orders.config) as services,
        ):
            asyncio.run(_serve(services, listener, orders.heartbeat))
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
        cast("Any", app),
        lifespan="on",
        loop="asyncio",
        http=cast("Any", partial(LimitedHttpProtocol, connections=connections)),
        ws="none",
        log_config=None,
        access_log=False,
        date_header=False,
        server_header=False,
        # Longer than a client's pauses, which would otherwise meet a closing connection.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, int(services.config.stop_seconds / 2)),
    )


if __name__ == "__main__":
    sys.exit(main())
