"""Routes of the endpoint table: authenticate, decode, call the handler, encode the response."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import unquote

import msgspec
from litestar import asgi
from litestar.exceptions import MethodNotAllowedException, NotFoundException
from litestar.handlers import ASGIRouteHandler
from litestar.types import HTTPScope, Receive, Scope, Send

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
_LENIENT_TYPES: Mapping[str, type[object]] = {"telemetry": LenientTelemetry}


def build_routes(
    services: Services, routes: Mapping[str, Handler], body_budget: BodyMemoryBudget
) -> list[ASGIRouteHandler]:
    """Build the Litestar route of all endpoints; `routes` maps endpoint names to handlers."""
    table = EndpointTable(
        EndpointHandler(services, body_budget, ENDPOINTS[name], handler)
        for name, handler in routes.items()
    )

    # One route instead of one per endpoint: Litestar would inspect every handler's signature,
    # although all have the same, which takes longer than the rest of creating an application.
    @asgi(PREFIX, is_mount=True, copy_scope=False)
    async def serve(scope: HTTPScope, receive: Receive, send: Send) -> None:
        # Litestar passes the path below the prefix, normalized; messages show it as it was sent.
        path = PREFIX + scope["path"].rstrip("/")
        scope["path"] = unquote(scope["raw_path"].partition(b"?")[0].decode("latin-1"))
        method = scope["method"]
        methods, path_params = table.find(path)
        if method == "OPTIONS":
            await _send_options(methods, send)
            return
        if method not in methods:
            raise MethodNotAllowedException(headers={"allow": ", ".join([*methods, "OPTIONS"])})
        await send_response(await methods[method].serve(scope, receive, path_params), send)

    return [serve]


async def _send_options(methods: Iterable[str], send: Send) -> None:
    allowed = ", ".join(sorted([*methods, "OPTIONS"])).encode("ascii")
    headers = [(b"allow", allowed)]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def route_path(path: str) -> str:
    """The path of an endpoint with its prefix; a checkpoint id consists of two segments."""
    return PREFIX + path.replace("{checkpoint_id}", "{segment}/{name}")


class EndpointTable:
    """The handlers of endpoints by path and method."""

    def __init__(self, handlers: Iterable[EndpointHandler]) -> None:
        self._methods_by_path: dict[str, dict[str, EndpointHandler]] = {}
        for handler in handlers:
            methods = self._methods_by_path.setdefault(route_path(handler.endpoint.path), {})
            methods[handler.endpoint.method] = handler
            if handler.endpoint.method == "GET":
                methods["HEAD"] = handler
        # Literal segments before parameters: `runs/latest` is not the run of id `latest`.
        self._templates = sorted(
            (path.split("/") for path in self._methods_by_path if "{" in path),
            key=lambda segments: [segment.startswith("{") for segment in segments],
        )

    def find(self, path: str) -> tuple[Mapping[str, EndpointHandler], Mapping[str, str]]:
        """Return the handlers of a path by method, and its parameters; raises NotFoundException."""
        methods = self._methods_by_path.get(path)
        if methods is not None and "{" not in path:
            return methods, {}
        segments = path.split("/")
        for template in self._templates:
            path_params = _match_segments(template, segments)
            if path_params is not None:
                return self._methods_by_path["/".join(template)], path_params
        raise NotFoundException


def _match_segments(template: list[str], segments: list[str]) -> dict[str, str] | None:
    """Return the parameters of a path; None if it does not match the template."""
    if len(template) != len(segments):
        return None
    path_params = {}
    for expected, segment in zip(template, segments, strict=True):
        if expected.startswith("{"):
            path_params[expected[1:-1]] = segment
        elif expected != segment:
            return None
    return path_params


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
        endpoint: Endpoint[object, object],
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

    async def serve(
        self, scope: Scope, receive: Receive, path_params: Mapping[str, str]
    ) -> RawResponse:
        """Handle one request; unexpected errors go to the application's exception handler."""
        started_at = time.perf_counter()
        status = 500
        try:
            response = await self._handle(scope, receive, path_params)
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

    async def _handle(
        self, scope: Scope, receive: Receive, path_params: Mapping[str, str]
    ) -> RawResponse:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        identity = ANONYMOUS if self._is_public else await authenticate(self._services, headers)
        ids = _parse_path_ids(path_params)
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
    ) -> tuple[object, bytes, bool]:
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
        decode: Callable[[bytes], object] = _decode_proto if is_proto else self._decode_json
        if not is_compressed and len(body) <= MAX_INLINE_DECODE_BYTES:
            return decode(body), body, is_proto
        if is_compressed:
            reservation.grow(decompressed_bytes(body, limit))

        def decode_body() -> tuple[object, bytes, bool]:
            content = decompress_body(body, limit) if is_compressed else body
            return decode(content), content, is_proto

        return await self._body_budget.run_decoder(decode_body)

    def _decode_json(self, body: bytes) -> object:
        check_json(body)
        if self._has_metadata:
            check_metadata(body or b"{}")
        request = decode_json(body or b"{}", self._request_type)
        check_sparse_size(request)
        return request


def _decode_proto(body: bytes) -> object:
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


def _base_url(scope: Scope, headers: Mapping[str, str]) -> str:
    host = headers.get("host")
    if host is None:
        address = scope.get("server") or ("localhost", None)
        host = address[0] if address[1] is None else f"{address[0]}:{address[1]}"
    return f"{scope.get('scheme', 'http')}://{host}{scope.get('root_path', '')}"


def _to_response(reply: object) -> RawResponse:
    return RawResponse() if reply is None else RawResponse(body=encode_json(reply))
