"""uvicorn in a thread: quick to start, quick to stop, one write per answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any, cast

from tinkex.installation import install_command
from tinkex.testing.answers import Answer
from tinkex.testing.app import CONNECTION, StubApp

try:
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
except ModuleNotFoundError as error:
    raise ImportError(f"the stub server needs {error.name}: {install_command('server')}") from error

HOST = "127.0.0.1"
_BACKLOG = 4096
_STOP_SECONDS = 10.0


class _Connection:
    """A request's way back to its client, for what ASGI cannot say or says slowly."""

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: _Protocol) -> None:
        self._protocol = protocol
        self._cycle = protocol.cycle

    def answer(self, answer: Answer) -> None:
        """Send a complete answer in one write.

        Two packets cost the client a second wake-up, and over some stacks a delayed
        acknowledgement.
        """
        cycle, protocol = self._cycle, self._protocol
        if cycle.disconnected:
            return
        cycle.response_started = cycle.response_complete = True
        head = [STATUS_LINE[answer.status]]
        for name, value in answer.headers:
            head += (name, b": ", value, b"\r\n")
        head.append(b"content-length: %d\r\n" % len(answer.body))
        head.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        if cycle.scope["method"] != "HEAD":
            head.append(answer.body)
        protocol.transport.write(b"".join(head))
        if not cycle.keep_alive:
            protocol.transport.close()
            return
        protocol.flow.resume_reading()
        # uvicorn would set an alarm for an idle connection here; idle ones may stay.
        if protocol.pipeline:
            cycle.on_response()

    def write(self, data: bytes) -> None:
        """Send bytes that need not be HTTP."""
        self._protocol.transport.write(data)

    def close(self) -> None:
        """Close the connection when everything written is sent."""
        self._protocol.transport.close()


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with the connection in the scope."""

    def on_headers_complete(self) -> None:
        """Prepare the request; the application's task has been made but has not run yet."""
        super().on_headers_complete()
        cast("dict[str, Any]", self.scope)[CONNECTION] = _Connection(self)


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
        for listener in sockets or []:
            asyncio.get_running_loop().remove_reader(listener)
        # asyncio forgets, and leaves open, a connection that is half accepted when close() comes.
        await asyncio.sleep(0.001)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        self._loopback.tell_stopping()
        while self.server_state.connections or self.server_state.tasks:
            # Again and again: a connection may have been accepted and not be known here yet.
            for connection in list(self.server_state.connections):
                cast("HttpToolsProtocol", connection).transport.abort()
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
