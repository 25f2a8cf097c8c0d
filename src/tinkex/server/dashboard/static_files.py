"""Static files of the pages: one bundle, whose URLs change with its content."""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

from litestar import Response
from litestar.enums import HttpMethod
from litestar.exceptions import NotFoundException
from litestar.handlers import route
from litestar.params import FromPath

from tinkex.server.http.request_origin import HttpRequest

_CONTENT_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def _read_files(directory: Traversable, prefix: str = "") -> dict[str, bytes]:
    """The files below a directory that pages may load, by path."""
    found: dict[str, bytes] = {}
    for entry in directory.iterdir():
        if entry.is_dir():
            found |= _read_files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(tuple(_CONTENT_TYPES)):
            found[prefix + entry.name] = entry.read_bytes()
    return found


def _hash_files(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha256(files[name]).digest())
    return digest.hexdigest()[:12]


_FILES = _read_files(resources.files("tinkex.server.dashboard") / "static")
#: The hash is a part of the path, so that it applies to relative imports of modules too.
_PREFIX = f"/static/{_hash_files(_FILES)}"
_HEADERS = {
    "cache-control": "public, max-age=31536000, immutable",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
}


def asset_url(name: str) -> str:
    """The URL of a static file."""
    if name not in _FILES:
        raise ValueError(f"there is no static file {name!r}")
    return f"{_PREFIX}/{name}"


@route(
    "/static/{version:str}/{name:path}",
    http_method=[HttpMethod.GET, HttpMethod.HEAD],
    name="static",
    sync_to_thread=False,
)
def serve_asset(
    request: HttpRequest, version: FromPath[str], name: FromPath[str]
) -> Response[bytes]:
    """Serve a static file; a page of another version must load itself again."""
    path = name.lstrip("/")
    if path not in _FILES or not _PREFIX.endswith(version):
        raise NotFoundException
    suffix = path[path.rindex(".") :]
    return Response(_FILES[path], media_type=_CONTENT_TYPES[suffix], headers=_HEADERS)
