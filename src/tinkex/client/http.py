"""The only module that uses the HTTP library: send a request, get bytes or a typed error.

pyqwest (Rust's reqwest) was chosen by measurement; see benchmarks/README.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urljoin, urlsplit

import msgspec
import pyqwest

from tinkex.client.config import Config
from tinkex.client.io_loop import EXIT_GUARD, FORK_GUARD
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APITimeoutError,
    ConnectTimeoutError,
    InvalidInput,
)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """Method and URL of a request, for error reports; contains no secret."""

    method: str
    url: str


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete response."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes = field(repr=False)
    request: HttpRequest | None = None

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode("utf-8", "replace")

    @property
    def is_proto(self) -> bool:
        """True if the body is protobuf."""
        return self.headers.get("content-type", "").startswith("application/x-protobuf")

    @property
    def is_web_page(self) -> bool:
        """True if the body is HTML, which a Tinker server never sends to a client."""
        start = self.content[:64].lstrip().lower()
        is_html = self.headers.get("content-type", "").startswith("text/html")
        return is_html or start.startswith((b"<!doctype html", b"<html"))

    def json(self) -> Any:
        """The body as JSON; raises ValueError if it is not JSON."""
        return msgspec.json.decode(self.content)


class HttpTransport(Protocol):
    """Interface of an HTTP transport; tests pass e.g. pyqwest.testing.ASGITransport."""

    def execute(self, request: pyqwest.Request) -> Awaitable[pyqwest.Response]:
        """Send one request and await its response."""


class HttpClient:
    """Sends requests to one server over a shared connection pool."""

    def __init__(self, config: Config, transport: HttpTransport | None = None) -> None:
        self._host = urlsplit(config.base_url).netloc
        self._connect_timeout_seconds = config.connect_timeout_seconds
        self._max_response_bytes = config.max_response_bytes
        self._transport = transport or _shared_transport(config)
        self._client = pyqwest.Client(self._transport)

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_seconds: float,
    ) -> HttpResponse:
        """Send one request and read its response into memory; follows redirects of a GET."""
        response = await self._send_once(method, url, headers, body, timeout_seconds)
        for _ in range(MAX_REDIRECTS):
            target = _redirect_target(url, response.status_code, response.headers)
            if target is None or method != "GET":
                break
            url, headers = target, _redirect_headers(headers, url, target)
            response = await self._send_once(method, url, headers, None, timeout_seconds)
        return response

    async def _send_once(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_seconds: float,
    ) -> HttpResponse:
        FORK_GUARD.check()
        request = HttpRequest(method, url)
        try:
            async with asyncio.timeout(timeout_seconds):
                outgoing = pyqwest.Request(method, url, pyqwest.Headers(headers.items()), body)
                reply = await self._transport.execute(outgoing)
                return await _read_body(reply, reply.content, request, self._max_response_bytes)
        except TimeoutError as error:
            raise self._timeout_error(request, timeout_seconds, error) from error
        except _CONNECTION_ERRORS as error:
            raise self._connection_error(request, error) from error
        except ValueError:
            raise _invalid_request_error() from None
        finally:
            EXIT_GUARD.record_request_end()

    @asynccontextmanager
    async def stream(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout_seconds: float,
        body: bytes | None = None,
    ) -> AsyncIterator[HttpStream]:
        """Stream the response to a GET, which follows redirects, or with `body` to a POST."""
        for _ in range(MAX_REDIRECTS):
            async with self._open_stream(url, headers, timeout_seconds, body) as stream:
                target = _redirect_target(url, stream.status, stream.headers)
                if target is None or body is not None:
                    yield stream
                    return
            url, headers = target, _redirect_headers(headers, url, target)
        raise APIConnectionError(
            HttpRequest("GET", url), f"The server sent more than {MAX_REDIRECTS} redirects"
        )

    @asynccontextmanager
    async def _open_stream(
        self, url: str, headers: Mapping[str, str], timeout_seconds: float, body: bytes | None
    ) -> AsyncIterator[HttpStream]:
        FORK_GUARD.check()
        request = HttpRequest("GET" if body is None else "POST", url)
        # The library closes the response when this object is freed: keep it while reading.
        opening = self._client.stream(request.method, url, headers=headers, content=body)
        try:
            async with asyncio.timeout(timeout_seconds):
                reply = await opening.__aenter__()
        except TimeoutError as error:
            raise self._timeout_error(request, timeout_seconds, error) from error
        except _CONNECTION_ERRORS as error:
            raise self._connection_error(request, error) from error
        except ValueError:
            raise _invalid_request_error() from None
        try:
            yield HttpStream(reply, request, timeout_seconds)
        finally:
            await opening.__aexit__(None, None, None)
            EXIT_GUARD.record_request_end()

    def _timeout_error(
        self, request: HttpRequest, timeout_seconds: float, error: TimeoutError
    ) -> APITimeoutError:
        if isinstance(error, pyqwest.ConnectTimeout):
            seconds = self._connect_timeout_seconds
            return ConnectTimeoutError(
                request,
                f"Timed out: {self._host} did not accept a connection within {seconds:g} s",
                hint="Check base_url and that the server is running.",
            )
        return APITimeoutError(
            request,
            f"Request timed out: {self._host} did not answer within {timeout_seconds:g} s",
            hint="Check that the server is up, or raise timeout_seconds.",
        )

    def _connection_error(self, request: HttpRequest, error: Exception) -> APIConnectionError:
        return APIConnectionError(
            request,
            f"Connection error: cannot reach {self._host}: {_root_cause(error)}",
            hint="Check base_url and that the server is running.",
        )


class HttpStream:
    """A response whose body is still being received."""

    def __init__(
        self, reply: pyqwest.Response, request: HttpRequest, timeout_seconds: float
    ) -> None:
        self.status = reply.status
        self.headers = _lowercase_headers(reply.headers)
        self._reply = reply
        self._request = request
        self._timeout_seconds = timeout_seconds

    async def read(self, max_bytes: int) -> HttpResponse:
        """Read the body into memory; raises if it is larger than the limit."""
        return await _read_body(self._reply, self.chunks(), self._request, max_bytes)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body in chunks; raises if none arrives within the timeout."""
        chunks = aiter(self._reply.content)
        while True:
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise APITimeoutError(self._request, "The download stalled") from error
            except _CONNECTION_ERRORS as error:
                raise APIConnectionError(
                    self._request, f"The download was interrupted: {_root_cause(error)}"
                ) from error
            yield bytes(chunk)


