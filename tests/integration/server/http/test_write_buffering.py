from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from tests.integration.conftest import TIMEOUT_SECONDS
from tinkex.server.http.connection_protocol import (
    MAX_BUFFERED_BYTES,
    WriteBufferingProtocol,
    WriteBufferingTransport,
)

ChunkedApp = list[bytes]


@contextlib.contextmanager
def serve_chunks(pieces: ChunkedApp) -> Iterator[socket.socket]:
    """A connection to a server that responds with a head and these body chunks."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        length = str(sum(map(len, pieces))).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, piece in enumerate(pieces, 1):
            more = number < len(pieces)
            await send({"type": "http.response.body", "body": piece, "more_body": more})

    config = uvicorn.Config(app, http=WriteBufferingProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            with socket.create_connection(
                listener.getsockname(), timeout=TIMEOUT_SECONDS
            ) as connection:
                yield connection
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive()


def send_request(
    connection: socket.socket, connection_header: str = "keep-alive"
) -> tuple[bytes, int]:
    """The body of a response, and the number of reads."""
    connection.sendall(
        f"GET / HTTP/1.1\r\nhost: x\r\nconnection: {connection_header}\r\n\r\n".encode()
    )
    data, num_reads = b"", 0
    while True:
        data += connection.recv(1 << 22)
        num_reads += 1
        head, separator, body = data.partition(b"\r\n\r\n")
        if separator and len(body) == int(
            head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
        ):
            return body, num_reads


def test_head_and_body_are_sent_in_one_write() -> None:
    with serve_chunks([b"hello"]) as connection:
        assert [send_request(connection) for _ in range(20)] == [(b"hello", 1)] * 20


@pytest.mark.parametrize("size", [MAX_BUFFERED_BYTES - 1, MAX_BUFFERED_BYTES + 1, 3_000_000])
def test_large_bodies_arrive_complete_and_in_order(size: int) -> None:
    pieces = [b"a" * 100, bytes(range(256)) * (size // 256), b"z" * 7, b"y" * size]
    with serve_chunks(pieces) as connection:
        for _ in range(3):
            assert send_request(connection)[0] == b"".join(pieces)


def test_buffer_is_flushed_before_close() -> None:
    with serve_chunks([b"goodbye"]) as connection:
        assert send_request(connection, "close")[0] == b"goodbye"
        assert connection.recv(100) == b""


class FakeTransport:
    """A transport that records what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True


class FakeLoop:
    """An event loop that runs scheduled callbacks on demand."""

    def __init__(self) -> None:
        self.due: list[Any] = []

    def call_soon(self, work: Any) -> None:
        self.due.append(work)

    def end(self) -> None:
        due, self.due = self.due, []
        for work in due:
            work()


def test_small_writes_are_buffered_until_loop_iteration_ends() -> None:
    transport, loop = FakeTransport(), FakeLoop()
    buffered: Any = WriteBufferingTransport(transport, loop)  # type: ignore[arg-type]
    large = b"x" * (MAX_BUFFERED_BYTES + 1)

    buffered.write(b"a")
    buffered.write(b"b")
    assert transport.written == []
    loop.end()
    assert transport.written == [b"ab"]

    buffered.write(b"c")
    buffered.write(large)
    assert transport.written[1:] == [b"c", large]
    loop.end()
    assert len(transport.written) == 3

    buffered.write(b"d")
    buffered.close()
    assert transport.written[-1] == b"d"
    assert transport.is_closed
