"""Templates to answers: everything is escaped, and nothing is loaded from elsewhere."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from litestar import Response

from tinkex.ids import path_segment
from tinkex.server.dashboard.assets import asset_url
from tinkex.server.dashboard.wording import FILTERS

PAGE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "vary": "cookie",
    "x-content-type-options": "nosniff",
}
"""Of every page: private, and a stranger's page can neither frame it nor read it."""


def _create_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tinkex.server.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(FILTERS, segment=path_segment)
    environment.globals["asset_url"] = asset_url
    return environment


_ENVIRONMENT = _create_environment()


def render(template: str, **context: Any) -> str:
    """A page as text."""
    return _ENVIRONMENT.get_template(template).render(context)


def page_response(template: str, *, status: int = 200, **context: Any) -> Response[str]:
    """A page as an answer."""
    return Response(
        render(template, **context),
        status_code=status,
        media_type="text/html",
        headers=dict(PAGE_HEADERS),
    )