async def _read_body(
    reply: pyqwest.Response,
    chunks: AsyncIterator[bytes | bytearray | memoryview],
    request: HttpRequest,
    max_bytes: int,
) -> HttpResponse:
    """Read a body up to a limit, counted after decompression; truncate error responses."""
    headers, is_error = _lowercase_headers(reply.headers), reply.status >= 400
    limit = min(max_bytes, MAX_ERROR_BYTES) if is_error else max_bytes
    length = headers.get("content-length", "")
    declared = int(length) if length.isdecimal() and len(length) < 19 else None
    received: list[bytes] = []
    num_bytes = 0 if declared is None or is_error else declared
    if num_bytes <= limit:
        num_bytes = 0
        async for chunk in chunks:
            received.append(bytes(chunk))
            num_bytes += len(chunk)
            # Do not wait for the library to signal the end: that takes as long again.
            if num_bytes > limit or num_bytes == declared:
                break
    content = received[0] if len(received) == 1 else b"".join(received)
    if num_bytes > limit:
        await reply.aclose()
        if not is_error:
            raise _too_large_error(
                HttpResponse(reply.status, headers, b"", request), num_bytes, limit
            )
    return HttpResponse(reply.status, headers, content[:limit], request)


def _too_large_error(
    response: HttpResponse, num_bytes: int, limit: int
) -> APIResponseValidationError:
    error = APIResponseValidationError(
        response,
        None,
        f"The response has at least {num_bytes:,} bytes; at most {limit:,} are accepted",
    )
    error.hint = "If you trust this server, raise max_response_bytes."
    return error


#: Longer error responses are truncated.
MAX_ERROR_BYTES = 2**20
_CONNECTION_ERRORS = (
    ConnectionError,
    pyqwest.ReadError,
    pyqwest.WriteError,
    pyqwest.RemoteProtocolError,
    pyqwest.TooManyRedirects,
    RuntimeError,
)
MAX_REDIRECTS = 5
_REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
#: Headers that may be sent to another host after a redirect.
_REDIRECT_SAFE_HEADERS = frozenset({"accept", "range", "if-range", "user-agent"})
_TRANSPORTS: dict[tuple[str, str, float, int], pyqwest.HTTPTransport] = {}


def _shared_transport(config: Config) -> pyqwest.HTTPTransport:
    """Return the connection pool of (pool name, server), created on first use."""
    origin = urlsplit(config.base_url).netloc
    key = (config.http_pool, origin, config.connect_timeout_seconds, config.max_connections)
    if key not in _TRANSPORTS:
        transport = pyqwest.HTTPTransport(
            tls_include_system_certs=True,
            connect_timeout=config.connect_timeout_seconds,
            pool_max_idle_per_host=config.max_connections,
            max_connections_per_address=config.max_connections,
            enable_otel=False,
            # HttpClient follows redirects itself: credentials must not be sent to another host.
            follow_redirects=False,
        )
        return _TRANSPORTS.setdefault(key, transport)
    return _TRANSPORTS[key]


def _invalid_request_error() -> InvalidInput:
    # The library's message is left out: it quotes header values, which may be secrets.
    return InvalidInput(
        "This request cannot be sent: its URL or one of its headers contains a character that "
        "HTTP does not allow",
        hint="Look for line breaks in keys, tokens and extra headers.",
    )


def _redirect_target(url: str, status: int, headers: Mapping[str, str]) -> str | None:
    location = headers.get("location")
    if status not in _REDIRECT_STATUSES or not location:
        return None
    try:
        return urljoin(url, location)
    except ValueError:
        return None


def _redirect_headers(headers: Mapping[str, str], url: str, target: str) -> Mapping[str, str]:
    if urlsplit(url)[:2] == urlsplit(target)[:2]:
        return headers
    return {
        name: value for name, value in headers.items() if name.lower() in _REDIRECT_SAFE_HEADERS
    }


def _lowercase_headers(headers: pyqwest.Headers) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _root_cause(error: Exception) -> str:
    """Return the innermost cause: the library lists them outermost first."""
    text = str(error)
    if "dns error" in text:
        return "the host name does not resolve"
    return text.rpartition(": ")[2] or type(error).__name__
