"""The ASGI application: note the call, let a fault have its way, answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from tinkex.testing.answers import Answer, Refusal
from tinkex.testing.calls import Call, CallLog
from tinkex.testing.faults import Fault, FaultPlan
from tinkex.testing.routing import Route, Router
from tinkex.testing.state import World

Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]

#: Where in the scope the server puts the request's connection.
CONNECTION = "tinkex.connection"


class Connection(Protocol):
    """What the server lets the application do besides ASGI."""

    def answer(self, answer: Answer) -> None:
        """Send a complete answer in one write."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes that need not be HTTP."""
        ...

    def close(self) -> None:
        """Close the connection when everything written is sent."""
        ...


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class StubApp:
    """Serves a world; keeps calls in a log unless there is none."""

    def __init__(self, world: World, faults: FaultPlan, log: CallLog | None) -> None:
        self._world = world
        self._faults = faults
        self._log = log
        self._router = Router(world.dialect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        raw_path: str = scope["raw_path"].decode("latin-1")
        method: str = scope["method"]
        route, ids = self._router.find(method, raw_path)
        try:
            body = await _read_body(receive)
        except ClientGone:
            return
        call = Call(
            route.endpoint, method, raw_path, scope["query_string"], scope["headers"], body, ids
        )
        if self._log is not None:
            self._log.add(call)
        fault = None if self._faults.is_empty else self._faults.take(call)
        if fault is not None:
            await self._serve_badly(fault, route, call, scope[CONNECTION], receive, send)
            return
        answer = self._answer(route, call)
        if not isinstance(answer, Answer):
            answer = await answer
        connection: Connection = scope[CONNECTION]
        connection.answer(answer)

    def _answer(self, route: Route, call: Call) -> Answer | Awaitable[Answer]:
        """The answer itself, or where it takes time, a wait for it."""
        try:
            if not route.is_open:
                call.tenant = self._world.tenants.identify(call.api_key)
            if route.handler is None:
                raise Refusal(404, f"there is nothing at {call.method} {call.path}")
            answer = route.handler(self._world, call)
        except Refusal as refusal:
            return refusal.answer()
        return answer if isinstance(answer, Answer) else _with_refusals(answer)

    async def _serve_badly(
        self,
        fault: Fault,
        route: Route,
        call: Call,
        connection: Connection,
        receive: Receive,
        send: Send,
    ) -> None:
        if fault.delay_seconds > 0.0:
            await self._world.clock.wait(fault.delay_seconds)
        if fault.drop or fault.garbage is not None:
            connection.write(fault.garbage or b"")
            await _close(connection, receive)
            return
        answer = await self._faulty_answer(fault, route, call)
        if fault.drop_after:
            await _close(connection, receive)
        elif fault.cut_after_bytes is not None:
            sized = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
            part = answer.body[: fault.cut_after_bytes]
            await _send(Answer(answer.status, part, sized), send, more_body=True)
            await _close(connection, receive)
        elif fault.chunked:
            await _send(answer, send)
        else:
            connection.answer(answer)

    async def _faulty_answer(self, fault: Fault, route: Route, call: Call) -> Answer:
        if fault.status is not None:
            return fault.answer()
        made = self._answer(route, call)
        answer = made if isinstance(made, Answer) else await made
        return Answer(answer.status, answer.body, [*answer.headers, *fault.raw_headers()])


async def _with_refusals(waiting: Awaitable[Answer]) -> Answer:
    try:
        return await waiting
    except Refusal as refusal:
        return refusal.answer()


async def _read_body(receive: Receive) -> bytes:
    message = await receive()
    if message["type"] == "http.request" and not message["more_body"]:
        whole: bytes = message["body"]
        return whole
    parts = []
    while message["type"] == "http.request":
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts)
        message = await receive()
    raise ClientGone


async def _send(answer: Answer, send: Send, *, more_body: bool = False) -> None:
    """Send through ASGI, which answers in chunks if no header says the length."""
    headers = answer.headers
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": more_body})


async def _close(connection: Connection, receive: Receive) -> None:
    """Close, and wait until the server knows: it would answer 500 otherwise."""
    connection.close()
    while (await receive())["type"] != "http.disconnect":
        pass
