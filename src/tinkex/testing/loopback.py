"""uvicorn in a thread: quick to start, quick to stop, one write per answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinkex.testing.app import TRANSPORT, StubApp

HOST = "127.0.0.1"
_BACKLOG = 4096
_STOP_SECONDS = 10.0


class _OneWrite:
    """A transport that sends the head of an answer together with what follows it.

    Two packets cost the client a second wake-up, and over some stacks a delayed acknowledgement.
    """

    __slots__ = ("_head", "_is_started", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self._is_started = False

    def write(self, data: bytes) -> None:
        """Keep the head, send everything else."""
        if self._is_started:
            self._transport.write(self._head + data if self._head else data)
            self._head = b""
        elif data.startswith(b"HTTP/1.1 100"):
            self._transport.write(data)
        else:
            self._is_started = True
            self._head = data

    def close(self) -> None:
        """Send what was kept, then close."""
        if self._head:
            self.write(b"")
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the transport is going away."""
        return self._transport.is_closing()


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with the transport in the scope."""

    def on_headers_complete(self) -> None:
        """Prepare the request; the application's task has been made but has not run yet."""
        super().on_headers_complete()
        scope = cast("dict[str, Any]", self.scope)
        scope[TRANSPORT] = self.transport
        # The answer to HEAD has no body that could push its head out.
        if self.cycle is not None and scope["method"] != "HEAD":
            self.cycle.transport = cast("asyncio.Transport", _OneWrite(self.transport))


class _Server(uvicorn.Server):
    """uvicorn's server, which waits for a signal instead of looking for one ten times a second."""

    def __init__(self, config: uvicorn.Config, loopback: Loopback) -> None:
        super().__init__(config)
        self._loopback = loopback
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        """Serve until told to stop."""
        self._loopback.tell_ready(asyncio.get_running_loop())
        await self.stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close everything at once: whoever waits for an answer sees the connection end."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            cast("HttpToolsProtocol", connection).transport.abort()
        self._loopback.tell_stopping()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.001)
        for server in self.servers:
            await server.wait_closed()


class Loopback:
    """Serves an application on this machine, from a thread of its own, until stopped."""

    def __init__(
        self,
        app: StubApp,
        port: int,
        on_ready: Callable[[asyncio.AbstractEventLoop], None],
        on_stopping: Callable[[], None],
    ) -> None:
        self._on_ready = on_ready
        self._on_stopping = on_stopping
        self._listener = socket.create_server((HOST, port), backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._config = uvicorn.Config(
            cast("Any", app),
            http=_Protocol,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            date_header=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=60,
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
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits
            self._failure = error
        finally:
            self._listener.close()
            self._is_ready.set()

    async def _serve(self) -> None:
        self._server = _Server(self._config, self)
        await self._server.serve(sockets=[self._listener])

    def tell_ready(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called by the server's thread when connections are accepted."""
        self._loop = loop
        self._on_ready(loop)
        self._is_ready.set()

    def tell_stopping(self) -> None:
        """Called by the server's thread when the connections are closed."""
        self._on_stopping()

    def stop(self) -> None:
        """Stop serving and wait for the thread to end."""
        if self._loop is not None and self._server is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.stopping.set)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(f"the stub server did not stop within {_STOP_SECONDS} s")
