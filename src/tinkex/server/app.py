"""The Litestar application: the handler of every endpoint, plus monitoring, downloads and pages."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence

from litestar import Litestar, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.types import ControllerRouterHandler

from tinkex.errors import RequestErrorCategory
from tinkex.ids import CHECKPOINT_ID_SHAPE, PATH_SHAPE
from tinkex.server.dashboard.page_session import PageSessionMiddleware
from tinkex.server.dashboard.pages import HANDLERS as PAGES
from tinkex.server.http.downloads import HANDLERS as DOWNLOADS
from tinkex.server.http.error_responses import error_response, internal_error_response
from tinkex.server.http.request_body import BodyMemoryBudget
from tinkex.server.http.request_context import Handler, RawResponse, Services
from tinkex.server.http.request_origin import HttpRequest
from tinkex.server.http.router import build_routes
from tinkex.server.http.routes import (
    aliases,
    checkpoints,
    futures,
    monitoring,
    runs,
    sampling,
    service,
    sessions,
    tokenizers,
    training,
    usage,
    weights,
)
from tinkex.server.inference.inference_router import build_inference_routes
from tinkex.server.inference.inference_routes import INFERENCE_ROUTES

ROUTES: Mapping[str, Handler] = {
    **service.ROUTES,
    **futures.ROUTES,
    **training.ROUTES,
    **weights.ROUTES,
    **sampling.ROUTES,
    **runs.ROUTES,
    **runs.RUN_METRICS_ROUTES,
    **checkpoints.ROUTES,
    **aliases.ROUTES,
    **tokenizers.ROUTES,
    **sessions.ROUTES,
    **usage.ROUTES,
}
"""The handler of each endpoint, by the endpoint's name."""

EXTRA_HANDLERS: Sequence[ControllerRouterHandler] = (*monitoring.HANDLERS, *DOWNLOADS, *PAGES)
"""Routes outside the endpoint table."""


#: How often the ids of fetched results are written to the store.
FLUSH_SECONDS = 1.5
#: The path of a checkpoint, with a valid or an invalid id.
_CHECKPOINT_URL = re.compile(r"/api/v1/training_runs/[^/]+/checkpoints/(.+)")


def create_app(
    services: Services,
    routes: Mapping[str, Handler] = ROUTES,
    extra_handlers: Sequence[ControllerRouterHandler] = EXTRA_HANDLERS,
) -> Litestar:
    """Build the application from endpoint handlers and plain Litestar handlers.

    `extra_handlers` read the services from the application's state.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        services.waiters.start()
        flush_task = asyncio.create_task(_flush_periodically(services))
        try:
            yield
        finally:
            flush_task.cancel()
            await services.token_streams.close()
            await services.waiters.close()
            flush_fetched(services)

    body_budget = BodyMemoryBudget(services.config)
    return Litestar(
        [
            *build_routes(services, routes, body_budget),
            *build_inference_routes(services, INFERENCE_ROUTES, body_budget),
            *extra_handlers,
        ],
        lifespan=[lifespan],
        middleware=[lambda app: PageSessionMiddleware(app, services)],
        state=State({"services": services, "routes": routes}, deep_copy=False),
        exception_handlers={HTTPException: _on_http_error, Exception: _on_unhandled_error},
        openapi_config=None,
        logging_config=None,
    )


async def _flush_periodically(services: Services) -> None:
    while True:
        await asyncio.sleep(FLUSH_SECONDS)
        flush_fetched(services)


def flush_fetched(services: Services) -> None:
    """Mark results as fetched, many with one write."""
    fetched = services.cache.fetched_job_ids
    if fetched:
        services.queue.mark_fetched(list(fetched))
        fetched.clear()


def _on_http_error(request: HttpRequest, error: HTTPException) -> Response[bytes]:
    """Convert an error of the framework, such as an unknown path, to the API's error body."""
    endpoint = f"{request.scope['method']} {request.scope['path'][:200]}"
    messages = {
        404: _missing_checkpoint_message(request.scope["path"]) or f"no such endpoint: {endpoint}",
        405: f"{endpoint} is not allowed; allowed: {(error.headers or {}).get('allow', '')}",
    }
    message = messages.get(error.status_code, error.detail)
    is_user_error = error.status_code < 500
    category = RequestErrorCategory.User if is_user_error else RequestErrorCategory.Server
    return _to_litestar_response(
        error_response(error.status_code, message, category, error.headers)
    )


def _missing_checkpoint_message(path: str) -> str | None:
    """The error for a path that names a checkpoint by an incomplete id."""
    match = _CHECKPOINT_URL.match(path)
    if match is None:
        return None
    return (
        f"checkpoint {match[1][:200]!r} does not exist; a checkpoint id is {CHECKPOINT_ID_SHAPE}, "
        f"such as weights/0001, and a whole path {PATH_SHAPE}"
    )


def _on_unhandled_error(request: HttpRequest, error: Exception) -> Response[bytes]:
    return _to_litestar_response(
        internal_error_response(error, f"{request.scope['method']} {request.scope['path']}")
    )


def _to_litestar_response(response: RawResponse) -> Response[bytes]:
    return Response(
        response.body,
        status_code=response.status,
        media_type=response.content_type,
        headers=dict(response.headers),
    )
