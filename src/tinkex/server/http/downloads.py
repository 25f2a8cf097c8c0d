"""Downloads by signed, expiring URLs: signatures, byte ranges and streaming."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote

from litestar import HttpMethod, route
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from tinkex import clock
from tinkex.checkpoint.archive import ArchivePlan, plan_archive, plan_file
from tinkex.checkpoint.blob_cache import Pin
from tinkex.checkpoint.manifest import downloadable_names
from tinkex.errors import CheckpointError, NotFoundError, PermissionDeniedError, TinkexError
from tinkex.logs import get_logger
from tinkex.server.http.error_responses import response_for_error
from tinkex.server.http.prometheus import RequestMetrics
from tinkex.server.http.request_context import RawResponse, Services, run_in_thread
from tinkex.server.http.request_origin import HttpRequest
from tinkex.server.http.trace_export import iter_trace_json, trace_events
from tinkex.store import checkpoints, jobs, sessions, steps
from tinkex.store.database import Connection
from tinkex.wire.endpoints import PREFIX

#: Requests under this prefix need a signature instead of an API key.
FILES_PREFIX = f"{PREFIX}/files"


class FileArea(StrEnum):
    """The kind of a downloadable resource."""

    FILE = "checkpoints"  #: one file of a checkpoint
    ARCHIVE = "archives"  #: all files of a checkpoint in one tar
    TRACE = "traces"  #: the trace of a session


@dataclass(frozen=True, slots=True)
class FileRef:
    """The target of a URL; `name` is a path within a checkpoint, otherwise a fixed name."""

    area: FileArea
    owner_id: str
    name: str


def sign_url(secret: bytes, base_url: str, file_ref: FileRef, expires: int) -> str:
    """Create a URL that is valid until `expires`, in seconds since 1970."""
    owner_id = quote(file_ref.owner_id, safe=":")
    path = f"{FILES_PREFIX}/{file_ref.area}/{owner_id}/{quote(file_ref.name)}"
    return (
        f"{base_url}{path}?expires={expires}&signature={_sign_file_ref(secret, file_ref, expires)}"
    )


def verify_signed_url(
    secret: bytes, file_ref: FileRef, expires: str, signature: str, now: float
) -> None:
    """Raise PermissionDeniedError if the signature is invalid or has expired."""
    is_time = expires.isascii() and expires.isdigit() and len(expires) <= 12
    expected = _sign_file_ref(secret, file_ref, int(expires) if is_time else 0)
    if not is_time or not hmac.compare_digest(expected.encode(), signature.encode()):
        raise PermissionDeniedError("the link is not valid; request a new one")
    if int(expires) <= now:
        raise PermissionDeniedError("the link has expired; request a new one")


def _sign_file_ref(secret: bytes, file_ref: FileRef, expires: int) -> str:
    # Unambiguous: ids and names never contain a newline.
    text = "\n".join(("download", file_ref.area, file_ref.owner_id, file_ref.name, str(expires)))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


_RANGE_HEADER = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class ByteRange(NamedTuple):
    """The bytes from `start` up to but not including `stop`."""

    start: int
    stop: int


class RangeNotSatisfiable(Exception):
    """The requested range is outside of the file."""


def parse_range(headers: Mapping[str, str], size: int, etag: str) -> ByteRange | None:
    """Parse the Range header; None means the whole file.

    Invalid and multiple ranges are ignored, and so is a range whose If-Range does not match.
    """
    match = _RANGE_HEADER.fullmatch(headers.get("range", "").replace(" ", "").lower())
    if match is None or not (match[1] or match[2]):
        return None
    if headers.get("if-range", etag).strip() != etag:
        return None
    byte_range = _resolve_bounds(match[1], match[2], size)
    if byte_range is not None and byte_range.start >= byte_range.stop:
        raise RangeNotSatisfiable
    return byte_range


def _resolve_bounds(first: str, last: str, size: int) -> ByteRange | None:
    if not first:
        return ByteRange(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    return ByteRange(int(first), min(size, int(last) + 1) if last else size)


LOG = get_logger(__name__)
DOWNLOAD_METER = RequestMetrics("download")
#: The number of steps that the store keeps of a session.
MAX_TRACE_STEPS = 10_000
_MEDIA_TYPES = {".json": "application/json", ".tar": "application/x-tar"}


@dataclass(frozen=True, slots=True)
class DownloadResponse:
    """A response that is streamed in chunks."""

    status: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; this is the ASGI interface."""
        started_at = time.perf_counter()
        try:
            await self._send(scope, receive, send)
        finally:
            DOWNLOAD_METER.observe(self.status, time.perf_counter() - started_at)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        is_head = scope["type"] == ScopeType.HTTP and scope["method"] == "HEAD"
        if not is_head and not await _send_chunks(self.chunks, receive, send):
            # Without the last message the connection is closed, so the client notices.
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@route(
    f"{FILES_PREFIX}/{{area:str}}/{{owner_id:str}}/{{name:path}}",
    http_method=[HttpMethod.GET, HttpMethod.HEAD],
    name="download",
    status_code=200,
)
async def download(request: HttpRequest) -> ASGIApp:
    """Send the target of a signed URL; no API key is needed."""
    services: Services = request.app.state.services
    try:
        return await run_in_thread(_open_download, services, request.scope)
    except TinkexError as error:
        return _error_download(response_for_error(error))


