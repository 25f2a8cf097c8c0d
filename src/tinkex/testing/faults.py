"""Faults that a test injects into the responses of the stub server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from tinkex.errors import InvalidInput
from tinkex.testing.asgi import (
    CALL,
    CONNECTION,
    ASGIApp,
    BufferedResponse,
    Connection,
    Receive,
    Scope,
    Send,
    buffer_response,
    replay_body,
    send_response,
)
from tinkex.testing.calls import Call

Match: TypeAlias = Callable[[Call], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What to do instead of, before or after the real response."""

    status: int | None = None
    """Respond with this status, without doing the work; None does the work."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of that response; without a status, headers added to the real one."""
    body: Mapping[str, Any] | bytes | None = None
    """Body of that response: a mapping becomes JSON, bytes are sent as they are."""
    delay_seconds: float = 0.0
    """Wait this long first."""
    drop: bool = False
    """Close the connection without a response, before the work."""
    drop_after: bool = False
    """Do the work, then close the connection: the response is lost."""
    cut_after_bytes: int | None = None
    """Close after this many bytes of the body, though its content-length is larger."""
    chunked: bool = False
    """Respond in chunks, without a content-length."""
    garbage: bytes | None = None
    """Send these bytes, which need not be HTTP, instead of a response, and close."""

    def __post_init__(self) -> None:
        if self.status is not None and not 200 <= self.status <= 599:
            raise InvalidInput(f"Fault.status is {self.status}; expected 200 to 599, or None")
        if self.status is None and self.body is not None:
            raise InvalidInput(f"Fault.body needs a status, got {self.body!r:.80} and none")
        if self.delay_seconds < 0.0:
            raise InvalidInput(f"Fault.delay_seconds is {self.delay_seconds}; expected at least 0")

    def response(self) -> BufferedResponse:
        """The response that replaces the real one."""
        headers = self.raw_headers()
        if isinstance(self.body, bytes):
            body = self.body
        else:
            body = b"" if self.body is None else msgspec.json.encode(dict(self.body))
            if body and not any(name == b"content-type" for name, _ in headers):
                headers = [(b"content-type", b"application/json"), *headers]
        return BufferedResponse(self.status or 200, headers, body)

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers as they are written."""
        return [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in self.headers.items()
        ]


@dataclass(slots=True, eq=False)
class _Order:
    fault: Fault
    num_left: int | None
    match: Match | None


class FaultPlan:
    """Planned faults, in the order in which they were added."""

    def __init__(self) -> None:
        self._orders: dict[str, list[_Order]] = {}
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """True if no fault is planned; read without the lock, because every call reads it."""
        return not self._orders

    def add(self, endpoint: str, fault: Fault, times: int | None, match: Match | None) -> None:
        """Plan a fault for the next calls of an endpoint; `times` None means all of them."""
        if times is not None and times < 1:
            raise InvalidInput(f"times is {times}; expected at least 1, or None for ever")
        with self._lock:
            self._orders.setdefault(endpoint, []).append(_Order(fault, times, match))

    def clear(self) -> None:
        """Remove all planned faults."""
        with self._lock:
            self._orders.clear()

    def take(self, call: Call) -> Fault | None:
        """The fault for this call, if one is planned."""
        with self._lock:
            orders = self._orders.get(call.endpoint, [])
            for order in orders:
                if order.match is None or order.match(call):
                    self._use(call.endpoint, order)
                    return order.fault
        return None

    def _use(self, endpoint: str, order: _Order) -> None:
        if order.num_left is None:
            return
        order.num_left -= 1
        if order.num_left == 0:
            self._orders[endpoint].remove(order)
            if not self._orders[endpoint]:
                del self._orders[endpoint]


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
        response = await self._respond(fault, scope, replay_body(body, receive))
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
            return fault.response()
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
