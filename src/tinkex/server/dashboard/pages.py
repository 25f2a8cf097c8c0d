"""The read-only pages: the overview at `/`, one run at `/runs/<id>`, and `/cluster`."""

from __future__ import annotations

from litestar import Response
from litestar.handlers import route
from litestar.params import FromPath
from litestar.types import ControllerRouterHandler

from tinkex.server.dashboard.login import login, logout, show_login
from tinkex.server.dashboard.page_actions import HANDLERS as ACTIONS
from tinkex.server.dashboard.page_data import HANDLERS as DATA_HANDLERS
from tinkex.server.dashboard.page_views import READ_METHODS, render_page
from tinkex.server.dashboard.queries import DashboardReader, parse_filter
from tinkex.server.dashboard.static_files import serve_asset
from tinkex.server.dashboard.workspace_pages import HANDLERS as WORKSPACE_PAGES
from tinkex.server.http.request_origin import HttpRequest


@route("/", http_method=READ_METHODS, name="overview")
async def show_overview(request: HttpRequest) -> Response[str]:
    """Show the visitor's runs, queue, checkpoints and sessions."""
    wanted = parse_filter(request.query_params)
    return await render_page(request, "overview.html", lambda reader: reader.overview(wanted))


@route("/runs/{run_id:str}", http_method=READ_METHODS, name="run_page")
async def show_run(request: HttpRequest, run_id: FromPath[str]) -> Response[str]:
    """Show one run: curve, latest steps and checkpoints."""
    return await render_page(request, "run.html", lambda reader: reader.run(run_id))


@route("/cluster", http_method=READ_METHODS, name="cluster_page")
async def show_cluster(request: HttpRequest) -> Response[str]:
    """Show the worker groups, their load, and the nodes of the cluster."""
    return await render_page(request, "cluster.html", DashboardReader.cluster)


HANDLERS: list[ControllerRouterHandler] = [
    show_overview,
    show_run,
    show_cluster,
    show_login,
    login,
    logout,
    serve_asset,
    *WORKSPACE_PAGES,
    *ACTIONS,
    *DATA_HANDLERS,
]
