"""Routes of the endpoint table: authenticate, decode, call the handler, encode the response."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from litestar import HttpMethod
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from tinkex.errors import InvalidInput
from tinkex.ids import TYPE_BY_SEGMENT, check_id, check_name
from tinkex.server.http.auth import authenticate
from tinkex.server.http.error_responses import (
    HANDLED_ERRORS,
    internal_error_response,
    response_for_error,
)
from tinkex.server.http.prometheus import RequestMetrics
from tinkex.server.http.request_body import (
    MAX_INLINE_DECODE_BYTES,
    BodyMemoryBudget,
    BodyReservation,
    UnsupportedMediaType,
    check_json,
    check_metadata,
    check_sparse_size,
    decompress_body,
    decompressed_bytes,
    is_zstd_encoded,
    read_body,
)
from tinkex.server.http.request_context import (
    ANONYMOUS,
    Handler,
    RawResponse,
    RequestContext,
    Services,
)
from tinkex.server.http.request_origin import HttpRequest
from tinkex.server.http.validation import parse_query
from tinkex.system.disk_errors import is_disk_full
from tinkex.types import ForwardRequest
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.endpoints import ENDPOINTS, PREFIX, BodyFormat, Endpoint
from tinkex.wire.messages import Empty
from tinkex.wire.proto import decode_forward_backward_request

#: Endpoints that need no API key.
PUBLIC_ENDPOINTS = frozenset({"health"})
#: Endpoints that do not take a tenant slot: long polls, which take one only while they read the
#: store, and heartbeats, without which a session would expire.
ENDPOINTS_WITHOUT_SLOT = PUBLIC_ENDPOINTS | {
    "retrieve_future",
    "retrieve_futures",
    "session_heartbeat",
}
PROTOBUF_TYPE = "application/x-protobuf"
_EMPTY_REQUEST = Empty()


class LenientTelemetryEvent(msgspec.Struct, frozen=True):
    """An event of any client version; only its type is read."""

    event: str = ""


class LenientTelemetry(msgspec.Struct, frozen=True):
    """A telemetry batch of any client version; unknown event types are accepted."""

    events: list[LenientTelemetryEvent]


#: Request types that replace those of the endpoint table, to decode leniently.
_LENIENT_TYPES: Mapping[str, type[Any]] = {"telemetry": LenientTelemetry}


def build_routes(services: Services, routes: Mapping[str, Handler]) -> list[HTTPRouteHandler]:
    """Build one Litestar route per endpoint; `routes` maps endpoint names to handlers."""
    body_budget = BodyMemoryBudget(services.config)
    return [
        _build_route(EndpointHandler(services, body_budget, ENDPOINTS[name], handler))
        for name, handler in routes.items()
    ]


def route_path(path: str) -> str:
    """The path of an endpoint in Litestar's syntax; a checkpoint id consists of two segments."""
    return PREFIX + path.replace("{checkpoint_id}", "{segment}/{name}").replace("}", ":str}")


def _build_route(handler: EndpointHandler) -> HTTPRouteHandler:
    endpoint = handler.endpoint

    async def serve(request: HttpRequest) -> ASGIApp:
        return RawResponseApp(await handler.serve(request.scope, request.receive))

    methods = [HttpMethod(endpoint.method)]
    if endpoint.method == "GET":
        methods.append(HttpMethod.HEAD)
    route = HTTPRouteHandler(
        route_path(endpoint.path), http_method=methods, name=endpoint.name, status_code=200
    )
    return route(serve)


class RawResponseApp:
    """An ASGI application that sends a finished response."""

    __slots__ = ("_response",)

    def __init__(self, response: RawResponse) -> None:
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send_response(self._response, send)


