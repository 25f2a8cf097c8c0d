"""The listening socket and its reachability."""

from __future__ import annotations

import socket
import threading

import pytest

from tinkex.errors import ConfigError
from tinkex.server.process.listen_socket import listen, listener_url
from tinkex.server_discovery import get_http_status
from tinkex.system.addresses import is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        # A host name may resolve to another address tomorrow.
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_loopback_addresses(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_listen_socket_is_reachable_at_its_url(host: str) -> None:
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        assert listener_url(listener) == f"http://127.0.0.1:{port}"
        # Connections wait in the backlog until a process accepts them.
        socket.create_connection(("127.0.0.1", port)).close()


def test_ipv6_url_has_brackets() -> None:
    try:
        listener = listen("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert listener_url(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_port_in_use_error() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1", "a" * 300, "ä\0"])
def test_foreign_address_error(host: str) -> None:
    with pytest.raises(ConfigError, match="is not an address of this machine"):
        listen(host, 0)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", 200),
        (b"HTTP/1.0 503 Busy\r\n", 503),
        (b"SSH-2.0 200 hello\r\n", None),
        (b"HTTP/1.1 soon\r\n", None),
        (b"\n", None),
        (b"", None),
    ],
)
def test_status_of_any_server_or_none(said: bytes, status: int | None) -> None:
    with listen("127.0.0.1", 0) as listener:
        # A server that is not HTTP may send data first.
        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(said)

        answering = threading.Thread(target=answer)
        answering.start()
        assert get_http_status(f"{listener_url(listener)}/any", 20.0) == status
        answering.join()


def test_status_is_none_without_server() -> None:
    with listen("127.0.0.1", 0) as listener:
        url = listener_url(listener)
    assert get_http_status(url, 5.0) is None
