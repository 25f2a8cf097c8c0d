"""Every row of the endpoint table as a route: authenticate, decode, call the handler, encode."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from litestar import HttpMethod, Request
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from tinkex.checkpoint.disk import is_disk_full
from tinkex.errors import InvalidInput
from tinkex.ids import TYPE_BY_SEGMENT, check_id, check_name
from tinkex.server.auth import authenticate
from tinkex.server.call import NOBODY, Answer, Call, Handler, Services
from tinkex.server.intake import Hold, Intake
from tinkex.server.limits import (
    SMALL_BYTES,
    UnsupportedMedia,
    check_cells,
    check_encoding,
    check_json,
    check_metadata,
    read_body,
    unpack,
    unpacked_bytes,
)
from tinkex.server.metrics import RequestMeter
from tinkex.server.queries import read_query
from tinkex.server.refusals import Refused, crash, refusal
from tinkex.types import ForwardRequest
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.endpoints import ENDPOINTS, PREFIX, BodyFormat, Endpoint
from tinkex.wire.messages import Empty
from tinkex.wire.proto import decode_forward_backward_request

#: Endpoints that ask for no key.
OPEN = frozenset({"health"})
#: Endpoints without a slot of their tenant: long polls, which take one only while they read the
#: store, and heartbeats, without which a session ends.
NO_SLOT = OPEN | {"retrieve_future", "retrieve_futures", "session_heartbeat"}
PROTO = "application/x-protobuf"
_NOTHING = Empty()


class LooseEvent(msgspec.Struct, frozen=True):
    """An event of any client, of which only the kind matters here."""

    event: str = ""


class LooseTelemetry(msgspec.Struct, frozen=True):
    """A batch of telemetry of any version: kinds of events that are unknown here are no error."""

    events: list[LooseEvent]


#: Requests that are read less strictly than their row says.
_LOOSE: Mapping[str, type[Any]] = {"telemetry": LooseTelemetry}


def bind(services: Services, routes: Mapping[str, Handler]) -> list[HTTPRouteHandler]:
    """One route per row of the table; `routes` says who answers which row."""
    intake = Intake(services.config)
    return [_route(Bound(services, intake, ENDPOINTS[name], routes[name])) for name in routes]


def route_path(path: str) -> str:
    """A path of the table in the framework's spelling; a checkpoint id is two segments."""
    spelled = path.replace("{checkpoint_id}", "{segment}/{name}")
    return PREFIX + spelled.replace("}", ":str}")


def _route(bound: Bound) -> HTTPRouteHandler:
    row = bound.row

    async def serve(request: Request[Any, Any, Any]) -> ASGIApp:
        return Sending(await bound.serve(request.scope, request.receive))

    methods = [HttpMethod(row.method)]
    if row.method == "GET":
        methods.append(HttpMethod.HEAD)
    route = HTTPRouteHandler(
        route_path(row.path), http_method=methods, name=row.name, status_code=200
    )
    return route(serve)


class Sending:
    """An answer on its way: what the framework calls once the handler is done."""

    __slots__ = ("_answer",)

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send_answer(self._answer, send)


