"""HTTP protocol of a connection: buffered writes, limits on head and body, and timeouts."""

from __future__ import annotations

import asyncio
import socket
import struct
from http import HTTPStatus
from typing import TYPE_CHECKING

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tinkex.errors import RequestErrorCategory
from tinkex.server.http.connections import ConnectionPhase, ConnectionRegistry, count_closed
from tinkex.server.http.error_responses import error_response

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

#: Larger writes are not joined with the response head: joining copies the data.
MAX_BUFFERED_BYTES = 32 * 1024
_TCP_FAMILIES = frozenset({socket.AF_INET, socket.AF_INET6})


class WriteBufferingTransport:
    """A transport that joins all writes of one event loop iteration.

    uvicorn writes the head and the body of a response separately; two packets cost the client a
    second wake-up and, on some networks, a delayed acknowledgement.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._buffered: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Buffer small data until the end of the iteration; write large data at once."""
        if len(data) > MAX_BUFFERED_BYTES:
            self.flush()
            self._transport.write(data)
            return
        if not self._buffered:
            self._loop.call_soon(self.flush)
        self._buffered.append(data)

    def flush(self) -> None:
        """Write the buffered data."""
        if self._buffered:
            chunks, self._buffered = self._buffered, []
            self._transport.write(b"".join(chunks) if len(chunks) > 1 else chunks[0])

    def close(self) -> None:
        """Close the connection after the buffered data."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> object:
        # Delegate everything else to the wrapped transport.
        return getattr(self._transport, name)


class WriteBufferingProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with write buffering; pass it to uvicorn as `http`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wrap the transport of a new connection."""
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in _TCP_FAMILIES:
            # asyncio does not set this on sockets that it did not create, such as inherited ones.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(WriteBufferingTransport(transport, self.loop))  # type: ignore[arg-type]


#: Maximum size of a request head: request line, headers and trailers.
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
#: Maximum pipelined requests on a connection behind the current one.
MAX_PIPELINED = 4
#: A body with more chunks than this must have an average chunk size of SMALL_CHUNK_BYTES.
MAX_SMALL_CHUNKS = 4096
SMALL_CHUNK_BYTES = 16
_NO_LINGER = struct.pack("ii", 1, 0)

