"""The pages besides runs: the playground, models, API keys, and usage with quotas."""

from __future__ import annotations

from litestar import Response
from litestar.handlers import route
from litestar.types import ControllerRouterHandler

from tinkex.errors import NotFoundError
from tinkex.server.dashboard.account_pages import read_keys, read_usage
from tinkex.server.dashboard.model_pages import read_models, read_playground
from tinkex.server.dashboard.page_views import READ_METHODS, render_page
from tinkex.server.dashboard.queries import DashboardReader
from tinkex.server.http.request_context import Services
from tinkex.server.http.request_origin import HttpRequest
from tinkex.store import keys
from tinkex.store.records import TenantRecord


@route("/playground", http_method=READ_METHODS, name="playground_page")
async def show_playground(request: HttpRequest) -> Response[str]:
    """Show the playground: chat with base models and checkpoints."""
    return await render_page(
        request,
        "playground.html",
        lambda reader: read_playground(reader.db, _tenant(reader), reader.now),
    )


@route("/models", http_method=READ_METHODS, name="models_page")
async def show_models(request: HttpRequest) -> Response[str]:
    """Show the served base models; the operator also sees who uses them and can add one."""
    services: Services = request.app.state.services
    return await render_page(
        request,
        "models.html",
        lambda reader: read_models(reader.db, _tenant(reader), services.config, reader.now),
    )


@route("/keys", http_method=READ_METHODS, name="keys_page")
async def show_keys(request: HttpRequest) -> Response[str]:
    """Show the visitor's API keys; the operator sees those of all tenants."""
    search = request.query_params.get("search", "")
    return await render_page(
        request, "keys.html", lambda reader: read_keys(reader.db, _tenant(reader), search)
    )


@route("/usage", http_method=READ_METHODS, name="usage_page")
async def show_usage(request: HttpRequest) -> Response[str]:
    """Show usage and quotas of the visitor's tenant; the operator can choose another one."""
    tenant_name = request.query_params.get("tenant", "")
    search = request.query_params.get("search", "")
    return await render_page(
        request,
        "usage.html",
        lambda reader: read_usage(
            reader.db, _tenant(reader), reader.quotas, reader.now, tenant_name, search
        ),
    )


def _tenant(reader: DashboardReader) -> TenantRecord:
    tenant = keys.find_tenant(reader.db, reader.tenant_id)
    if tenant is None:
        raise NotFoundError("the account does not exist")
    return tenant


HANDLERS: list[ControllerRouterHandler] = [show_playground, show_models, show_keys, show_usage]
