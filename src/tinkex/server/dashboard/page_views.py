"""Pages of a visitor: read the data in one transaction, then render the template."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from litestar import Response
from litestar.enums import HttpMethod

from tinkex import clock
from tinkex.errors import InvalidInput, NotFoundError, StoreError
from tinkex.server.dashboard.login import login_page, safe_target
from tinkex.server.dashboard.navigation import is_current, visible_links
from tinkex.server.dashboard.page_session import Visitor, find_visitor
from tinkex.server.dashboard.queries import DashboardReader, PageCache
from tinkex.server.dashboard.rendering import page_response
from tinkex.server.http.request_context import Services
from tinkex.server.http.request_origin import HttpRequest, read_origin
from tinkex.server.http.serializers import run_session_status
from tinkex.server.http.store_access import read

T = TypeVar("T")
READ_METHODS = [HttpMethod.GET, HttpMethod.HEAD]


async def render_page(
    request: HttpRequest, template: str, query: Callable[[DashboardReader], object]
) -> Response[str]:
    """Render a page of the visitor's data; a login form or an error page otherwise."""
    services: Services = request.app.state.services
    path = request.scope["path"]
    try:
        visitor = await find_visitor(services, read_origin(request.scope))
        if visitor is None:
            return login_page(safe_target(path))
        now = clock.now()
        view, has_cluster = await read_page(
            request, visitor.tenant.id, lambda reader: (query(reader), reader.has_cluster())
        )
    except (NotFoundError, InvalidInput) as error:
        return page_response("fault.html", status=404, message=error.message)
    except StoreError as error:
        return page_response("fault.html", status=503, message=error.message)
    links = visible_links(is_operator=visitor.is_operator, has_cluster=has_cluster)
    return page_response(
        template,
        view=view,
        now=now,
        visitor=visitor,
        links=[(link, is_current(link, path)) for link in links],
        base_url=str(request.base_url).rstrip("/"),
        key_file=_key_file(services, visitor),
        status_of=run_session_status,
    )


async def read_page(
    request: HttpRequest, tenant_id: str, query: Callable[[DashboardReader], T]
) -> T:
    """Read data of a tenant's page on a thread, within one transaction."""
    services: Services = request.app.state.services
    cache, now, quotas = _page_cache(request), clock.now(), services.quotas
    return await read(
        services, lambda db: query(DashboardReader(db, cache, tenant_id, now, quotas))
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
