"""URLs that open one file for whoever has them, until they expire."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote

from litestar import HttpMethod, Request, route
from litestar.types import ASGIApp, Receive, Send

from tinkex import clock
from tinkex.checkpoint.archive import ArchivePlan, plan_archive, plan_file
from tinkex.checkpoint.manifest import downloadable_names
from tinkex.errors import CheckpointError, NotFoundError, PermissionDeniedError, TinkexError
from tinkex.logs import get_logger
from tinkex.server.http.error_responses import response_for_error
from tinkex.server.http.prometheus import RequestMetrics
from tinkex.server.http.request_context import RawResponse, Services, run_in_thread
from tinkex.server.http.trace_export import iter_trace_json, trace_events
from tinkex.store import checkpoints, jobs, sessions, steps
from tinkex.store.database import Connection
from tinkex.wire.endpoints import PREFIX

#: Below this, a signature takes the place of a key.
FILES_PREFIX = f"{PREFIX}/files"


class FileArea(StrEnum):
    """What kind of thing a URL opens."""

    FILE = "checkpoints"  #: one file of a checkpoint
    ARCHIVE = "archives"  #: all files of a checkpoint in one tar
    TRACE = "traces"  #: what a session did when


@dataclass(frozen=True, slots=True)
class FileRef:
    """What a URL opens; `name` is a file's path within its checkpoint, else a fixed name."""

    area: FileArea
    owner_id: str
    name: str


def sign_url(secret: bytes, base_url: str, file_ref: FileRef, expires: int) -> str:
    """A URL that works until that second."""
    owner_id = quote(file_ref.owner_id, safe=":")
    path = f"{FILES_PREFIX}/{file_ref.area}/{owner_id}/{quote(file_ref.name)}"
    return (
        f"{base_url}{path}?expires={expires}&signature={_sign_file_ref(secret, file_ref, expires)}"
    )


def verify_signed_url(
    secret: bytes, file_ref: FileRef, expires: str, signature: str, now: float
) -> None:
    """Refuse a URL that was not made here, or not for this place, or that is too old."""
    is_time = expires.isascii() and expires.isdigit() and len(expires) <= 12
    expected = _sign_file_ref(secret, file_ref, int(expires) if is_time else 0)
    if not is_time or not hmac.compare_digest(expected.encode(), signature.encode()):
        raise PermissionDeniedError("the link is not valid; ask for a new one")
    if int(expires) <= now:
        raise PermissionDeniedError("the link has expired; ask for a new one")


def _sign_file_ref(secret: bytes, file_ref: FileRef, expires: int) -> str:
    # No part contains a newline: ids and names never do, so no two places read the same.
    text = "\n".join(("download", file_ref.area, file_ref.owner_id, file_ref.name, str(expires)))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


_RANGE_HEADER = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class ByteRange(NamedTuple):
    """The bytes from `start` up to but not including `stop`."""

    start: int
    stop: int


class RangeNotSatisfiable(Exception):
    """Nothing of the file lies in the range that was asked for."""


def parse_range(headers: Mapping[str, str], size: int, etag: str) -> ByteRange | None:
    """The part to send, or None for all of it.

    What cannot be understood is ignored, as are several ranges at once; a range of a file that has
    changed since is ignored too.
    """
    asked = headers.get("range", "")
    match = _RANGE_HEADER.fullmatch(asked.replace(" ", "").lower())
    if match is None or not (match[1] or match[2]):
        return None
    if headers.get("if-range", etag).strip() != etag:
        return None
    part = _resolve_bounds(match[1], match[2], size)
    if part is None:
        return None
    if part.start >= part.stop:
        raise RangeNotSatisfiable
    return part


