"""One write per answer: head and body leave together, in one packet where they fit."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: What is written in one piece is joined with its head up to this size; joining is copying.
MAX_BUFFERED_BYTES = 32 * 1024
_TCP_FAMILIES = frozenset({socket.AF_INET, socket.AF_INET6})


class WriteBufferingTransport:
    """A transport that gathers what is written during one turn of the loop.

    uvicorn writes the head and the body of an answer one after the other; two packets cost the
    client a second wake-up, and over some networks a delayed acknowledgement.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._buffered: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Hold a little data until the turn is over; much of it takes several packets anyway."""
        if len(data) > MAX_BUFFERED_BYTES:
            self.flush()
            self._transport.write(data)
            return
        if not self._buffered:
            self._loop.call_soon(self.flush)
        self._buffered.append(data)

    def flush(self) -> None:
        """Write what is held."""
        if self._buffered:
            held, self._buffered = self._buffered, []
            self._transport.write(b"".join(held) if len(held) > 1 else held[0])

    def close(self) -> None:
        """Close the connection behind what was written."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        # Everything else is the transport's own.
        return getattr(self._transport, name)


class WriteBufferingProtocol(HttpToolsProtocol):
    """uvicorn's HTTP with a cork on its connections; give it to uvicorn as `http`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection."""
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in _TCP_FAMILIES:
            # asyncio forgets this for sockets that somebody else made, such as an inherited one.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(WriteBufferingTransport(transport, self.loop))  # type: ignore[arg-type]