NOT_HTTP = (400, "the request is not valid HTTP/1.1")
HEAD_TOO_LARGE = (431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes")
TOO_MANY_HEADERS = (431, f"the request has more than {MAX_HEADERS} headers")
TOO_MANY_PIPELINED = (
    429,
    f"more than {MAX_PIPELINED} requests wait on this connection; wait for responses",
)
TOO_MANY_SMALL_CHUNKS = (400, "the body has too many small chunks; send larger ones")
HEAD_TIMEOUT = (408, "the head of the request did not arrive in time; send it again")
TOO_MANY_CONNECTIONS = (503, "the server has reached its connection limit; try again")


class _ParsingAborted(Exception):
    """Stops the parser on a connection that is being closed."""


class LimitedHttpProtocol(WriteBufferingProtocol):
    """uvicorn's HTTP protocol with limits and timeouts; pass it to uvicorn as `http`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: ConnectionRegistry,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.phase = ConnectionPhase.HEAD
        self.peer = ""
        self._registry = connections
        self._since = 0.0
        self._rejection = NOT_HTTP
        self._num_unparsed = 0
        self._num_head_bytes = 0
        self._num_chunks = 0
        self._num_body_bytes = 0
        self._is_receiving = False
        self._has_sent_bytes = False
        self._is_paused = False
        self._stalled_at: float | None = None
        self._num_unsent = 0

    # --- connection -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register a new connection, or reject it if there are too many."""
        super().connection_made(transport)
        self.peer = self.client[0] if self.client else ""
        self._since = self.loop.time()
        if not self._registry.admit(self):
            self._reject(TOO_MANY_CONNECTIONS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove a closed connection from the registry."""
        self._registry.remove(self)
        super().connection_lost(exc)

    def drop(self, reason: str) -> None:
        """Close the connection now and discard unsent data."""
        count_closed(reason)
        self.transport.abort()

    def expire(self, now: float) -> None:
        """Close the connection if a timeout has passed."""
        limits = self._registry.limits
        if self.transport.is_closing() or self._is_paused:
            self._expire_stalled(now, limits.body_seconds)
        elif self.phase is ConnectionPhase.HEAD and now - self._since > limits.head_seconds:
            if self._has_sent_bytes:
                self._reject(HEAD_TIMEOUT)
            else:
                self.drop("timeout")
        elif self.phase is ConnectionPhase.DRAIN and now - self._since > limits.body_seconds:
            self.drop("timeout")

    def _expire_stalled(self, now: float, seconds: float) -> None:
        """Drop a client that does not read its response."""
        num_unsent = self.transport.get_write_buffer_size()
        if self._stalled_at is None or num_unsent < self._num_unsent:
            self._stalled_at = now
        self._num_unsent = num_unsent
        if now - self._stalled_at > seconds:
            # Make the kernel discard unsent data too.
            connection = self.transport.get_extra_info("socket")
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.drop("unread")

    def pause_writing(self) -> None:
        """Record that the client reads more slowly than the server writes."""
        self._is_paused, self._stalled_at = True, None
        super().pause_writing()

    def resume_writing(self) -> None:
        """Record that the client reads again."""
        self._is_paused = False
        super().resume_writing()

    # --- request --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse received data; limit what the parser buffers without a callback."""
        if self.transport.is_closing():
            return
        self._has_sent_bytes = True
        if self.phase is ConnectionPhase.IDLE:
            self._set_phase(ConnectionPhase.HEAD)
        self._num_unparsed += len(data)
        super().data_received(data)
        if self._num_unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._reject(HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        """Start a request."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._abort_parsing(TOO_MANY_PIPELINED)
        self._num_head_bytes = self._num_chunks = self._num_body_bytes = 0
        self._is_receiving = False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Receive a part of the URL."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receive a header; trailers after the body are ignored."""
        self._count_head(len(name) + len(value))
        if self._is_receiving:
            return
        if len(self.headers) >= MAX_HEADERS:
            self._abort_parsing(TOO_MANY_HEADERS)
        super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        self._num_unparsed = 0
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._abort_parsing(HEAD_TOO_LARGE)

    def on_headers_complete(self) -> None:
        """Start handling the request."""
        self._num_unparsed = 0
        self._is_receiving = True
        super().on_headers_complete()
        self._set_phase(ConnectionPhase.BUSY)

    def on_body(self, body: bytes) -> None:
        """Receive a chunk of the body."""
        self._num_unparsed = 0
        self._num_chunks += 1
        self._num_body_bytes += len(body)
        is_small = self._num_body_bytes < self._num_chunks * SMALL_CHUNK_BYTES
        if is_small and self._num_chunks > MAX_SMALL_CHUNKS:
            self._abort_parsing(TOO_MANY_SMALL_CHUNKS)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Mark the request as completely received."""
        self._num_unparsed = 0
        self._is_receiving = False
        super().on_message_complete()
        if self.phase is ConnectionPhase.DRAIN:
            self._set_phase(ConnectionPhase.IDLE)

    def on_response_complete(self) -> None:
        """Mark the response as sent; the request may not be completely received yet."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._set_phase(ConnectionPhase.DRAIN if self._is_receiving else ConnectionPhase.IDLE)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start the application through the fair queue, unless the connection is closed by then."""

        def start() -> None:
            if not self.transport.is_closing():
                super(LimitedHttpProtocol, self)._start_asgi_task(cycle, app)

        self._registry.start_queue.submit(self.peer, start)

    def _set_phase(self, phase: ConnectionPhase) -> None:
        self._since = self.loop.time()
        self._registry.set_phase(self, phase)

    # --- rejections -----------------------------------------------------------------------------

    def _abort_parsing(self, rejection: tuple[int, str]) -> None:
        """Stop the parser; uvicorn then calls `send_400_response`."""
        self._rejection = rejection
        raise _ParsingAborted

    def send_400_response(self, msg: str) -> None:
        """Send the error of the rejected request and close."""
        self._reject(self._rejection)

    def _reject(self, rejection: tuple[int, str]) -> None:
        status, message = rejection
        count_closed("refused")
        category = RequestErrorCategory.User if status < 500 else RequestErrorCategory.Server
        body = error_response(status, message, category).body
        retry = b"retry-after: 1\r\n" if status in {408, 429, 503} else b""
        phrase = HTTPStatus(status).phrase.encode()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n%s\r\n%s" % (status, phrase, len(body), retry, body)
        )
        self._stalled_at = None
        self.transport.close()
