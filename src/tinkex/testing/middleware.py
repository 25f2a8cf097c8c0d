"""ASGI middlewares around the real application: recorded calls, faults, dialects and any key."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote

import msgspec

from tinkex.testing.calls import Call, CallLog
from tinkex.testing.dialects import DOWNLOAD, Dialect
from tinkex.testing.faults import Fault, FaultPlan
from tinkex.wire.endpoints import ENDPOINTS, PREFIX

Scope: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

#: Where in the scope the server puts the request's connection, and the recorder the call.
CONNECTION: Final = "tinkex.connection"
CALL: Final = "tinkex.call"


_FILES_PREFIX = f"{PREFIX}/files/"
_PLACEHOLDER = re.compile(r"\\\{(\w+)\\\}")


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


class EndpointMatcher:
    """Finds a request's row of the endpoint table: by a dict for plain paths, else by pattern."""

    def __init__(self) -> None:
        self._plain: dict[tuple[str, str], str] = {}
        self._patterns: list[tuple[str, re.Pattern[str], str]] = []
        for name, endpoint in ENDPOINTS.items():
            path = PREFIX + endpoint.path
            if "{" in path:
                self._patterns.append((endpoint.method, _path_pattern(path), name))
            else:
                self._plain[endpoint.method, path] = name

    def match(self, method: str, raw_path: str) -> tuple[str, dict[str, str]]:
        """The endpoint's name, or an empty one, and the ids in the path."""
        name = self._plain.get((method, raw_path))
        if name is not None:
            return name, {}
        for wanted, pattern, candidate in self._patterns:
            found = pattern.fullmatch(raw_path) if wanted == method else None
            if found is not None:
                return candidate, {key: unquote(text) for key, text in found.groupdict().items()}
        return DOWNLOAD if raw_path.startswith(_FILES_PREFIX) else "", {}


def _path_pattern(path: str) -> re.Pattern[str]:
    """A checkpoint id is two segments, every other id is one."""

    def placeholder(match: re.Match[str]) -> str:
        segment = "[^/]+/[^/]+" if match[1] == "checkpoint_id" else "[^/]+"
        return f"(?P<{match[1]}>{segment})"

    return re.compile(_PLACEHOLDER.sub(placeholder, re.escape(path)))


class CallRecorder:
    """Reads the whole body, records the call, and lets the application read the body again."""

    def __init__(self, app: ASGIApp, log: CallLog | None) -> None:
        self._app = app
        self._log = log
        self._matcher = EndpointMatcher()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Record a request and pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        if body is None:
            return
        path = scope["raw_path"].decode("latin-1")
        endpoint, ids = self._matcher.match(scope["method"], path)
        call = Call(
            endpoint, scope["method"], path, scope["query_string"], scope["headers"], body, ids
        )
        if self._log is not None:
            self._log.add(call)
        scope[CALL] = call
        await self._app(scope, _replay(body, receive), send)


