from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from tests.integration.conftest import PATIENCE
from tinkex.server.http.connection_protocol import (
    MAX_BUFFERED_BYTES,
    WriteBufferingProtocol,
    WriteBufferingTransport,
)

Pieces = list[bytes]


@contextlib.contextmanager
def answering(pieces: Pieces) -> Iterator[socket.socket]:
    """A connection to a server that answers with a head and these pieces of body."""

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
            with socket.create_connection(listener.getsockname(), timeout=PATIENCE) as connection:
                yield connection
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


def ask(connection: socket.socket, connection_header: str = "keep-alive") -> tuple[bytes, int]:
    """The body of an answer, and in how many reads it came."""
    connection.sendall(
        f"GET / HTTP/1.1\r\nhost: x\r\nconnection: {connection_header}\r\n\r\n".encode()
    )
    data, num_reads = b"", 0
    while True:
        data += connection.recv(1 << 22)
        num_reads += 1
        head, found, body = data.partition(b"\r\n\r\n")
        if found and len(body) == int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]):
            return body, num_reads


def test_head_and_body_come_in_one_piece() -> None:
    with answering([b"hello"]) as connection:
        assert [ask(connection) for _ in range(20)] == [(b"hello", 1)] * 20


@pytest.mark.parametrize("size", [MAX_BUFFERED_BYTES - 1, MAX_BUFFERED_BYTES + 1, 3_000_000])
def test_large_bodies_arrive_whole_and_in_order(size: int) -> None:
    pieces = [b"a" * 100, bytes(range(256)) * (size // 256), b"z" * 7, b"y" * size]
    with answering(pieces) as connection:
        for _ in range(3):
            assert ask(connection)[0] == b"".join(pieces)


def test_what_was_written_leaves_before_the_connection_closes() -> None:
    with answering([b"goodbye"]) as connection:
        assert ask(connection, "close")[0] == b"goodbye"
        assert connection.recv(100) == b""


class Line:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True


class Turn:
    """A loop that runs what is due when told to."""

    def __init__(self) -> None:
        self.due: list[Any] = []

    def call_soon(self, work: Any) -> None:
        self.due.append(work)

    def end(self) -> None:
        due, self.due = self.due, []
        for work in due:
            work()


def test_little_is_held_until_the_turn_ends_and_much_is_not() -> None:
    line, turn = Line(), Turn()
    cork: Any = WriteBufferingTransport(line, turn)  # type: ignore[arg-type]
    large = b"x" * (MAX_BUFFERED_BYTES + 1)

    cork.write(b"a")
    cork.write(b"b")
    assert line.written == []
    turn.end()
    assert line.written == [b"ab"]

    cork.write(b"c")
    cork.write(large)
    assert line.written[1:] == [b"c", large]
    turn.end()
    assert len(line.written) == 3

    cork.write(b"d")
    cork.close()
    assert line.written[-1] == b"d"
    assert line.is_closed