def _resolve_bounds(first: str, last: str, size: int) -> ByteRange | None:
    if not first:
        return ByteRange(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    return ByteRange(int(first), min(size, int(last) + 1) if last else size)


LOG = get_logger(__name__)
DOWNLOAD_METER = RequestMetrics("download")
#: As many as the store keeps of a session.
MAX_TRACE_STEPS = 10_000
_MEDIA_TYPES = {".json": "application/json", ".tar": "application/x-tar"}


@dataclass(frozen=True, slots=True)
class DownloadResponse:
    """An answer that is sent piece by piece."""

    status: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send it, as the framework asks for."""
        started_at = time.perf_counter()
        try:
            await self._send(scope, receive, send)
        finally:
            DOWNLOAD_METER.observe(self.status, time.perf_counter() - started_at)

    async def _send(self, scope: Any, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        start: Any = {"type": "http.response.start", "status": self.status, "headers": headers}
        await send(start)
        is_head = scope["method"] == "HEAD"
        if not is_head and not await _send_chunks(self.chunks, receive, send):
            # Without the last message the connection is closed: the client sees it was cut off.
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@route(
    f"{FILES_PREFIX}/{{shelf:str}}/{{owner_id:str}}/{{name:path}}",
    http_method=[HttpMethod.GET, HttpMethod.HEAD],
    name="download",
    status_code=200,
)
async def download(request: Request[Any, Any, Any]) -> ASGIApp:
    """Send what a signed URL opens; whoever has the URL needs no key."""
    services: Services = request.app.state.services
    try:
        return await run_in_thread(_open_download, services, request.scope)
    except TinkexError as error:
        return _error_download(response_for_error(error))


def _open_download(services: Services, scope: Any) -> DownloadResponse:
    """Check the URL and find what it opens."""
    place = _parse_file_ref(scope["path_params"])
    verify_signed_url(services.secret, place, *_parse_signature(scope["query_string"]), clock.now())
    if place.area is FileArea.TRACE:
        return _trace_response(services, place.owner_id)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return _file_response(_plan_download(services, place), place, headers)


def _parse_signature(query_string: bytes) -> tuple[str, str]:
    """Until when a URL is good, and the signature that says so."""
    try:
        query = parse_qs(query_string.decode("latin-1"), max_num_fields=8)
    except ValueError:
        query = {}
    return query.get("expires", [""])[0], query.get("signature", [""])[0]


def _error_download(response: RawResponse) -> DownloadResponse:
    headers = {
        "content-type": response.content_type,
        "content-length": str(len(response.body)),
        **response.headers,
    }
    return DownloadResponse(response.status, headers, iter((response.body,)))


def _parse_file_ref(path_params: Mapping[str, Any]) -> FileRef:
    try:
        shelf = FileArea(path_params["shelf"])
    except ValueError:
        raise NotFoundError("there is no such file") from None
    return FileRef(shelf, path_params["owner_id"], str(path_params["name"]).lstrip("/"))


# --- checkpoints -----------------------------------------------------------------------------
def _plan_download(services: Services, file_ref: FileRef) -> ArchivePlan:
    """What will be read; only what the checkpoint's manifest names is ever opened."""
    now = clock.now()
    found = services.database.read(lambda db: checkpoints.find_by_id(db, file_ref.owner_id, now))
    if found is None:
        raise NotFoundError("the checkpoint was deleted or has expired")
    directory = services.home.checkpoint_directory(found.id)
    services.verified_checkpoints.verify(directory, found.path)
    if file_ref.area is FileArea.ARCHIVE:
        return plan_archive(directory)
    return _plan_file(directory, file_ref.name)


def _plan_file(directory: Path, name: str) -> ArchivePlan:
    if name not in downloadable_names(directory):
        raise NotFoundError(f"the checkpoint has no file {name!r:.200}")
    return plan_file(directory / name)


def _file_response(
    plan: ArchivePlan, file_ref: FileRef, request_headers: Mapping[str, str]
) -> DownloadResponse:
    headers = {
        "content-type": _MEDIA_TYPES.get(Path(file_ref.name).suffix, "application/octet-stream"),
        "accept-ranges": "bytes",
        "etag": plan.etag,
        "cache-control": "private",
        "x-content-type-options": "nosniff",
    }
    try:
        part = parse_range(request_headers, plan.size, plan.etag)
    except RangeNotSatisfiable:
        headers |= {"content-range": f"bytes */{plan.size}", "content-length": "0"}
        return DownloadResponse(416, headers, iter(()))
    if part is None:
        return DownloadResponse(200, headers | {"content-length": str(plan.size)}, plan.read())
    headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{plan.size}"
    headers["content-length"] = str(part.stop - part.start)
    return DownloadResponse(206, headers, plan.read(part.start, part.stop))


# --- traces ----------------------------------------------------------------------------------
def _trace_response(services: Services, session_id: str) -> DownloadResponse:
    def look(db: Connection) -> Iterator[bytes]:
        session = sessions.find(db, session_id)
        if session is None:
            raise NotFoundError(f"there is no session {session_id!r}")
        done = steps.list_by_session(db, session_id, limit=MAX_TRACE_STEPS)
        waiting = jobs.list_open_by_session(
            db, session.tenant_id, session_id, limit=MAX_TRACE_STEPS
        )
        return iter_trace_json(session, trace_events(session, done, waiting, clock.now()))

    headers = {"content-type": "application/json", "cache-control": "no-store"}
    return DownloadResponse(200, headers, services.database.read(look))


# --- sending ---------------------------------------------------------------------------------
async def _send_chunks(chunks: Iterator[bytes], receive: Receive, send: Send) -> bool:
    """Send piece by piece; False if the client went away or the file was damaged on the way."""
    gone = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        while not gone.done():
            piece = await run_in_thread(next, chunks, None)
            if piece is None:
                return True
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        return False
    except CheckpointError as error:
        LOG.warning("a download was cut off: %s", error)
        return False
    finally:
        gone.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


HANDLERS = [download]
"""Routes that are no rows of the endpoint table."""
