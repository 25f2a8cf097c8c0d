"""The requests that the stub server received, recorded for tests."""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from tinkex.errors import InvalidInput
from tinkex.testing.asgi import CALL, ASGIApp, Receive, Scope, Send, replay_body
from tinkex.types import ForwardBackwardRequest
from tinkex.wire.codec import decompress_zstd
from tinkex.wire.endpoints import ENDPOINTS, PREFIX
from tinkex.wire.proto import decode_forward_backward_request

#: The endpoint of file downloads, which have no row in the table.
DOWNLOAD = "download"
_FILES_PREFIX = f"{PREFIX}/files/"
_PLACEHOLDER = re.compile(r"\\\{(\w+)\\\}")
#: What a request may grow to when it is unpacked.
MAX_UNPACKED_BYTES = 1 << 28


def check_endpoint(name: str) -> str:
    """Return a name of the endpoint table (or `download`), or refuse a misspelled one."""
    if name not in ENDPOINTS and name != DOWNLOAD:
        raise InvalidInput(f"{name!r} is not an endpoint; known are {', '.join(ENDPOINTS)}")
    return name


class Call:
    """One request; headers, query and message are read when first asked for."""

    __slots__ = (
        "_headers",
        "_message",
        "_query",
        "_raw_headers",
        "_raw_query",
        "api_key",
        "arrived_at",
        "body",
        "endpoint",
        "ids",
        "method",
        "path",
        "was_served",
    )

    def __init__(
        self,
        endpoint: str,
        method: str,
        path: str,
        raw_query: bytes,
        raw_headers: list[tuple[bytes, bytes]],
        body: bytes,
        ids: dict[str, str],
    ) -> None:
        self.endpoint = endpoint
        self.method = method
        self.path = path
        self.body = body
        self.ids = ids
        self.arrived_at = time.monotonic()
        self.api_key = raw_header(raw_headers, b"x-api-key")
        self.was_served = False
        """Whether the call reached the application; one that a fault replaced did not."""
        self._raw_query = raw_query
        self._raw_headers = raw_headers
        self._headers: dict[str, str] | None = None
        self._query: dict[str, str] | None = None
        self._message: Any = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers by lower-case name."""
        if self._headers is None:
            self._headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in self._raw_headers
            }
        return self._headers

    @property
    def query(self) -> dict[str, str]:
        """The query string, taken apart."""
        if self._query is None:
            self._query = dict(parse_qsl(self._raw_query.decode("latin-1"), keep_blank_values=True))
        return self._query

    @property
    def is_proto(self) -> bool:
        """True when the body is protobuf."""
        return "x-protobuf" in self.headers.get("content-type", "")

    @property
    def wants_proto(self) -> bool:
        """True when the client reads protobuf answers."""
        return b"x-protobuf" in (raw_header(self._raw_headers, b"accept") or "").encode()

    @property
    def message(self) -> Any:
        """The request: a ForwardBackwardRequest for protobuf, else what the JSON says, or None."""
        if self._message is None and self.body:
            self._message = self._read_proto() if self.is_proto else msgspec.json.decode(self.body)
        return self._message[0] if isinstance(self._message, tuple) else self._message

    @property
    def forward_only(self) -> bool:
        """True for a forward_backward request without its second half."""
        _ = self.message
        return isinstance(self._message, tuple) and self._message[1]

    def unpacked_body(self) -> bytes:
        """The body without its compression; ValueError if it is not what it says."""
        if self.headers.get("content-encoding", "") != "zstd":
            return self.body
        return decompress_zstd(self.body, MAX_UNPACKED_BYTES)

    def _read_proto(self) -> tuple[ForwardBackwardRequest, bool]:
        return decode_forward_backward_request(self.unpacked_body())

    def __repr__(self) -> str:
        return f"<Call {self.endpoint or '?'}: {self.method} {self.path}, {len(self.body)} bytes>"


def raw_header(headers: list[tuple[bytes, bytes]], wanted: bytes) -> str | None:
    """The first header of this lower-case name."""
    for name, value in headers:
        if name == wanted:
            return value.decode("latin-1")
    return None


class CallLog:
    """Calls in the order of arrival; written by the server's thread, read by any."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._by_endpoint: dict[str, list[Call]] = defaultdict(list)
        self._changed = threading.Condition()
        self._num_watchers = 0

    def add(self, call: Call) -> None:
        """Record a call and wake the threads that wait for one."""
        self._calls.append(call)
        self._by_endpoint[call.endpoint].append(call)
        if self._num_watchers:
            with self._changed:
                self._changed.notify_all()

    def calls(self, endpoint: str | None = None) -> list[Call]:
        """All calls, or those of one endpoint."""
        return list(self._calls if endpoint is None else self._by_endpoint.get(endpoint, ()))

    def wait_for(self, endpoint: str, count: int, timeout_seconds: float) -> list[Call]:
        """Block until that many calls arrived, or fail with what was seen instead."""
        with self._changed:
            self._num_watchers += 1
            try:
                arrived = self._changed.wait_for(
                    lambda: len(self._by_endpoint.get(endpoint, ())) >= count, timeout_seconds
                )
            finally:
                self._num_watchers -= 1
        if not arrived:
            raise AssertionError(
                f"expected {count} calls of {endpoint} within {timeout_seconds} s, saw "
                f"{len(self.calls(endpoint))}; all calls: {self._summary() or 'none'}"
            )
        return self.calls(endpoint)

    def _summary(self) -> str:
        counts = {name: len(calls) for name, calls in list(self._by_endpoint.items())}
        return ", ".join(f"{name or '?'} {count}" for name, count in counts.items())


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
        await self._app(scope, replay_body(body, receive), send)


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
