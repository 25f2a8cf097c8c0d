"""The read-only pages: the overview at `/`, one run at `/runs/<id>`, and `/cluster`."""

from __future__ import annotations

from collections.abc import Callable

from litestar import Response
from litestar.enums import HttpMethod
from litestar.handlers import route
from litestar.params import FromPath
from litestar.types import ControllerRouterHandler

from tinkex import clock
from tinkex.errors import InvalidInput, NotFoundError, StoreError
from tinkex.server.dashboard.login import (
    Visitor,
    find_visitor,
    login,
    login_page,
    logout,
    safe_target,
    show_login,
)
from tinkex.server.dashboard.queries import DashboardReader, PageCache
from tinkex.server.dashboard.rendering import page_response, serve_asset
from tinkex.server.http.request_context import Services
from tinkex.server.http.request_origin import HttpRequest
from tinkex.server.http.serializers import run_session_status
from tinkex.server.http.store_access import read

_READ_METHODS = [HttpMethod.GET, HttpMethod.HEAD]


@route("/", http_method=_READ_METHODS, name="overview")
async def show_overview(request: HttpRequest) -> Response[str]:
    """Show the visitor's runs, queue, checkpoints and sessions."""
    return await _render_page(request, "overview.html", DashboardReader.overview)


@route("/runs/{run_id:str}", http_method=_READ_METHODS, name="run_page")
async def show_run(request: HttpRequest, run_id: FromPath[str]) -> Response[str]:
    """Show one run: curve, latest steps and checkpoints."""
    return await _render_page(request, "run.html", lambda reader: reader.run(run_id))


@route("/cluster", http_method=_READ_METHODS, name="cluster_page")
async def show_cluster(request: HttpRequest) -> Response[str]:
    """Show the worker groups, their load, and the nodes of the cluster."""
    return await _render_page(request, "cluster.html", DashboardReader.cluster)


async def _render_page(
    request: HttpRequest,
    template: str,
    query: Callable[[DashboardReader], object],
) -> Response[str]:
    services: Services = request.app.state.services
    cache = _page_cache(request)
    try:
        visitor = await find_visitor(services, request)
        if visitor is None:
            return login_page(safe_target(request.scope["path"]))
        tenant_id, now = visitor.tenant.id, clock.now()
        quotas = services.quotas
        view = await read(
            services, lambda db: query(DashboardReader(db, cache, tenant_id, now, quotas))
        )
    except (NotFoundError, InvalidInput) as error:
        return page_response("fault.html", status=404, message=error.message)
    except StoreError as error:
        return page_response("fault.html", status=503, message=error.message)
    return page_response(
        template,
        view=view,
        now=now,
        visitor=visitor,
        base_url=str(request.base_url).rstrip("/"),
        key_file=_key_file(services, visitor),
        status_of=run_session_status,
    )


def _page_cache(request: HttpRequest) -> PageCache:
    state = request.app.state
    if "page_cache" not in state:
        state.page_cache = PageCache()
    cache: PageCache = state.page_cache
    return cache


def _key_file(services: Services, visitor: Visitor) -> str:
    """The path of the key file, for local visitors only."""
    return str(services.home.key_file) if visitor.is_local else ""


HANDLERS: list[ControllerRouterHandler] = [
    show_overview,
    show_run,
    show_cluster,
    show_login,
    login,
    logout,
    serve_asset,
]