async def _read_body(receive: Receive) -> bytes | None:
    """The request's body, or None if the client disconnected before it was complete."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    is_read = False

    async def read() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return read


class FaultInjector:
    """Replaces, delays or damages the responses of calls that a fault was planned for."""

    def __init__(self, app: ASGIApp, faults: FaultPlan) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, with its fault if it has one."""
        call: Call | None = scope.get(CALL)
        fault = None
        if call is not None and not self._faults.is_empty:
            fault = self._faults.take(call)
        if fault is None:
            await self._serve(scope, receive, send)
        else:
            await self._serve_fault(fault, scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if CALL in scope:
            scope[CALL].was_served = True
        await self._app(scope, receive, send)

    async def _serve_fault(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope[CONNECTION]
        # The body was read by the recorder, so the next message says that the client is gone.
        await receive()
        if fault.delay_seconds > 0.0 and await _is_disconnected(receive, fault.delay_seconds):
            return
        if fault.drop or fault.garbage is not None:
            connection.write(fault.garbage or b"")
            await _close(connection, receive)
            return
        body = scope[CALL].body
        response = await self._respond(fault, scope, _replay(body, receive))
        if fault.drop_after:
            await _close(connection, receive)
        elif fault.cut_after_bytes is not None:
            headers = [pair for pair in response.headers if pair[0] != b"content-length"]
            headers.append((b"content-length", b"%d" % len(response.body)))
            part = response.body[: fault.cut_after_bytes]
            await send_response(send, BufferedResponse(response.status, headers, part), is_cut=True)
            await _close(connection, receive)
        else:
            if fault.chunked:
                headers = [pair for pair in response.headers if pair[0] != b"content-length"]
                response = response._replace(headers=headers)
            await send_response(send, response, is_chunked=fault.chunked)

    async def _respond(self, fault: Fault, scope: Scope, receive: Receive) -> BufferedResponse:
        if fault.status is not None:
            return BufferedResponse(fault.status, fault.answer().headers, fault.answer().body)
        response = await buffer_response(self._serve, scope, receive)
        return response._replace(headers=[*response.headers, *fault.raw_headers()])


async def _is_disconnected(receive: Receive, seconds: float) -> bool:
    """Wait; True if the client disconnected meanwhile."""
    try:
        async with asyncio.timeout(seconds):
            while (await receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        return False
    return True


async def _close(connection: Connection, receive: Receive) -> None:
    """Close, and wait until the server has noticed: it would send a 500 otherwise."""
    connection.close()
    while (await receive())["type"] != "http.disconnect":
        pass


class KeyAdapter:
    """Replaces the API key of every request by the one that the application knows."""

    def __init__(self, app: ASGIApp, stored_key: Callable[[str], str]) -> None:
        self._app = app
        self._stored_key = stored_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Replace the credential of a request and pass it on."""
        call: Call | None = scope.get(CALL)
        if call is not None:
            key = self._stored_key(call.api_key or "")
            others = [pair for pair in scope["headers"] if pair[0] != b"x-api-key"]
            header = [(b"x-api-key", key.encode("latin-1"))] if key else []
            scope = {**scope, "headers": [*others, *header]}
        await self._app(scope, receive, send)


class DialectAdapter:
    """Makes the application behave like another kind of server of this API."""

    def __init__(self, app: ASGIApp, dialect: Dialect) -> None:
        self._app = app
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse what this kind of server does not read, and rewrite what it answers."""
        call: Call | None = scope.get(CALL)
        if call is None:
            await self._app(scope, receive, send)
            return
        refusal = self._refuse(call)
        if refusal is not None:
            await send_response(send, refusal)
            return
        is_archive = call.endpoint == "checkpoint_archive"
        if not self._dialect.writes_proto or (is_archive and not self._dialect.archive_redirects):
            scope = {**scope, "headers": _accept_json(scope["headers"])}
        if not self._dialect.rewrites(call.endpoint):
            await self._app(scope, receive, send)
            return
        response = await buffer_response(self._app, scope, receive)
        await send_response(send, self._rewrite(call, response))

    def _refuse(self, call: Call) -> BufferedResponse | None:
        if call.endpoint in self._dialect.lacks:
            return json_response(404, {"detail": f"no such endpoint: {call.method} {call.path}"})
        if call.endpoint == "forward_backward":
            is_readable = self._dialect.reads_proto if call.is_proto else self._dialect.reads_json
            if not is_readable:
                content_type = call.headers.get("content-type", "no content type")
                return json_response(
                    415, {"detail": f"forward_backward cannot be read as {content_type}"}
                )
        return None

    def _rewrite(self, call: Call, response: BufferedResponse) -> BufferedResponse:
        if not _is_json(response) or response.status >= 500:
            return response
        content = msgspec.json.decode(response.body)
        if call.endpoint == "retrieve_future":
            return self._rewrite_result(response, content)
        if "request_id" not in content:
            return response
        if not self._dialect.names_sequences:
            content.pop("sample_sequence_ids", None)
        if self._dialect.long_promises:
            content |= {"future_id": content["request_id"], "status": "pending"}
        return response.with_json(content)

    def _rewrite_result(self, response: BufferedResponse, content: Any) -> BufferedResponse:
        if response.status == 408:
            if self._dialect.pending_is_ok:
                return response.with_json({"type": "try_again", **content}, 200)
            if self._dialect.fails_by_status:
                return response.with_json({"detail": "Timeout waiting for result"}, 408)
        is_failure = response.status == 200 and "error" in content and "category" in content
        if not (is_failure and self._dialect.fails_by_status):
            return response
        if content["category"] == "user":
            return response.with_json({"detail": content["error"]}, 400)
        return response.with_json({"detail": "Unknown error"}, 500)


def _accept_json(headers: Headers) -> Headers:
    return [
        *(pair for pair in headers if pair[0] != b"accept"),
        (b"accept", b"application/json"),
    ]


def _is_json(response: BufferedResponse) -> bool:
    return any(
        name.lower() == b"content-type" and b"json" in value for name, value in response.headers
    )
