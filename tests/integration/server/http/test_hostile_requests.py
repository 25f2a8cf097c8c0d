"""Invalid requests to all endpoints: no 500, no hang, no traceback."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import uvicorn

from tests.integration.conftest import TIMEOUT_SECONDS
from tests.support.asgi_client import Reply, send_request
from tests.support.server_harness import API, KEY, ServerHarness, open_harness
from tinkex.server.app import create_app
from tinkex.server.http.connection_protocol import LimitedHttpProtocol
from tinkex.server.http.connections import ConnectionLimits, ConnectionRegistry
from tinkex.wire.endpoints import ENDPOINTS, BodyFormat

#: Without the endpoint that would revoke the key.
ROWS = [row for name, row in sorted(ENDPOINTS.items()) if name != "delete_api_key"]
SERVED = {(row.method, row.path) for row in ENDPOINTS.values()}
#: Values for every field of a message that decoders often mishandle.
VALUES = (
    b"9223372036854775808",
    b"18446744073709551616",
    b"-9223372036854775809",
    b"1" + b"0" * 400,
    b"1e999",
    b"-1e999",
    b"1e-999",
    b"NaN",
    b"Infinity",
    b'"\\ud800"',
    b'"\\udfff\\ud800"',
    b'"' + b"x" * 70_000 + b'"',
    b"[" * 2000 + b"]" * 2000,
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
    b"null",
    b'{"type":"nothing"}',
    b"\xff\xfe",
)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHarness]:
    with open_harness(tmp_path_factory.mktemp("hostile"), max_body_bytes=1024 * 1024) as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        yield
    assert [record for record in caplog.records if record.exc_info] == []


def path_of(row: Any, value: str = "s:train:0") -> str:
    parts = {"checkpoint_id": "weights/0001"}
    path: str = row.path
    while "{" in path:
        before, _, rest = path.partition("{")
        name, _, after = rest.partition("}")
        path = f"{before}{parts.get(name, value)}{after}"
    return API + path


def check(reply: Reply, harness: ServerHarness) -> None:
    assert reply.status < 500, reply.body
    assert str(harness.services.home.root).encode() not in reply.body
    assert b"Traceback" not in reply.body


def send(
    harness: ServerHarness, method: str, path: str, body: bytes = b"", **headers: str
) -> Reply:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    reply = asyncio.run(
        asyncio.wait_for(
            send_request(harness.client.app, method, path, (body, b""), given), TIMEOUT_SECONDS
        )
    )
    check(reply, harness)
    return reply


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "QUERY"])
def test_every_path_with_wrong_methods(harness: ServerHarness, method: str) -> None:
    for row in ROWS:
        if (method, row.path) not in SERVED and not row.is_long_poll:
            reply = send(harness, method, path_of(row))
            assert reply.status != 200 or method in {"HEAD", "OPTIONS"}, (row.name, method)


def test_every_field_with_invalid_values(harness: ServerHarness) -> None:
    for row in ROWS:
        if row.body is BodyFormat.NONE or row.is_long_poll:
            continue
        fields = getattr(row.request, "__struct_fields__", ()) or ("model_id", "forward_input")
        for value in VALUES:
            items = (b'"%s":%s' % (field.encode(), value) for field in fields)
            send(harness, row.method, path_of(row), b"{" + b",".join(items) + b"}")
        for body in (b"[]", b"1", b'"x"', b"null", b"{", b"}", b"{}{}", b"\xef\xbb\xbf{}"):
            send(harness, row.method, path_of(row), body)
        twice = b"{" + b",".join(b'"%s":1,"%s":"x"' % (f.encode(), f.encode()) for f in fields)
        send(harness, row.method, path_of(row), twice + b"}")


@pytest.mark.parametrize(
    "headers",
    [
        {"content_type": "text/html"},
        {"content_type": "application/x-protobuf; charset=\x80"},
        {"content_type": "," * 5000},
        {"content_encoding": "gzip, zstd, br"},
        {"content_length": "9" * 500},
        {"content_length": "-1"},
        {"x_idempotency_key": "k" * 60_000},
        {"x_idempotency_key": "\udcff".encode("utf-8", "surrogatepass").decode("latin-1")},
        {"range": "bytes=" + ",".join(f"{start}-" for start in range(5000))},
        {"range": "bytes=-" + "9" * 400},
        {"range": "lines=1-2"},
        {"host": "x" * 5000},
        {"accept": "\x00"},
    ],
    ids=lambda headers: "-".join(headers),
)
def test_every_endpoint_with_invalid_headers(
    harness: ServerHarness, headers: dict[str, str]
) -> None:
    for row in ROWS:
        if not row.is_long_poll:
            send(harness, row.method, path_of(row), b"{}", **headers)


@pytest.mark.parametrize(
    "value",
    [
        *("\x00", "a\x00b", "..", "%2e%2e", "a%2fb", "%00", "\N{SNOWMAN}", "x" * 20_000),
        *("tinker:", " ", "'; drop table runs; --", "-1", "1e999", "\ufffe"),
    ],
)
def test_every_path_id_with_invalid_values(harness: ServerHarness, value: str) -> None:
    for row in ROWS:
        if "{" in row.path:
            send(harness, row.method, path_of(row, value), b"{}")


# --- bytes on a socket ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(harness: ServerHarness) -> Iterator[Any]:
    limits = ConnectionLimits(
        max_connections=50, max_per_peer=50, head_seconds=0.5, body_seconds=0.5
    )
    http: Any = partial(LimitedHttpProtocol, connections=ConnectionRegistry(limits))
    app = create_app(harness.services)
    config = uvicorn.Config(app, http=http, lifespan="off", log_config=None)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield listener.getsockname()
        server.should_exit = server.force_exit = True
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()


def exchange_bytes(address: Any, data: bytes) -> bytes:
    """The server's output for these bytes until it closes the connection or waits."""
    heard = b""
    with (
        socket.create_connection(address, timeout=TIMEOUT_SECONDS) as line,
        contextlib.suppress(ConnectionError),
    ):
        line.sendall(data)
        try:
            line.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # the server has closed the connection already
                raise
        while piece := line.recv(1 << 16):
            heard += piece
    return heard


