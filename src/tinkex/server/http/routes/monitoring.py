"""Endpoints for operators: readiness, Prometheus metrics and the OpenAPI document."""

from __future__ import annotations

from litestar import Response, get
from litestar.types import ControllerRouterHandler
from prometheus_client import CONTENT_TYPE_LATEST

from tinkex import clock
from tinkex.errors import AuthenticationError, StoreError
from tinkex.jobs.wakeup import ALIVE_SECONDS
from tinkex.server.http.auth import authenticate
from tinkex.server.http.error_responses import response_for_error
from tinkex.server.http.openapi import build_document
from tinkex.server.http.prometheus import render_metrics
from tinkex.server.http.request_context import Services
from tinkex.server.http.request_origin import HttpRequest, is_from_this_machine, read_origin
from tinkex.server.http.store_access import read
from tinkex.settings import package_version
from tinkex.store import stats
from tinkex.wire.codec import encode_json

JSON_TYPE = "application/json"
#: Litestar adds the charset itself.
METRICS_TYPE = CONTENT_TYPE_LATEST.removesuffix("; charset=utf-8")
NO_WORKER = "no worker is running"


@get("/readyz", name="readyz")
async def readyz(request: HttpRequest) -> Response[bytes]:
    """Return 200 if the store is reachable and a worker is alive, otherwise 503."""
    services: Services = request.app.state.services
    if (rejection := await _reject_unauthenticated(services, request)) is not None:
        return rejection
    try:
        store_stats = await _load_stats(services)
    except StoreError as error:
        return _readiness_response(error.message)
    return _readiness_response("" if store_stats.num_workers else NO_WORKER)


def _readiness_response(reason: str) -> Response[bytes]:
    if not reason:
        return Response(b'{"status":"ready"}', media_type=JSON_TYPE)
    body = encode_json({"status": "not ready", "reason": reason})
    return Response(body, status_code=503, media_type=JSON_TYPE, headers={"retry-after": "1"})


@get("/metrics", name="metrics")
async def metrics(request: HttpRequest) -> Response[bytes]:
    """Return the metrics in the Prometheus text format."""
    services: Services = request.app.state.services
    if (rejection := await _reject_unauthenticated(services, request)) is not None:
        return rejection
    try:
        store_stats = await _load_stats(services)
    except StoreError:
        store_stats = None
    return Response(render_metrics(store_stats, clock.now()), media_type=METRICS_TYPE)


@get(["/schema", "/schema/openapi.json", "/openapi.json"], name="schema", sync_to_thread=False)
def schema(request: HttpRequest) -> Response[bytes]:
    """Return the OpenAPI document."""
    state = request.app.state
    if "document" not in state:
        state.document = build_document(state.routes, package_version())
    return Response(state.document, media_type=JSON_TYPE)


async def _load_stats(services: Services) -> stats.StoreStats:
    since = clock.now() - ALIVE_SECONDS
    return await read(services, lambda db: stats.collect_stats(db, alive_since=since))


async def _reject_unauthenticated(
    services: Services, request: HttpRequest
) -> Response[bytes] | None:
    """Return an error response unless the request comes from this machine or has a valid key."""
    origin = read_origin(request.scope)
    if is_from_this_machine(origin):
        return None
    try:
        await authenticate(services, dict(origin.headers))
    except (AuthenticationError, StoreError) as error:
        response = response_for_error(error)
        return Response(
            response.body,
            status_code=response.status,
            media_type=JSON_TYPE,
            headers=dict(response.headers),
        )
    return None


HANDLERS: list[ControllerRouterHandler] = [readyz, metrics, schema]
