"""Serve the inference endpoints: authenticate, decode, call the handler, send events or a body."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote

from litestar import asgi
from litestar.handlers import ASGIRouteHandler
from litestar.types import HTTPScope, Receive, Send

from tinkex.ids import new_id
from tinkex.server.http.auth import authenticate
from tinkex.server.http.prometheus import INFERENCE_REQUESTS
from tinkex.server.http.request_body import (
    MAX_INLINE_DECODE_BYTES,
    BodyMemoryBudget,
    BodyReservation,
    ClientDisconnected,
    check_json,
    decompress_body,
    decompressed_bytes,
    is_zstd_encoded,
    read_body,
)
from tinkex.server.http.request_context import RawResponse, Services
from tinkex.server.http.router import send_response
from tinkex.server.inference.error_bodies import (
    ApiFamily,
    InferenceError,
    MethodNotAllowed,
    describe_failure,
)
from tinkex.server.inference.inference_call import (
    EventStream,
    InferenceCall,
    InferenceRoute,
)
from tinkex.server.inference.inference_reply import OpenStreams, Reply
from tinkex.wire.codec import decode_json

T = TypeVar("T")
#: The paths below which each family's endpoints are; the first is the short one.
BASE_PATHS: Mapping[ApiFamily, tuple[str, ...]] = {
    ApiFamily.OPENAI: ("/v1", "/oai/api/v1"),
    ApiFamily.ANTHROPIC: ("/v1", "/anthropic/api/v1"),
}
#: Where the paths of rooted routes begin: clients remove `/v1/...` from their base URL.
ROOTS = ("", "/oai/api")
#: Maximum request body, unless max_body_bytes is less; a prompt does not need more.
MAX_BODY_BYTES = 16 * 1024 * 1024
#: Maximum objects and lists of a body, and brackets in its texts. Each takes time to be decoded.
MAX_JSON_CONTAINERS = 256 * 1024
_MOUNTS = ("/v1", "/oai/api", "/anthropic/api")
_MODEL = "{model}"


class InferenceTable:
    """The routes of both families by path and method."""

    def __init__(self, routes: Iterable[InferenceRoute]) -> None:
        self._routes: dict[str, dict[tuple[str, ApiFamily], InferenceRoute]] = {}
        for route in routes:
            bases = ROOTS if route.is_rooted else BASE_PATHS[route.family]
            for base in bases:
                methods = self._routes.setdefault(base + route.path, {})
                methods[route.method, route.family] = route
                if route.method == "GET":
                    methods["HEAD", route.family] = route
        self._prefixes = [path for path in self._routes if path.endswith(_MODEL)]

    @property
    def rooted_paths(self) -> list[str]:
        """The paths outside the mounts."""
        return [path for path in self._routes if not path.startswith(_MOUNTS)]

    def find(
        self, path: str, family: ApiFamily
    ) -> tuple[Mapping[str, InferenceRoute], ApiFamily, str]:
        """Return the routes of a path by method, its family and the model in the path."""
        found, model_id = self._routes.get(path), ""
        if found is None:
            for template in self._prefixes:
                prefix = template.removesuffix(_MODEL)
                if path.startswith(prefix) and len(path) > len(prefix):
                    found, model_id = self._routes[template], path.removeprefix(prefix)
        if found is None:
            return {}, family, ""
        # A path that both families have is answered in the caller's; others have one family.
        families = {known for _, known in found}
        family = family if family in families else next(iter(families))
        methods = {method: route for (method, known), route in found.items() if known is family}
        return methods, family, model_id


def guess_family(path: str, headers: Mapping[str, str]) -> ApiFamily:
    """Return the family of a caller by its path and headers."""
    is_anthropic = path.startswith(("/anthropic/", "/v1/messages"))
    if is_anthropic or ("anthropic-version" in headers and not path.startswith("/oai/")):
        return ApiFamily.ANTHROPIC
    return ApiFamily.OPENAI


def build_inference_routes(
    services: Services, routes: Sequence[InferenceRoute], body_budget: BodyMemoryBudget
) -> list[ASGIRouteHandler]:
    """Build the Litestar routes of all inference endpoints."""
    if not services.config.inference:
        return []
    table = InferenceTable(routes)
    endpoint = InferenceEndpoints(services, table, body_budget)

    @asgi(list(_MOUNTS), is_mount=True, copy_scope=False)
    async def serve(scope: HTTPScope, receive: Receive, send: Send) -> None:
        await endpoint.serve(scope, receive, send)

    if not table.rooted_paths:
        return [serve]

    @asgi(table.rooted_paths, copy_scope=False)
    async def serve_rooted(scope: HTTPScope, receive: Receive, send: Send) -> None:
        await endpoint.serve(scope, receive, send)

    return [serve, serve_rooted]


class InferenceEndpoints:
    """Serves requests to the paths of a table."""

    def __init__(
        self, services: Services, table: InferenceTable, body_budget: BodyMemoryBudget
    ) -> None:
        self._table = table
        self._services = services
        self._body_budget = body_budget
        self._open_streams = OpenStreams(services.config.inference_max_streams)
        self._max_bytes = min(MAX_BODY_BYTES, self._body_budget.max_body_bytes)

    async def serve(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        """Answer one request; every error has the body of its family."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        path, method = _read_path(scope), scope["method"]
        methods, family, model_id = self._table.find(path, guess_family(path, headers))
        if method == "OPTIONS" and methods:
            await send_response(_options_response(methods), send)
            return
        reply = Reply(family, new_id(), send)
        try:
            route = _check_method(methods, method, path)
            reply.endpoint = route.name
            identity = await authenticate(self._services, headers)
            # Until the response is sent, because the decoded request is in memory as well.
            with self._body_budget.reserve(identity.tenant_id) as reservation:
                call: InferenceCall[object] = InferenceCall(
                    identity=identity,
                    request=await self._read_request(route, headers, receive, reservation),
                    headers=headers,
                    query=_parse_query(scope["query_string"]),
                    model_id=model_id,
                )
                with self._open_streams.reserve(call):
                    await _run_until_disconnect(self._respond(route, call, reply), receive)
        except ClientDisconnected:
            reply.status = 499
        except Exception as error:  # noqa: BLE001 - the last-resort handler of these paths
            await reply.send_failure(describe_failure(error, reply.endpoint))
        finally:
            INFERENCE_REQUESTS.labels(family.value, reply.endpoint, str(reply.status)).inc()

    async def _respond(
        self, route: InferenceRoute, call: InferenceCall[object], reply: Reply
    ) -> None:
        response = await route.handler(self._services, call)
        if isinstance(response, EventStream):
            await reply.send_stream(response)
        else:
            await reply.send(response)

    async def _read_request(
        self,
        route: InferenceRoute,
        headers: Mapping[str, str],
        receive: Receive,
        reservation: BodyReservation,
    ) -> object:
        if route.request_type is None:
            return None
        limit, seconds = self._max_bytes, self._body_budget.body_seconds
        is_compressed = is_zstd_encoded(headers.get("content-encoding", "").strip().lower())
        length = headers.get("content-length")
        body = await read_body(receive, length, limit, seconds, reservation.grow)
        if not is_compressed and len(body) <= MAX_INLINE_DECODE_BYTES:
            return _decode(body, route.request_type)
        if is_compressed:
            reservation.grow(decompressed_bytes(body, limit))

        def decode_body() -> object:
            content = decompress_body(body, limit) if is_compressed else body
            return _decode(content, route.request_type)

        return await self._body_budget.run_decoder(decode_body)


