"""Render templates, and serve the static files of the pages."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from litestar import Response
from litestar.enums import HttpMethod
from litestar.exceptions import NotFoundException
from litestar.handlers import route
from litestar.params import FromPath

from tinkex.ids import path_segment
from tinkex.server.dashboard.formatting import FILTERS
from tinkex.server.http.request_origin import HttpRequest

_ASSET_TYPES = {
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_ASSET_FILES = {
    name: (resources.files("tinkex.server.dashboard") / "static" / name).read_bytes()
    for name in _ASSET_TYPES
}
_ASSET_HEADERS = {
    # Their URLs change with their content.
    "cache-control": "public, max-age=31536000, immutable",
    "x-content-type-options": "nosniff",
}


def asset_url(name: str) -> str:
    """The URL of a static file, with a hash of its content."""
    return f"/static/{name}?v={hashlib.sha256(_ASSET_FILES[name]).hexdigest()[:12]}"


@route(
    "/static/{name:str}",
    http_method=[HttpMethod.GET, HttpMethod.HEAD],
    name="static",
    sync_to_thread=False,
)
def serve_asset(request: HttpRequest, name: FromPath[str]) -> Response[bytes]:
    """Serve a static file."""
    if name not in _ASSET_FILES:
        raise NotFoundException
    return Response(_ASSET_FILES[name], media_type=_ASSET_TYPES[name], headers=_ASSET_HEADERS)


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
"""Headers of every page: not cached, and other sites can neither frame nor read it."""


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
    """Render a template to text."""
    return _ENVIRONMENT.get_template(template).render(context)


def page_response(template: str, *, status: int = 200, **context: Any) -> Response[str]:
    """Render a template to a response."""
    return Response(
        render(template, **context),
        status_code=status,
        media_type="text/html",
        headers=dict(PAGE_HEADERS),
    )
