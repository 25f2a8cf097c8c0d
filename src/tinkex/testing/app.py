"""The ASGI application: note the call, let a fault have its way, answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from tinkex.testing.answers import Answer, Refusal
from tinkex.testing.calls import Call, CallLog
from tinkex.testing.faults import Fault, FaultPlan
from tinkex.testing.routing import Route, Router
from tinkex.testing.state import World

Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]

#: Where the server puts a connection's transport, so that a fault can close it.
TRANSPORT = "tinkex.transport"


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
            await self._serve_badly(fault, route, call, scope[TRANSPORT], receive, send)
            return
        answer = self._answer(route, call)
        await _send(answer if isinstance(answer, Answer) else await answer, send)

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
        transport: asyncio.Transport,
        receive: Receive,
        send: Send,
    ) -> None:
        if fault.delay_seconds > 0.0:
            await self._world.clock.wait(fault.delay_seconds)
        if fault.drop or fault.garbage is not None:
            transport.write(fault.garbage or b"")
            await _close(transport, receive)
            return
        answer = await self._faulty_answer(fault, route, call)
        if fault.drop_after:
            await _close(transport, receive)
        elif fault.cut_after_bytes is not None:
            await _start(answer, answer.sized_headers, send)
            part = answer.body[: fault.cut_after_bytes]
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await _close(transport, receive)
        else:
            await _send(answer, send, is_chunked=fault.chunked)

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


async def _send(answer: Answer, send: Send, *, is_chunked: bool = False) -> None:
    await _start(answer, answer.headers if is_chunked else answer.sized_headers, send)
    await send({"type": "http.response.body", "body": answer.body})


async def _start(answer: Answer, headers: list[tuple[bytes, bytes]], send: Send) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})


async def _close(transport: asyncio.Transport, receive: Receive) -> None:
    """Close the connection, and wait until the server knows: it would answer 500 otherwise."""
    transport.close()
    while (await receive())["type"] != "http.disconnect":
        pass
