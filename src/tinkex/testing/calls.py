"""What arrived at the stub server, kept so that a test can look at it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from tinkex.types import ForwardBackwardRequest
from tinkex.wire.codec import decompress_zstd
from tinkex.wire.proto import decode_forward_backward_request

#: What a request may grow to when it is unpacked.
MAX_UNPACKED_BYTES = 1 << 28


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
        "tenant",
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
        self.tenant = ""
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
        """Keep a call, and tell whoever waits for one."""
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
