"""ASGI types and buffered responses, shared by the middlewares of the stub server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec

Scope: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

#: Where in the scope the server puts the request's connection, and the recorder the call.
CONNECTION: Final = "tinkex.connection"
CALL: Final = "tinkex.call"


class ASGIApp(Protocol):
    """An ASGI application."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""


class Connection(Protocol):
    """What the server offers besides ASGI."""

    def write(self, data: bytes) -> None:
        """Send bytes that need not be HTTP."""

    def close(self) -> None:
        """Close the connection when everything written is sent."""


class BufferedResponse(NamedTuple):
    """A complete response."""

    status: int
    headers: Headers
    body: bytes

    def with_json(self, content: Any, status: int | None = None) -> BufferedResponse:
        """The same response with another body and perhaps another status."""
        headers = [pair for pair in self.headers if pair[0] != b"content-length"]
        return BufferedResponse(
            self.status if status is None else status, headers, msgspec.json.encode(content)
        )


def json_response(status: int, content: Any) -> BufferedResponse:
    """A response with a JSON body."""
    return BufferedResponse(
        status, [(b"content-type", b"application/json")], msgspec.json.encode(content)
    )


async def buffer_response(app: ASGIApp, scope: Scope, receive: Receive) -> BufferedResponse:
    """Run the application and return its response instead of sending it."""
    status, headers, parts = 500, [], []

    async def keep(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, keep)
    return BufferedResponse(status, headers, b"".join(parts))


async def send_response(
    send: Send, response: BufferedResponse, *, is_chunked: bool = False, is_cut: bool = False
) -> None:
    """Send a response; a cut one is left unfinished."""
    headers = response.headers
    if not any(name == b"content-length" for name, _ in headers) and not is_chunked:
        headers = [*headers, (b"content-length", b"%d" % len(response.body))]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": is_cut})


def replay_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body which was read before, then what comes after it."""
    is_read = False

    async def read() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return read
