"""The files that pages load: a style sheet, a script, an icon. They are part of the package."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Any

from litestar import Request, Response
from litestar.enums import HttpMethod
from litestar.exceptions import NotFoundException
from litestar.handlers import route
from litestar.params import FromPath

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
    # Their addresses change with their content.
    "cache-control": "public, max-age=31536000, immutable",
    "x-content-type-options": "nosniff",
}


def asset_url(name: str) -> str:
    """The address of a file; a new content has a new one."""
    return f"/static/{name}?v={hashlib.sha256(_ASSET_FILES[name]).hexdigest()[:12]}"


@route(
    "/static/{name:str}",
    http_method=[HttpMethod.GET, HttpMethod.HEAD],
    name="static",
    sync_to_thread=False,
)
def serve_asset(request: Request[Any, Any, Any], name: FromPath[str]) -> Response[bytes]:
    """Serve a file of the pages."""
    if name not in _ASSET_FILES:
        raise NotFoundException
    return Response(_ASSET_FILES[name], media_type=_ASSET_TYPES[name], headers=_ASSET_HEADERS)
