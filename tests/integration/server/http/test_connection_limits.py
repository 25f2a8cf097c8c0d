"""Slow or abusive connections get an error or are closed, and other clients are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import uvicorn

from tests.integration.conftest import TIMEOUT_SECONDS, eventually
from tinkex.server.http import connections as registry
from tinkex.server.http.connection_protocol import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    LimitedHttpProtocol,
)
from tinkex.server.http.connections import ConnectionLimits, ConnectionRegistry

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LONG = 8 * 1024 * 1024


@dataclass(frozen=True)
class RunningServer:
    """A server on a socket, and the requests of its application."""

    address: Any
    paths: list[str]
    may_end: threading.Event

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=TIMEOUT_SECONDS)


async def receive_all(receive: Any) -> int:
    num_bytes = 0
    while True:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return num_bytes


@contextlib.contextmanager
def run_server(**options: Any) -> Iterator[RunningServer]:
    """`/` answers at once, `/read` after the body, `/long` with a large body, `/wait` later.

    `/hold` answers when it is released.
    """
    paths: list[str] = []
    may_end = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        body = b"ok"
        if scope["path"] == "/read":
            body = str(await receive_all(receive)).encode()
        elif scope["path"] == "/long":
            body = bytes(LONG)
        elif scope["path"] == "/wait":
            await asyncio.sleep(3 * SHORT)
        elif scope["path"] == "/hold":
            await asyncio.to_thread(may_end.wait, TIMEOUT_SECONDS)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    limits = {"max_connections": 50, "max_per_peer": 50, "head_seconds": 9.0, "body_seconds": 9.0}
    connections = ConnectionRegistry(ConnectionLimits(**{**limits, **options}))
    http: Any = partial(LimitedHttpProtocol, connections=connections)
    server = uvicorn.Server(uvicorn.Config(app, http=http, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield RunningServer(listener.getsockname(), paths, may_end)
        finally:
            server.should_exit = True
            server.force_exit = True
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive()


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Read one response: status, headers, body."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers: dict[str, str] = {}
        while line := file.readline().strip().decode():
            name, _, value = line.partition(": ")
            headers[name] = value
        return status, headers, file.read(int(headers["content-length"]))


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection after all data is read."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


SHORT = 0.3


@pytest.fixture(autouse=True)
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SWEEP_SECONDS", 0.05)


def test_incomplete_head_returns_408_and_idle_connection_is_closed() -> None:
    with (
        run_server(head_seconds=SHORT) as server,
        server.connect() as half,
        server.connect() as silent,
    ):
        half.sendall(GET[:20])
        status, headers, body = read_response(half)
        assert (status, headers["connection"]) == (408, "close")
        assert (
            json.loads(body)["error"]
            == "the head of the request did not arrive in time; send it again"
        )
        assert is_closed(half)
        assert is_closed(silent)


def test_slow_head_times_out() -> None:
    with run_server(head_seconds=SHORT) as server, server.connect() as slow:
        slow.settimeout(0.02)
        answer = b""
        for byte in b"GET / HTTP/1.1\r\nx: " + b"y" * 10_000:
            with contextlib.suppress(ConnectionError):
                slow.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                answer = slow.recv(100)
                break
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_slow_request_outlives_head_timeout() -> None:
    with run_server(head_seconds=SHORT, body_seconds=SHORT) as server, server.connect() as patient:
        patient.sendall(GET.replace(b"/ ", b"/wait ", 1))
        assert read_response(patient)[0] == 200
        patient.sendall(GET)
        assert read_response(patient)[0] == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 2), 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 3 * MAX_HEAD_BYTES, 431),
        (b"GET / HTTP/1.1\r\n" + (b"a: " + b"b" * 8000 + b"\r\n") * 10, 431),
        (b"GET /?" + b"q" * 2 * MAX_HEAD_BYTES, 431),
        (b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", 400),
    ],
)
def test_oversized_or_invalid_head_is_rejected(head: bytes, status: int) -> None:
    with run_server() as server, server.connect() as attacker:
        with contextlib.suppress(ConnectionError):
            attacker.sendall(head)
        answer = read_response(attacker)
        assert answer[0] == status
        assert json.loads(answer[2])["error"]
        assert is_closed(attacker)
        assert server.paths == []
        with server.connect() as other:
            other.sendall(GET)
            assert read_response(other)[0] == 200


def test_large_head_within_limit() -> None:
    with run_server() as server, server.connect() as client:
        filler = b"x: " + b"y" * (MAX_HEAD_BYTES - 100)
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n" + filler + b"\r\n\r\n")
        assert read_response(client)[0] == 200


def test_pipelined_requests_are_limited_and_ordered() -> None:
    with run_server() as server, server.connect() as client, server.connect() as attacker:
        client.sendall(GET * MAX_PIPELINED)
        for _ in range(MAX_PIPELINED):
            data = b""
            while not data.endswith(b"ok"):
                data += client.recv(1)
        attacker.sendall(GET.replace(b"/ ", b"/wait ", 1) * 5000)
        assert read_response(attacker)[0] == 429
        assert is_closed(attacker)
        assert server.paths.count("/wait") <= 1


def test_tiny_chunks_and_long_chunk_extensions_are_rejected() -> None:
    head = b"POST /read HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for poison in (b"1\r\na\r\n" * 10_000, b"1;" + b"x" * 3 * MAX_HEAD_BYTES):
        with run_server() as server, server.connect() as attacker:
            with contextlib.suppress(ConnectionError):
                attacker.sendall(head + poison)
            assert read_response(attacker)[0] in {400, 431}
            assert is_closed(attacker)


def test_trailers_are_ignored_and_limited() -> None:
    head = b"POST /read HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    with run_server() as server, server.connect() as client, server.connect() as attacker:
        client.sendall(head + b"x-api-key: tml-other\r\n\r\n")
        assert read_response(client)[2] == b"3"
        with contextlib.suppress(ConnectionError):
            attacker.sendall(head + (b"a: " + b"b" * 1000 + b"\r\n") * 200)
        assert read_response(attacker)[0] == 431


def test_unread_body_after_response_is_cut_off() -> None:
    with run_server(body_seconds=SHORT) as server, server.connect() as attacker:
        attacker.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\nabc")
        assert read_response(attacker)[0] == 200
        assert is_closed(attacker)


def test_late_body_within_limit_keeps_connection() -> None:
    with run_server() as server, server.connect() as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab")
        assert read_response(client)[0] == 200
        client.sendall(b"cde" + GET)
        assert read_response(client)[0] == 200


def test_unread_response_times_out() -> None:
    with run_server(body_seconds=SHORT) as server, server.connect() as attacker:
        attacker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        attacker.sendall(GET.replace(b"/ ", b"/long ", 1))
        ended = threading.Event()

        def reset() -> None:
            # Nothing is read in the meantime; the server's reset is an error of the socket.
            while not attacker.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                ended.wait(0.05)
            ended.set()

        waiting = threading.Thread(target=reset, daemon=True)
        waiting.start()
        waiting.join(TIMEOUT_SECONDS)
        assert ended.is_set()


def test_half_sent_requests_do_not_block_others() -> None:
    with run_server(max_connections=20, max_per_peer=20) as server, contextlib.ExitStack() as stack:
        connections_half_sent = [stack.enter_context(server.connect()) for _ in range(100)]
        for attacker in connections_half_sent:
            with contextlib.suppress(ConnectionError):
                attacker.sendall(GET[:10])
        with server.connect() as client:
            client.sendall(GET)
            assert read_response(client)[0] == 200


def test_connection_limit_returns_503() -> None:
    with run_server(max_connections=2, max_per_peer=2) as server, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(server.connect()) for _ in range(2)]
        for client in busy:
            client.sendall(GET.replace(b"/ ", b"/hold ", 1))
        eventually(lambda: len(server.paths) == 2)
        new_connection = stack.enter_context(server.connect())
        status, headers, _ = read_response(new_connection)
        assert (status, headers["retry-after"]) == (503, "1")
        server.may_end.set()
        assert [read_response(client)[0] for client in busy] == [200, 200]