def _decode(body: bytes, type_: Any) -> object:
    check_json(body, MAX_JSON_CONTAINERS)
    return decode_json(body or b"{}", type_)


def _check_method(methods: Mapping[str, InferenceRoute], method: str, path: str) -> InferenceRoute:
    """Return the route of a method; raises 404 for unknown paths, 405 for other methods."""
    if not methods:
        raise InferenceError(f"no such endpoint: {method} {path[:200]}", status=404)
    if method not in methods:
        allowed = ", ".join(sorted({*methods, "OPTIONS"}))
        raise MethodNotAllowed(f"{method} {path[:200]} is not allowed; allowed: {allowed}", allowed)
    return methods[method]


def _read_path(scope: HTTPScope) -> str:
    """Return the path as it was sent, without the normalization of the framework."""
    path = unquote(scope["raw_path"].partition(b"?")[0].decode("latin-1"))
    return path.rstrip("/") or "/"


def _parse_query(raw: bytes) -> dict[str, str]:
    try:
        return dict(parse_qsl(raw.decode("ascii"), errors="strict", max_num_fields=64))
    except ValueError:
        raise InferenceError("the query string is invalid") from None


def _options_response(methods: Iterable[str]) -> RawResponse:
    allowed = ", ".join(sorted([*methods, "OPTIONS"]))
    return RawResponse(status=204, body=b"", headers={"allow": allowed})


async def _run_until_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Run a request; cancels it and raises ClientDisconnected when the client is gone."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for pending in (watcher, task):
            pending.cancel()
        await asyncio.wait({task, watcher})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
