"""uvicorn in a thread: the server's own HTTP protocol, quick to start and to stop."""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import partial
from typing import Any, cast

import uvicorn

from tinkex.server.http.connection_protocol import LimitedHttpProtocol
from tinkex.server.http.connections import ConnectionLimits, ConnectionRegistry
from tinkex.server.http.request_context import Services
from tinkex.testing.asgi import CONNECTION, ASGIApp

HOST = "127.0.0.1"
_BACKLOG = 4096
_STOP_SECONDS = 10.0
#: Enough for every test; the real server derives it from the descriptor limit.
_MAX_DESCRIPTORS = 1 << 16


class _Connection:
    """A request's connection, for what ASGI cannot express."""

    __slots__ = ("_transport",)

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Send bytes that need not be HTTP."""
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection when everything written is sent."""
        self._transport.close()


class _Protocol(LimitedHttpProtocol):
    """The server's protocol, with the connection in the scope."""

    def on_headers_complete(self) -> None:
        """Prepare the request; the application's task has been made but has not run yet."""
        super().on_headers_complete()
        cast("dict[str, Any]", self.scope)[CONNECTION] = _Connection(cast("Any", self.transport))


class _Server(uvicorn.Server):
    """uvicorn's server, which waits for an event instead of polling ten times a second."""

    def __init__(self, config: uvicorn.Config, services: Services, loopback: Loopback) -> None:
        super().__init__(config)
        self._services = services
        self._loopback = loopback
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        """Serve until stopped."""
        self._loopback.set_ready(asyncio.get_running_loop())
        await self.stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close everything at once: clients that wait for a response see the connection end."""
        for listener in sockets or []:
            asyncio.get_running_loop().remove_reader(listener)
        # asyncio leaves a connection open that is half accepted when close() is called.
        await asyncio.sleep(0.001)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        while self.server_state.connections or self.server_state.tasks:
            # Repeated: a connection may have been accepted and not be known here yet.
            for connection in list(self.server_state.connections):
                cast("LimitedHttpProtocol", connection).transport.abort()
            self._services.waiters.release_all()
            await asyncio.sleep(0.001)
        for server in self.servers:
            await server.wait_closed()
        await self.lifespan.shutdown()


class Loopback:
    """Serves an application on this machine, from a thread of its own, until stopped."""

    def __init__(self, app: ASGIApp, port: int, services: Services) -> None:
        self._services = services
        self._listener = socket.create_server((HOST, port), backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        connections = ConnectionRegistry(
            ConnectionLimits.from_config(services.config, _MAX_DESCRIPTORS)
        )
        self._config = uvicorn.Config(
            cast("Any", app),
            http=cast("Any", partial(_Protocol, connections=connections)),
            ws="none",
            lifespan="on",
            loop="asyncio",
            log_config=None,
            access_log=False,
            date_header=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            # Idle connections may stay: tests pause for as long as they like.
            timeout_keep_alive=3600,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._is_ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tinkex-stub", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise RuntimeError("the stub server did not start") from self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - reported by the thread that started this
            self._failure = error
        finally:
            self._listener.close()
            self._is_ready.set()

    async def _serve(self) -> None:
        self._server = _Server(self._config, self._services, self)
        await self._server.serve(sockets=[self._listener])

    def set_ready(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called by the server's thread when connections are accepted."""
        self._loop = loop
        self._is_ready.set()

    def stop(self) -> None:
        """Stop serving and wait for the thread to end."""
        if self._loop is not None and self._server is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.stopping.set)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(f"the stub server did not stop within {_STOP_SECONDS:g} s")