LOGIN = b"Host: x\r\nX-API-Key: " + KEY.encode() + b"\r\n"
POST = b"POST /api/v1/create_session HTTP/1.1\r\n" + LOGIN
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
#: Request smuggling: two servers may disagree about the end of the body.
FRAMES = {
    "both lengths": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}",
    "list of lengths": POST + b"Content-Length: 2, 40\r\n\r\n{}",
    "signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "hexadecimal length": POST + b"Content-Length: 0x2\r\n\r\n{}",
    "length beyond 64 bits": POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "space before colon": POST + b"Content-Length : 2\r\n\r\n{}",
    "folded header": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunked then other": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "vertical tab": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "huge chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "negative chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "endless chunk extension": POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 200_000,
    "bare line feeds": POST.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\n{}",
}
SHAPES = FRAMES | {
    "NUL in path": b"GET /api/v1/a\x00b HTTP/1.1\r\n" + LOGIN + b"\r\n",
    "encoded NUL in path": b"GET /api/v1/sessions/%00 HTTP/1.1\r\n" + LOGIN + b"\r\n",
    "encoded slashes": b"GET /api/v1/sessions/..%2f..%2fkey HTTP/1.1\r\n" + LOGIN + b"\r\n",
    "broken escapes": b"GET /api/v1/sessions/%zz%f HTTP/1.1\r\n" + LOGIN + b"\r\n",
    "bytes above 127 in path": b"GET /api/v1/sessions/\xff\xfe HTTP/1.1\r\n" + LOGIN + b"\r\n",
    "bytes above 127 in header": b"GET /api/v1/sessions HTTP/1.1\r\nX-API-Key: \xff\r\n\r\n",
    "escaped surrogate": b"GET /api/v1/sessions/%ed%a0%80 HTTP/1.1\r\n" + LOGIN + b"\r\n",
    "absolute form": b"GET http://other/api/v1/healthz HTTP/1.1\r\n" + LOGIN + b"\r\n",
    "authority form": b"CONNECT other:443 HTTP/1.1\r\n" + LOGIN + b"\r\n",
    "asterisk form": b"OPTIONS * HTTP/1.1\r\n" + LOGIN + b"\r\n",
    "unknown version": b"GET /api/v1/healthz HTTP/9.9\r\n" + LOGIN + b"\r\n",
    "upgrade": b"GET /api/v1/healthz HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    "websocket": b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "unknown expectation": POST + b"Expect: 200-ok\r\nContent-Length: 2\r\n\r\n{}",
    "many parameters": b"GET /api/v1/sessions?" + b"limit=1&" * 5000 + b" HTTP/1.1\r\n\r\n",
    "absurd query": b"GET /api/v1/sessions?limit=%ff&=&&offset=1e999 HTTP/1.1\r\n"
    + LOGIN
    + b"\r\n",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_malformed_bytes_are_rejected_without_request_smuggling(
    harness: ServerHarness, address: Any, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard = exchange_bytes(address, SHAPES[shape] + SMUGGLED)
    assert b"HTTP/1.1 5" not in heard
    assert shape not in FRAMES or b"/smuggled" not in heard
    assert b"Traceback" not in heard
    assert str(harness.services.home.root).encode() not in heard
    assert exchange_bytes(address, b"GET /api/v1/healthz HTTP/1.1\r\nConnection: close\r\n\r\n")


def test_key_remains_valid_after_hostile_requests(harness: ServerHarness) -> None:
    assert send(harness, "GET", f"{API}/sessions").status == 200


def test_expect_continue_receives_100(address: Any) -> None:
    head = POST + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
    with socket.create_connection(address, timeout=TIMEOUT_SECONDS) as line:
        line.sendall(head)
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        line.sendall(b"{}")
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 422 ")