async def send_answer(answer: Answer, send: Send) -> None:
    """Send an answer in one piece, with its length; the server drops the body of a HEAD."""
    headers = [
        (b"content-type", answer.content_type.encode("latin-1")),
        (b"content-length", b"%d" % len(answer.body)),
        *(
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in answer.headers.items()
        ),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


class Bound:
    """One endpoint with its handler."""

    def __init__(
        self, services: Services, intake: Intake, row: Endpoint[Any, Any], handler: Handler
    ) -> None:
        self.row = row
        self._services = services
        self._intake = intake
        self._handler = handler
        self._meter = RequestMeter(row.name)
        self._is_open = row.name in OPEN
        self._takes_slot = row.name not in NO_SLOT
        self._request_type = _LOOSE.get(row.name, row.request)
        self._has_metadata = "user_metadata" in getattr(row.request, "__struct_fields__", ())
        limit = intake.max_body_bytes
        self._max_bytes = limit if row.max_body_bytes is None else min(limit, row.max_body_bytes)

    async def serve(self, scope: Any, receive: Receive) -> Answer:
        """Answer one request; what nobody foresaw is left to the application's own handler."""
        started_at = time.perf_counter()
        status = 500
        try:
            answer = await self._answer(scope, receive)
            status = answer.status
        except Refused as error:
            answer = refusal(error)
            status = answer.status
        except OSError as error:
            if not is_disk_full(error):
                raise
            answer = crash(error, self.row.name)
            status = answer.status
        finally:
            self._meter.count(status, time.perf_counter() - started_at)
        return answer

    async def _answer(self, scope: Any, receive: Receive) -> Answer:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        row = self.row
        identity = NOBODY if self._is_open else await authenticate(self._services, headers)
        ids = _read_ids(scope["path_params"])
        query = read_query(scope["query_string"], row.query)
        with self._intake.hold(identity.tenant_id) as hold:
            request, body, is_proto = await self._read(headers, receive, hold)
            call = Call(
                endpoint=row.name,
                identity=identity,
                request=request,
                body=body,
                is_proto=is_proto,
                ids=ids,
                query=query,
                headers=headers,
                base_url=_base_url(scope, headers),
            )
            if self._takes_slot:
                async with self._services.slots.of(identity.tenant_id):
                    reply = await self._handler(self._services, call)
            else:
                reply = await self._handler(self._services, call)
        return reply if isinstance(reply, Answer) else _as_answer(reply)

    async def _read(
        self, headers: Mapping[str, str], receive: Receive, hold: Hold
    ) -> tuple[Any, bytes, bool]:
        """The decoded message, its bytes, and whether they are protobuf."""
        row = self.row
        if row.body is BodyFormat.NONE:
            return _NOTHING, b"", False
        is_packed = check_encoding(headers.get("content-encoding", "").strip().lower())
        is_proto = "protobuf" in headers.get("content-type", "")
        if is_proto and row.body is not BodyFormat.PROTO:
            raise UnsupportedMedia(f"{row.name} takes application/json, not protobuf")
        limit, length = self._max_bytes, headers.get("content-length")
        body = await read_body(receive, length, limit, self._intake.body_seconds, hold.grow)
        decode: Callable[[bytes], Any] = _decode_proto if is_proto else self._decode_json
        if not is_packed and len(body) <= SMALL_BYTES:
            return decode(body), body, is_proto
        if is_packed:
            hold.grow(unpacked_bytes(body, limit))

        def work() -> tuple[Any, bytes, bool]:
            content = unpack(body, limit) if is_packed else body
            return decode(content), content, is_proto

        return await self._intake.decode(work)

    def _decode_json(self, body: bytes) -> Any:
        check_json(body)
        if self._has_metadata:
            check_metadata(body or b"{}")
        request = decode_json(body or b"{}", self._request_type)
        check_cells(request)
        return request


def _decode_proto(body: bytes) -> Any:
    request, is_forward_only = decode_forward_backward_request(body)
    check_id("model_id", request.model_id)
    check_cells(request)
    if not is_forward_only:
        return request
    return ForwardRequest(request.forward_backward_input, request.model_id, request.seq_id)


def _read_ids(path_params: Mapping[str, str]) -> dict[str, str]:
    """The ids of the path, each one segment; `segment` and `name` together name a checkpoint."""
    if not path_params:
        return {}
    ids = {name: check_id(name, value) for name, value in path_params.items()}
    if "segment" in ids:
        segment, name = ids.pop("segment"), check_name(ids.pop("name"))
        if segment not in TYPE_BY_SEGMENT:
            kinds = ", ".join(TYPE_BY_SEGMENT)
            raise InvalidInput(f"Invalid checkpoint id: {segment!r} is not one of {kinds}")
        ids["checkpoint_id"] = f"{segment}/{name}"
    return ids


def _base_url(scope: Any, headers: Mapping[str, str]) -> str:
    host = headers.get("host")
    if host is None:
        address = scope.get("server") or ("localhost", None)
        host = address[0] if address[1] is None else f"{address[0]}:{address[1]}"
    return f"{scope.get('scheme', 'http')}://{host}{scope.get('root_path', '')}"


def _as_answer(reply: object) -> Answer:
    return Answer() if reply is None else Answer(body=encode_json(reply))
