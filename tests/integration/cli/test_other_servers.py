"""Errors for URLs of other web servers do not contain their pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import tinkex
from tests.integration.cli.conftest import RunCli
from tinkex.cli.context import Context
from tinkex.errors import APIError

PAGE = b"<!DOCTYPE HTML>\n<html><body><h1>Welcome</h1></body></html>"
Serve = Callable[[int], str]


@pytest.fixture
def other() -> Iterator[Serve]:
    """Start a web server that answers every request with one status and page."""
    servers: list[ThreadingHTTPServer] = []

    def serve(status: int) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                self.send_response(status)
                self.send_header("content-type", "text/html;charset=utf-8")
                self.send_header("content-length", str(len(PAGE)))
                self.end_headers()
                self.wfile.write(PAGE)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Do not log."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("status", [200, 404, 405, 501])
@pytest.mark.parametrize("words", [("run", "list"), ("sample", "--prompt", "hi")])
def test_command_reports_other_server(
    status: int, words: tuple[str, ...], other: Serve, tinkex: RunCli
) -> None:
    url = other(status)
    result = tinkex(*words, context=Context(base_url=url, api_key="tml-x"))
    assert (result.exit_code, result.out) == (1, "")
    assert result.err == (
        f"Error: {url} is not a Tinker server: it answered with a web page "
        f"(status {status})\nCheck --base-url; a Tinker server answers in JSON.\n"
    )


def test_sdk_reports_other_server(other: Serve) -> None:
    url = other(404)
    with (
        tinkex.ServiceClient(base_url=url, api_key="tml-x") as service,
        pytest.raises(APIError, match=f"{url} is not a Tinker server") as refused,
    ):
        service.get_server_capabilities()
    assert "Welcome" not in str(refused.value)
    assert "base_url" in (refused.value.hint or "")


def test_proxy_error_page_is_hidden_and_retried(other: Serve, tinkex: RunCli) -> None:
    result = tinkex("run", "list", context=Context(base_url=other(502), api_key="tml-x"))
    assert result.exit_code == 1
    assert "is unavailable: a proxy in front of it answered with a web page" in result.err
    assert "run the same command again" in result.err
    assert "Welcome" not in result.err
