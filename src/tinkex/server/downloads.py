"""Files by signed URLs: whole or in ranges, streamed, so that their size does not matter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from litestar import HttpMethod, Request, route
from litestar.types import ASGIApp, Receive, Send

from tinkex import clock
from tinkex.checkpoint.archive import ArchivePlan, plan_archive, plan_file
from tinkex.checkpoint.manifest import downloadable_names
from tinkex.errors import CheckpointError, NotFoundError, TinkexError
from tinkex.logs import get_logger
from tinkex.server.call import Answer, Services, in_thread
from tinkex.server.metrics import RequestMeter
from tinkex.server.ranges import NoSuchPart, part_of
from tinkex.server.refusals import refusal
from tinkex.server.signing import FILES, Place, Shelf, check
from tinkex.server.tracing import trace_events, write_trace
from tinkex.store import checkpoints, jobs, sessions, steps
from tinkex.store.database import Connection

LOG = get_logger(__name__)
METER = RequestMeter("download")
#: As many as the store keeps of a session.
MAX_STEPS = 10_000
_TYPES = {".json": "application/json", ".tar": "application/x-tar"}


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer that is sent piece by piece."""

    status: int
    headers: Mapping[str, str]
    pieces: Iterator[bytes]

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send it, as the framework asks for."""
        started_at = time.perf_counter()
        try:
            await self._send(scope, receive, send)
        finally:
            METER.count(self.status, time.perf_counter() - started_at)

    async def _send(self, scope: Any, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        start: Any = {"type": "http.response.start", "status": self.status, "headers": headers}
        await send(start)
        is_head = scope["method"] == "HEAD"
        if not is_head and not await _send_pieces(self.pieces, receive, send):
            # Without the last message the connection is closed: the client sees it was cut off.
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@route(
    f"{FILES}/{{shelf:str}}/{{owner_id:str}}/{{name:path}}",
    http_method=[HttpMethod.GET, HttpMethod.HEAD],
    name="download",
    status_code=200,
)
async def download(request: Request[Any, Any, Any]) -> ASGIApp:
    """Send what a signed URL opens; whoever has the URL needs no key."""
    services: Services = request.app.state.services
    try:
        return await in_thread(_open, services, request.scope)
    except TinkexError as error:
        return _refused(refusal(error))


def _open(services: Services, scope: Any) -> Stream:
    """Check the URL and find what it opens."""
    place = _place(scope["path_params"])
    check(services.secret, place, *_proof(scope["query_string"]), clock.now())
    if place.shelf is Shelf.TRACE:
        return _trace(services, place.owner_id)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return _file(_plan(services, place), place, headers)


def _proof(query_string: bytes) -> tuple[str, str]:
    """Until when a URL is good, and the signature that says so."""
    try:
        query = parse_qs(query_string.decode("latin-1"), max_num_fields=8)
    except ValueError:
        query = {}
    return query.get("expires", [""])[0], query.get("signature", [""])[0]


def _refused(answer: Answer) -> Stream:
    headers = {
        "content-type": answer.content_type,
        "content-length": str(len(answer.body)),
        **answer.headers,
    }
    return Stream(answer.status, headers, iter((answer.body,)))


def _place(path_params: Mapping[str, Any]) -> Place:
    try:
        shelf = Shelf(path_params["shelf"])
    except ValueError:
        raise NotFoundError("there is no such file") from None
    return Place(shelf, path_params["owner_id"], str(path_params["name"]).lstrip("/"))


# --- checkpoints -----------------------------------------------------------------------------
def _plan(services: Services, place: Place) -> ArchivePlan:
    """What will be read; only what the checkpoint's manifest names is ever opened."""
    now = clock.now()
    found = services.database.read(lambda db: checkpoints.find_by_id(db, place.owner_id, now))
    if found is None:
        raise NotFoundError("the checkpoint was deleted or has expired")
    directory = services.home.checkpoint_directory(found.id)
    services.verified.verify(directory, found.path)
    if place.shelf is Shelf.ARCHIVE:
        return plan_archive(directory)
    return _plan_file(directory, place.name)


def _plan_file(directory: Path, name: str) -> ArchivePlan:
    if name not in downloadable_names(directory):
        raise NotFoundError(f"the checkpoint has no file {name!r:.200}")
    return plan_file(directory / name)


def _file(plan: ArchivePlan, place: Place, asked: Mapping[str, str]) -> Stream:
    headers = {
        "content-type": _TYPES.get(Path(place.name).suffix, "application/octet-stream"),
        "accept-ranges": "bytes",
        "etag": plan.etag,
        "cache-control": "private",
        "x-content-type-options": "nosniff",
    }
    try:
        part = part_of(asked, plan.size, plan.etag)
    except NoSuchPart:
        headers |= {"content-range": f"bytes */{plan.size}", "content-length": "0"}
        return Stream(416, headers, iter(()))
    if part is None:
        return Stream(200, headers | {"content-length": str(plan.size)}, plan.read())
    headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{plan.size}"
    headers["content-length"] = str(part.stop - part.start)
    return Stream(206, headers, plan.read(part.start, part.stop))


# --- traces ----------------------------------------------------------------------------------
def _trace(services: Services, session_id: str) -> Stream:
    def look(db: Connection) -> Iterator[bytes]:
        session = sessions.find(db, session_id)
        if session is None:
            raise NotFoundError(f"there is no session {session_id!r}")
        done = steps.list_by_session(db, session_id, limit=MAX_STEPS)
        waiting = jobs.list_open_by_session(db, session.tenant_id, session_id, limit=MAX_STEPS)
        return write_trace(session, trace_events(session, done, waiting, clock.now()))

    headers = {"content-type": "application/json", "cache-control": "no-store"}
    return Stream(200, headers, services.database.read(look))


# --- sending ---------------------------------------------------------------------------------
async def _send_pieces(pieces: Iterator[bytes], receive: Receive, send: Send) -> bool:
    """Send piece by piece; False if the client went away or the file was damaged on the way."""
    gone = asyncio.create_task(_wait_until_gone(receive))
    try:
        while not gone.done():
            piece = await in_thread(next, pieces, None)
            if piece is None:
                return True
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        return False
    except CheckpointError as error:
        LOG.warning("a download was cut off: %s", error)
        return False
    finally:
        gone.cancel()


async def _wait_until_gone(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


HANDLERS = [download]
"""Routes that are no rows of the endpoint table."""