def _open_download(services: Services, scope: Scope) -> DownloadResponse:
    """Verify the URL and prepare its response."""
    file_ref = _parse_file_ref(scope["path_params"])
    expires, signature = _parse_signature(scope["query_string"])
    verify_signed_url(services.secret, file_ref, expires, signature, clock.now())
    if file_ref.area is FileArea.TRACE:
        return _trace_response(services, file_ref.owner_id)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    plan, pin = _plan_download(services, file_ref)
    response = _file_response(plan, file_ref, headers)
    return replace(response, chunks=_close_after(response.chunks, pin))


def _parse_signature(query_string: bytes) -> tuple[str, str]:
    """The expiry and the signature of a URL, as text."""
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


def _parse_file_ref(path_params: Mapping[str, object]) -> FileRef:
    try:
        area = FileArea(str(path_params["area"]))
    except ValueError:
        raise NotFoundError("the file does not exist") from None
    return FileRef(area, str(path_params["owner_id"]), str(path_params["name"]).lstrip("/"))


# --- checkpoints -----------------------------------------------------------------------------
def _plan_download(services: Services, file_ref: FileRef) -> tuple[ArchivePlan, Pin]:
    """Plan the reads; only files that the checkpoint's manifest lists are ever opened."""
    now = clock.now()
    record = services.database.read(lambda db: checkpoints.find_by_id(db, file_ref.owner_id, now))
    if record is None:
        raise NotFoundError("the checkpoint was deleted or has expired")
    pin = services.storage.pin_checkpoint(record.id, record.place, record.path)
    try:
        if file_ref.area is FileArea.ARCHIVE:
            return plan_archive(pin.directory), pin
        return _plan_file(pin.directory, file_ref.name), pin
    except BaseException:
        pin.close()
        raise


def _close_after(chunks: Iterator[bytes], pin: Pin) -> Iterator[bytes]:
    """Yield all chunks; the files may be evicted afterwards, also if the client disconnects."""
    try:
        yield from chunks
    finally:
        pin.close()


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
        byte_range = parse_range(request_headers, plan.size, plan.etag)
    except RangeNotSatisfiable:
        headers |= {"content-range": f"bytes */{plan.size}", "content-length": "0"}
        return DownloadResponse(416, headers, iter(()))
    if byte_range is None:
        return DownloadResponse(200, headers | {"content-length": str(plan.size)}, plan.read())
    headers["content-range"] = f"bytes {byte_range.start}-{byte_range.stop - 1}/{plan.size}"
    headers["content-length"] = str(byte_range.stop - byte_range.start)
    return DownloadResponse(206, headers, plan.read(byte_range.start, byte_range.stop))


# --- traces ----------------------------------------------------------------------------------
def _trace_response(services: Services, session_id: str) -> DownloadResponse:
    def query(db: Connection) -> Iterator[bytes]:
        session = sessions.find(db, session_id)
        if session is None:
            raise NotFoundError(f"session {session_id!r} does not exist")
        finished = steps.list_by_session(db, session_id, limit=MAX_TRACE_STEPS)
        waiting = jobs.list_open_by_session(
            db, session.tenant_id, session_id, limit=MAX_TRACE_STEPS
        )
        return iter_trace_json(session, trace_events(session, finished, waiting, clock.now()))

    headers = {"content-type": "application/json", "cache-control": "no-store"}
    return DownloadResponse(200, headers, services.database.read(query))


# --- sending ---------------------------------------------------------------------------------
async def _send_chunks(chunks: Iterator[bytes], receive: Receive, send: Send) -> bool:
    """Send all chunks; False if the client disconnected or a file turned out to be damaged."""
    disconnected = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        while not disconnected.done():
            chunk = await run_in_thread(next, chunks, None)
            if chunk is None:
                return True
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        return False
    except CheckpointError as error:
        LOG.warning("aborted a download: %s", error)
        return False
    finally:
        disconnected.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


HANDLERS = [download]
"""Routes outside the endpoint table."""