async def send_response(response: RawResponse, send: Send) -> None:
    """Send a response in one chunk; uvicorn drops the body of a HEAD request."""
    headers = [
        (b"content-type", response.content_type.encode("latin-1")),
        (b"content-length", b"%d" % len(response.body)),
        *(
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in response.headers.items()
        ),
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


class EndpointHandler:
    """Serves the requests of one endpoint."""

    def __init__(
        self,
        services: Services,
        body_budget: BodyMemoryBudget,
        endpoint: Endpoint[Any, Any],
        handler: Handler,
    ) -> None:
        self.endpoint = endpoint
        self._services = services
        self._body_budget = body_budget
        self._handler = handler
        self._metrics = RequestMetrics(endpoint.name)
        self._is_public = endpoint.name in PUBLIC_ENDPOINTS
        self._takes_slot = endpoint.name not in ENDPOINTS_WITHOUT_SLOT
        self._request_type = _LENIENT_TYPES.get(endpoint.name, endpoint.request)
        self._has_metadata = "user_metadata" in getattr(endpoint.request, "__struct_fields__", ())
        limit = body_budget.max_body_bytes
        self._max_bytes = (
            limit if endpoint.max_body_bytes is None else min(limit, endpoint.max_body_bytes)
        )

    async def serve(self, scope: Any, receive: Receive) -> RawResponse:
        """Handle one request; unexpected errors go to the application's exception handler."""
        started_at = time.perf_counter()
        status = 500
        try:
            response = await self._handle(scope, receive)
            status = response.status
        except HANDLED_ERRORS as error:
            response = response_for_error(error)
            status = response.status
        except OSError as error:
            if not is_disk_full(error):
                raise
            response = internal_error_response(error, self.endpoint.name)
            status = response.status
        finally:
            self._metrics.observe(status, time.perf_counter() - started_at)
        return response

    async def _handle(self, scope: Any, receive: Receive) -> RawResponse:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        identity = ANONYMOUS if self._is_public else await authenticate(self._services, headers)
        ids = _parse_path_ids(scope["path_params"])
        query = parse_query(scope["query_string"], self.endpoint.query)
        with self._body_budget.reserve(identity.tenant_id) as reservation:
            request, body, is_proto = await self._read_request(headers, receive, reservation)
            context = RequestContext(
                endpoint=self.endpoint.name,
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
                async with self._services.tenant_slots.semaphore_for(identity.tenant_id):
                    reply = await self._handler(self._services, context)
            else:
                reply = await self._handler(self._services, context)
        return reply if isinstance(reply, RawResponse) else _to_response(reply)

    async def _read_request(
        self, headers: Mapping[str, str], receive: Receive, reservation: BodyReservation
    ) -> tuple[Any, bytes, bool]:
        """Return the decoded message, its bytes, and whether they are protobuf."""
        endpoint = self.endpoint
        if endpoint.body is BodyFormat.NONE:
            return _EMPTY_REQUEST, b"", False
        is_compressed = is_zstd_encoded(headers.get("content-encoding", "").strip().lower())
        is_proto = "protobuf" in headers.get("content-type", "")
        if is_proto and endpoint.body is not BodyFormat.PROTO:
            raise UnsupportedMediaType(f"{endpoint.name} accepts application/json, not protobuf")
        limit, length = self._max_bytes, headers.get("content-length")
        body = await read_body(
            receive, length, limit, self._body_budget.body_seconds, reservation.grow
        )
        decode: Callable[[bytes], Any] = _decode_proto if is_proto else self._decode_json
        if not is_compressed and len(body) <= MAX_INLINE_DECODE_BYTES:
            return decode(body), body, is_proto
        if is_compressed:
            reservation.grow(decompressed_bytes(body, limit))

        def decode_body() -> tuple[Any, bytes, bool]:
            content = decompress_body(body, limit) if is_compressed else body
            return decode(content), content, is_proto

        return await self._body_budget.run_decoder(decode_body)

    def _decode_json(self, body: bytes) -> Any:
        check_json(body)
        if self._has_metadata:
            check_metadata(body or b"{}")
        request = decode_json(body or b"{}", self._request_type)
        check_sparse_size(request)
        return request


def _decode_proto(body: bytes) -> Any:
    request, is_forward_only = decode_forward_backward_request(body)
    check_id("model_id", request.model_id)
    check_sparse_size(request)
    if not is_forward_only:
        return request
    return ForwardRequest(request.forward_backward_input, request.model_id, request.seq_id)


def _parse_path_ids(path_params: Mapping[str, str]) -> dict[str, str]:
    """Validate the ids in a path; `segment` and `name` together are a checkpoint id."""
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


def _to_response(reply: object) -> RawResponse:
    return RawResponse() if reply is None else RawResponse(body=encode_json(reply))
